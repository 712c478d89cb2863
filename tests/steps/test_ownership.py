"""Which checkpoints belong to a root: below it, in its store and on its nodes."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.provenance import Commit, Run, RunParent
from mcore_ckpt.errors import CommitError
from mcore_ckpt.steps import runs
from mcore_ckpt.steps.remote_steps import RemoteRole, _claimant
from mcore_ckpt.steps.runs import Ownership, RootRun


def run(name: str, root: Path | str = "/elsewhere", parent: RunParent | None = None) -> Run:
    return Run(name, parent, str(root), "host")


def head(of: Run | None, number: int) -> ManifestSummary:
    """What the manifest of a step says, whose number is also that of its commit."""
    commit = None if of is None else Commit(number, None, ((1, number),))
    return ManifestSummary(number, "actor", ("actor",), f"{number:032x}", "", of, commit)


def made(root: Path, known: RootRun) -> RootRun:
    """A root with its file."""
    root.mkdir(parents=True)
    (root / ".run.json").write_bytes(runs.encode(known))
    return known


def test_the_file_says_what_was_written() -> None:
    known = RootRun(run("b", "/b", RunParent("a", 3)), {"a": 3, "z": 2}, {"actor": 7})
    assert runs.decode(runs.encode(known)) == known
    assert runs.decode(runs.encode(RootRun(run("b")))) == RootRun(run("b"))
    assert runs.decode(b'{"id": "b", "inherits": ["a"]}') is None


@pytest.mark.parametrize("place", ["below", "store", "unclaimed store", "nodes"])
def test_what_a_run_has_inherited_is_its_own_everywhere(tmp_path: Path, place: str) -> None:
    """What the other run has committed since then is not."""
    known = made(tmp_path / "b", RootRun(run("b", tmp_path / "b"), {"a": 2}))
    own = {
        "below": runs.below(tmp_path / "b"),
        "store": runs.elsewhere(tmp_path / "b", claimed=known),
        "unclaimed store": runs.elsewhere(tmp_path / "b"),
        "nodes": runs.elsewhere(tmp_path / "b", tmp_path / "b"),
    }[place]
    a, others = run("a", "/a"), run("x", "/x")
    heads = [*(head(a, number) for number in (1, 2, 3)), head(run("b", "/b"), 3), head(others, 1), head(None, 1)]
    assert [own.owns(each) for each in heads] == [True, True, False, True, False, True]
    with pytest.raises(CommitError, match="step 3 is there already, and belongs to another run"):
        own.check(tmp_path, heads)


@pytest.mark.parametrize("is_claimed", [True, False])
def test_a_root_on_a_new_disk_takes_over_what_a_root_of_its_path_has_saved(tmp_path: Path, is_claimed: bool) -> None:
    claimed = RootRun(run("b", tmp_path), {"a": 2}) if is_claimed else None
    own = runs.elsewhere(tmp_path, claimed=claimed)
    heads = [head(run("b", tmp_path), 4), head(run("x", "/x"), 4), head(run("a", "/a"), 2), head(None, 1)]
    assert [own.owns(each) for each in heads] == [True, False, is_claimed, True]
    own = runs.elsewhere(tmp_path, claimed=RootRun(run("x", "/x")))
    assert [own.owns(each) for each in (head(run("x", "/x"), 4), head(None, 1))] == [False, False]


def test_all_steps_below_a_root_without_a_run_are_its_own(tmp_path: Path) -> None:
    assert runs.below(tmp_path).owns(head(run("x"), 1))
    assert Ownership().owns(head(None, 1))


@pytest.mark.parametrize("call", ["read_small", "os.pread"])
def test_a_file_that_cannot_be_read_now_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Otherwise the steps of every run below the root would be loaded, and deleted."""
    made(tmp_path / "a", RootRun(run("a", tmp_path / "a")))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(runs if call == "read_small" else os, call.split(".")[-1], fail)
    for ask in (runs.below, runs.elsewhere):
        with pytest.raises(OSError, match="Input/output error"):
            ask(tmp_path / "a")
    assert not runs.is_copied(tmp_path, run("a", tmp_path / "a"))


def test_a_copy_knows_in_its_folder_what_belongs_to_the_copied_run(tmp_path: Path) -> None:
    known = made(tmp_path / "a", RootRun(run("a", tmp_path / "a")))
    made(tmp_path / "b", known)
    for own, belongs in ((runs.below(tmp_path / "b"), True), (runs.elsewhere(tmp_path / "b"), False)):
        assert own.owns(head(known.run, 1)) == belongs
        assert not own.owns(head(run("x", "/x"), 1))


def test_a_copy_of_a_copy_comes_from_the_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    b = made(tmp_path / "b", RootRun(run("b", tmp_path / "b", RunParent("a", 2)), {"a": 2}))
    made(tmp_path / "c", b)
    heads = [head(run("a", "/a"), 1), head(run("a", "/a"), 2), head(b.run, 3), head(run("x", "/x"), 9)]
    with caplog.at_level(logging.WARNING):
        settled = runs.settle(tmp_path / "c", tmp_path / "c", heads, None, None)
    assert "is a copy of" in caplog.text
    assert settled.run.parent == RunParent("b", 3)
    assert settled.inherits == {"a": 2, "b": 3}
    assert runs.read_root_run(tmp_path / "c") == settled
    assert runs.settle(tmp_path / "c", tmp_path / "c", heads, None, None) == settled


def test_two_roles_of_a_copy_begin_at_once_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the steps of one of them would be of another run for ever."""
    root, known = tmp_path / "b", made(tmp_path / "a", RootRun(run("a", tmp_path / "a")))
    made(root, known)
    critic: list[RootRun] = []

    def replace_file(path: Path, data: bytes) -> None:
        monkeypatch.undo()
        critic.append(runs.settle(root, root, [head(known.run, 1)], None, None))
        runs.replace_file(path, data)

    monkeypatch.setattr(runs, "replace_file", replace_file)
    actor = runs.settle(root, root, [head(known.run, 1)], None, None)
    assert actor == critic[0] == runs.read_root_run(root)
    assert actor.run.id != "a"


def test_a_lost_file_is_made_again_from_the_manifests(tmp_path: Path) -> None:
    """The parents are followed. Neither another run's steps that lie there count, nor what was loaded from it since."""
    a, b = run("a", "/a"), run("b", "/b", RunParent("a", 2))
    c, later = (run("c", tmp_path, RunParent(*parent)) for parent in (("b", 3), ("x", 9)))
    heads = [head(run("x", "/x"), 9), head(later, 5), head(c, 4), head(b, 3), head(a, 2), head(a, 1)]
    settled = runs.settle(tmp_path, tmp_path, heads, None, None)
    assert (settled.run.id, settled.inherits) == ("c", {"a": 2, "b": 3})


@pytest.mark.parametrize("there", [[], [("a", 1)], [("b", 3), ("a", 2)], [("x", 1), ("b", 3)]])
def test_who_claims_a_store(there: list[tuple[str, int]]) -> None:
    """Steps that were inherited may be in the store of the run that has saved them."""
    own = RootRun(run("b", "/b"), {"a": 2})
    found = [RemoteRole(**vars(head(run(name), number))) for name, number in there]
    expected = {"": "b", "a": "a", "ba": "b", "xb": "x"}["".join(name for name, _ in there)]
    assert _claimant(own, found).run.id == expected
