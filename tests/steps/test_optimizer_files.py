"""Old steps lose their optimizer: what is left, who prevents it, and what a dead process leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt import pin
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.io.store import Store
from mcore_ckpt.steps import commit, leftovers, optimizer_files, work_folders
from mcore_ckpt.steps.choice import newest
from mcore_ckpt.steps.listing import complete_steps, list_steps
from mcore_ckpt.steps.optimizer_files import drop_optimizer, find_dropped, remove_dropped
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps, judge
from mcore_ckpt.steps.upload import Upload
from mcore_ckpt.steps.upload_queue import UploadQueue
from mcore_ckpt.tools.maintain.prune import prune
from tests.support.checkpoints import ROLE, Crash, crash, dead_owner, own, stage
from tests.support.small_steps import FILES, OPTIMIZER_FILES, save_small

ONE = PreservationPolicy(optimizer_for_last=1)


def with_optimizer(root: Path) -> list[str]:
    """The roles that have an optimizer, by their manifests and on the disk."""
    found = [path.parent for path in sorted(root.glob("*/[!.]*/manifest.json"))]
    listed = [path for path in found if "optimizer" in read_manifest(path).contents]
    assert listed == [path for path in found if (path / "optim").exists()]
    return [path.relative_to(root).as_posix().removeprefix("global_steps_") for path in listed]


def test_what_is_left(tmp_path: Path) -> None:
    before = [read_manifest(save_small(tmp_path, step, metrics={"reward": step})) for step in (1, 2)]
    assert delete_old_steps(tmp_path, ONE) == []
    left = read_manifest(tmp_path / "global_steps_1" / ROLE)
    assert {file.path for file in left.files} == set(FILES) - set(OPTIMIZER_FILES)
    assert (left.contents, left.dropped) == (("model", "extra"), ("optimizer",))
    assert (left.attempt, left.created, left.metrics) == (before[0].attempt, before[0].created, {"reward": 1.0})
    assert sorted(os.listdir(tmp_path / "global_steps_1" / ROLE)) == ["manifest.json", "model", "rng_states"]
    assert [status.step for status in complete_steps(tmp_path)] == [1, 2]
    assert with_optimizer(tmp_path) == ["2/actor"]


def test_a_role_in_the_step_s_own_folder(tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        (save_small(tmp_path, step, flat=True) / "data.pt").write_bytes(b"of a trainer")
    (status, _) = list_steps(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_files, "remove_tree", crash)
        with pytest.raises(Crash):
            drop_optimizer(status, [ROLE])
    own(status.path, dead_owner(dead_pid))
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert sorted(os.listdir(status.path)) == ["data.pt", "manifest.json", "model", "rng_states"]
    delete_old_steps(tmp_path, PreservationPolicy(optimizer_for_last=2))
    assert all(each.is_complete for each in list_steps(tmp_path))


def test_each_role_keeps_the_optimizers_of_its_own_newest_steps(tmp_path: Path) -> None:
    for step, role in ((1, "critic"), (1, "actor"), (2, "actor"), (3, "actor")):
        save_small(tmp_path, step, role=role, roles=("actor", "critic") if step == 1 else ("actor",))
    delete_old_steps(tmp_path, PreservationPolicy(optimizer_for_last=2))
    assert with_optimizer(tmp_path) == ["1/critic", "2/actor", "3/actor"]
    assert all(status.is_complete for status in list_steps(tmp_path))


def test_a_role_without_weights_keeps_its_optimizer(tmp_path: Path) -> None:
    """Nothing would be left to load."""
    for step in (1, 2):
        save_small(tmp_path, step, contents=("optimizer", "extra"))
    delete_old_steps(tmp_path, ONE)
    assert with_optimizer(tmp_path) == ["1/actor", "2/actor"]


def test_steps_that_were_saved_without_an_optimizer_do_not_count(tmp_path: Path) -> None:
    """Else nothing would be left to resume from."""
    for step in (1, 2):
        save_small(tmp_path, step)
    for step in (3, 4):
        save_small(tmp_path, step, contents=("model",))
    assert [each.loses for each in judge(list_steps(tmp_path), ONE)] == [(ROLE,), (), (), ()]


def test_a_role_that_has_lost_its_optimizer_does_not_lose_it_again(tmp_path: Path) -> None:
    for step in (1, 2):
        save_small(tmp_path, step)
    assert [decision.loses for decision in judge(list_steps(tmp_path), ONE)] == [(ROLE,), ()]
    delete_old_steps(tmp_path, ONE)
    assert [decision.loses for decision in judge(list_steps(tmp_path), ONE)] == [(), ()]


def test_incomplete_steps_neither_count_nor_lose_it(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    save_small(tmp_path, 2)
    save_small(tmp_path, 3, roles=("actor", "critic"))
    (save_small(tmp_path, 4) / "model" / "a.pt").unlink()
    delete_old_steps(tmp_path, ONE)
    assert with_optimizer(tmp_path) == ["2/actor", "3/actor", "4/actor"]


def read(root: Path) -> Callable[[], object]:
    manager = reading([root / "global_steps_1" / ROLE])
    manager.__enter__()
    return lambda: manager.__exit__(None, None, None)


def pinned(root: Path) -> Callable[[], object]:
    pin(root, 1)
    return (root / "global_steps_1" / file_names.PINNED_FILE).unlink


def saved_again(root: Path) -> Callable[[], object]:
    staging, _ = stage(root / "global_steps_1" / ROLE, 2)
    return lambda: commit.discard(staging)


def uploaded(root: Path) -> Callable[[], object]:
    manager = work_folders.kept_for_upload(root / "global_steps_1" / ROLE, "a" * 32)
    manager.__enter__()
    return lambda: manager.__exit__(None, None, None)


@pytest.mark.parametrize("use", [read, pinned, saved_again, uploaded])
def test_who_prevents_it(tmp_path: Path, use: Callable[[Path], Callable[[], object]]) -> None:
    for step in (1, 2):
        save_small(tmp_path, step)
    end = use(tmp_path)
    assert judge(list_steps(tmp_path), ONE)[0].loses == (() if use is pinned else (ROLE,))
    delete_old_steps(tmp_path, ONE)
    assert with_optimizer(tmp_path) == ["1/actor", "2/actor"]
    end()
    delete_old_steps(tmp_path, ONE)
    assert with_optimizer(tmp_path) == ["2/actor"]


def test_a_removal_reads_the_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small(tmp_path, 1)
    (status,) = list_steps(tmp_path)
    read, seen = optimizer_files._manifest_in, list[Path]()

    def counted(folder: int, role_dir: Path) -> Manifest:
        seen.append(role_dir)
        return read(folder, role_dir)

    monkeypatch.setattr(optimizer_files, "_manifest_in", counted)
    assert drop_optimizer(status, [ROLE]) is None
    assert with_optimizer(tmp_path) == []
    assert seen == [status.role_dir(ROLE)]


def test_an_upload_that_begins_meanwhile_finds_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role_dir = save_small(tmp_path, 1)
    (status,) = list_steps(tmp_path)
    replace_manifest, mark = optimizer_files._replace_manifest, work_folders.kept_for_upload(role_dir, "a" * 32)

    def late(*args: object) -> None:
        mark.__enter__()
        replace_manifest(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(optimizer_files, "_replace_manifest", late)
    assert "being copied" in str(drop_optimizer(status, [ROLE]))
    assert all((role_dir / name).exists() for name in FILES)
    mark.__exit__(None, None, None)
    (status,) = list_steps(tmp_path)
    assert drop_optimizer(status, [ROLE]) is None
    assert with_optimizer(tmp_path) == []


def test_a_save_that_replaces_the_step_meanwhile_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role_dir = save_small(tmp_path, 1)
    (status,) = list_steps(tmp_path)
    for name in ("write_file", "is_in_use"):
        with monkeypatch.context() as patch:
            call = getattr(optimizer_files, name)

            def late(*args: object, call: Callable[..., object] = call) -> object:
                save_small(tmp_path, 1)
                return call(*args)

            patch.setattr(optimizer_files, name, late)
            drop_optimizer(status, [ROLE])
        assert all((role_dir / file).read_text() == read_manifest(role_dir).attempt for file in FILES), name
        (status,) = list_steps(tmp_path)
        assert status.is_complete
        assert not status.dropped


@pytest.mark.parametrize("point", ["remove_tree", "_remove_unlisted"])
def test_prune_and_the_next_start_remove_what_a_dead_process_has_left(
    tmp_path: Path, dead_pid: int, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    role_dir = save_small(tmp_path, 1)
    for clean in ("start", "prune"):
        save_small(tmp_path, 1)
        (status,) = list_steps(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(optimizer_files, point, crash)
            with pytest.raises(Crash):
                drop_optimizer(status, [ROLE])
        assert [status.step for status in complete_steps(tmp_path)] == [1]
        assert find_dropped(role_dir) == [], "its owner lives"
        own(role_dir, dead_owner(dead_pid))
        (left,) = find_dropped(role_dir)
        shown = [each for each in prune(tmp_path, PreservationPolicy(), dry_run=True) if each.step is None]
        assert [(each.path, each.stays) for each in shown] == [(left, False)]
        if clean == "start":
            leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
        else:
            prune(tmp_path, PreservationPolicy())
        assert sorted(os.listdir(role_dir)) == ["manifest.json", "model", "rng_states"]


def test_files_that_the_manifest_lists_are_not_removed(tmp_path: Path, dead_pid: int) -> None:
    role_dir = save_small(tmp_path, 1)
    manifest = read_manifest(role_dir)
    (role_dir / file_names.MANIFEST_FILE).unlink()
    commit.write_manifest(role_dir, replace(manifest, dropped=("optimizer",)))
    own(role_dir, dead_owner(dead_pid))
    assert remove_dropped(role_dir) == []
    assert all((role_dir / name).exists() for name in FILES)


def test_the_store_keeps_what_was_uploaded(tmp_path: Path) -> None:
    """And an upload that had failed goes on with what is left."""
    root, store = tmp_path / "root", Store(f"file://{tmp_path}/store")
    remote = RemoteSteps(store)
    queue = UploadQueue(remote, root, ROLE, PreservationPolicy())
    save_small(root, 1)
    queue.committed(1)
    assert queue.wait(20)
    failed = Upload(store, save_small(root, 2), threading.Event())
    queue._begun[failed.key] = failed
    save_small(root, 3)
    delete_old_steps(root, ONE)
    queue.committed(3)
    assert queue.wait(20)
    there = {step.step: step for step in remote.steps()}
    assert {step: sorted(each.dropped) for step, each in there.items()} == {1: [], 2: ["optimizer"], 3: []}
    assert all(each.is_complete for each in there.values())
    queue.close(5)


def test_a_step_and_its_upload_are_one_attempt(tmp_path: Path) -> None:
    """The order of commits, by which a load chooses, does not change."""
    for step in (1, 2):
        save_small(tmp_path, step)
    before = [(status.step, status.heads[0].attempt) for status in list_steps(tmp_path)]
    delete_old_steps(tmp_path, ONE)
    assert [(status.step, status.heads[0].attempt) for status in list_steps(tmp_path)] == before
    last = newest(list_steps(tmp_path))
    assert last is not None
    assert last.step == 2


def test_each_rule_that_keeps_a_step_is_named(tmp_path: Path) -> None:
    for step in range(1, 7):
        save_small(tmp_path, step, metrics={"reward": -step, "loss": step})
    policy = PreservationPolicy(1, keep_every=4, keep_best=["reward:1:max", ("loss", 2, "max")], optimizer_for_last=3)
    no_rule = "not among the newest 1 of any role, nor among the best 1 by reward, nor among the best 2 by loss"
    decisions = judge(list_steps(tmp_path), policy)
    assert {each.status.step: (each.stays, each.reason, each.loses) for each in decisions} == {
        1: (True, "among the best 1 by reward (max): -1", (ROLE,)),
        2: (False, no_rule, ()),
        3: (False, no_rule, ()),
        4: (True, "a multiple of 4", ()),
        5: (True, "among the best 2 by loss (max): 5", ()),
        6: (True, "among the newest 1 of actor; among the best 2 by loss (max): 6", ()),
    }
