"""What saves into the fast tier share: when a step is durable, and which steps stay on a node."""

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt import pin, unpin
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile, encode_manifest
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.config import FastTier
from mcore_ckpt.errors import CommitError
from mcore_ckpt.fast.copies import Copies
from mcore_ckpt.fast.drains import DrainHandle, Drains
from mcore_ckpt.fast.saves import FastSaves
from mcore_ckpt.steps.commit import remove_folder, remove_if_empty
from mcore_ckpt.steps.runs import Ownership
from mcore_ckpt.steps.transaction import Attempt
from tests.support.checkpoints import manifest_of
from tests.support.thread_starts import limit_threads
from tests.support.waiting import LONG_S


class StubTier:
    """As much of a NodeTier as these parts use."""

    def __init__(self, folder: Path, **choices: Any) -> None:
        self.config, self.folder, self.role, self.rank = FastTier(folder, **choices), folder, "actor", 0

    def role_dir(self, step: int, role: str | None = None) -> Path:
        return file_names.step_dir(self.folder, step) / (role or self.role)

    def ownership(self, saved: object) -> Ownership:
        return Ownership()


def saves_in(folder: Path, **choices: Any) -> FastSaves:
    tier: Any = StubTier(folder, **choices)
    agreement: Any = None
    return FastSaves(tier, Copies(agreement, tier), Drains(), agreement)


def remove_old(saves: FastSaves, step: int) -> None:
    for folder in saves.retire_old(step):
        assert not (folder / file_names.MANIFEST_FILE).exists()
        remove_folder(folder)
        remove_if_empty(folder.parent)


def attempt_of(step: int) -> str:
    return f"{step:032x}"


def commit(saves: FastSaves, step: int, role: str = "actor") -> None:
    role_dir = saves.tier.role_dir(step, role)
    (role_dir / "model").mkdir(parents=True, exist_ok=True)
    manifest = manifest_of([(0, WrittenFile("model/x.pt", "model", 1, 0))], 1, step, attempt_of(step), role, (role,))
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    (role_dir / "model" / "x.pt").write_bytes(b"x")
    if role == "actor":
        saves.committed(step, attempt_of(step), save_count=0)


def steps_of(saves: FastSaves, role: str = "actor") -> list[int]:
    steps = file_names.step_dirs(saves.tier.folder)
    return sorted(step for step in steps if (saves.tier.role_dir(step, role) / file_names.MANIFEST_FILE).exists())


# -- which steps stay -------------------------------------------------------------------------------------------


def test_a_step_of_which_the_node_has_lost_its_part_does_not_count(tmp_path: Path) -> None:
    saves = saves_in(tmp_path, keep=2)
    for step in (10, 20, 30):
        commit(saves, step)
    (saves.tier.role_dir(20) / "model" / "x.pt").unlink()
    remove_old(saves, 30)
    assert steps_of(saves) == [10, 20, 30]
    commit(saves, 40)
    remove_old(saves, 40)
    assert steps_of(saves) == [30, 40]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_steps_stay(tmp_path: Path, keep: int) -> None:
    saves = saves_in(tmp_path, keep=keep)
    for step in range(10, 60, 10):
        commit(saves, step)
        saves.copies.mark_complete(attempt_of(step))
        remove_old(saves, step)
        assert steps_of(saves) == list(range(10, step + 1, 10))[-keep:]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"global_steps_{step}" for step in steps_of(saves)
    )


def test_the_newest_step_with_complete_copies_stays(tmp_path: Path) -> None:
    """However old it is. Without it a lost node could cost all steps."""
    saves = saves_in(tmp_path, keep=2)
    for step in range(1, 7):
        commit(saves, step)
        if step in (1, 2):
            saves.copies.mark_complete(attempt_of(step))
        remove_old(saves, step)
    assert steps_of(saves) == [2, 5, 6]
    saves.copies.mark_complete(attempt_of(5))
    remove_old(saves, 6)
    assert steps_of(saves) == [5, 6]


def test_of_earlier_managers_a_step_without_copies_does_not_replace_one_with_copies(tmp_path: Path) -> None:
    """The training goes on from step 3, which died before it was copied. Until step 4 is, step 2 has to stay."""
    saves = saves_in(tmp_path, keep=1)
    for step in (1, 2, 3):
        commit(saves, step)
    saves = saves_in(tmp_path, keep=1)
    saves.found(3, [(2, attempt_of(2)), (1, attempt_of(1))])
    saves.loaded(SimpleNamespace(placement=Placement(("a",), (), save_count=3)))  # type: ignore[arg-type]
    commit(saves, 4)
    remove_old(saves, 4)
    assert steps_of(saves) == [2, 4]
    saves.copies.mark_complete(attempt_of(4))
    remove_old(saves, 4)
    assert steps_of(saves) == [4]


def test_what_is_being_copied_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = saves_in(tmp_path, keep=1)
    for step in range(1, 6):
        commit(saves, step)
    saves.copies.mark_complete(attempt_of(5))
    monkeypatch.setattr(saves.copies, "needed", lambda: {attempt_of(2)})
    monkeypatch.setattr(saves.drains, "needed", lambda: {attempt_of(3)})
    remove_old(saves, 5)
    assert steps_of(saves) == [2, 3, 5]


def test_a_pinned_step_stays(tmp_path: Path) -> None:
    saves = saves_in(tmp_path, keep=1)
    for step in (1, 2):
        commit(saves, step)
    pin(saves.tier.folder, 1)
    commit(saves, 3)
    saves.copies.mark_complete(attempt_of(3))
    remove_old(saves, 3)
    assert steps_of(saves) == [1, 3]
    unpin(saves.tier.folder, 1)
    remove_old(saves, 3)
    assert steps_of(saves) == [3]


def test_steps_of_a_training_that_was_given_up_go(tmp_path: Path) -> None:
    saves = saves_in(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        commit(saves, step)
        saves.copies.mark_complete(attempt_of(step))
    commit(saves, 15)
    saves.copies.mark_complete(attempt_of(15))
    assert [folder.parent.name for folder in saves.retire_old(15)] == [f"global_steps_{n}" for n in (40, 30, 20)]
    assert steps_of(saves) == [10, 15]


def test_other_roles_and_other_folders_stay(tmp_path: Path) -> None:
    saves = saves_in(tmp_path, keep=1)
    for step in (1, 2):
        commit(saves, step)
        commit(saves, step, "critic")
    (tmp_path / "global_steps_none").mkdir()
    (tmp_path / "notes.txt").touch()
    saves.copies.mark_complete(attempt_of(2))
    remove_old(saves, 2)
    assert steps_of(saves) == [2]
    assert steps_of(saves, "critic") == [1, 2]
    assert (tmp_path / "global_steps_none").is_dir()
    assert (tmp_path / "notes.txt").exists()


def test_a_step_that_was_half_removed_is_removed_again(tmp_path: Path) -> None:
    """A process that dies while it removes one leaves a folder without a manifest."""
    saves = saves_in(tmp_path, keep=1)
    for step in (1, 2):
        commit(saves, step)
    (saves.tier.role_dir(1) / file_names.MANIFEST_FILE).unlink()
    saves.copies.mark_complete(attempt_of(2))
    remove_old(saves, 2)
    assert not saves.tier.role_dir(1).parent.exists()


def test_a_folder_that_cannot_be_moved_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = saves_in(tmp_path, keep=1)
    for step in (1, 2, 3):
        commit(saves, step)
    saves.copies.mark_complete(attempt_of(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", failing)
        assert saves.retire_old(3) == []
    assert "cannot be deleted, so the fast tier holds more than it should" in caplog.text
    assert len(saves.retire_old(3)) == 2


def failing(*paths: Path) -> None:
    raise PermissionError(errno.EPERM, "not yours")


@settings(max_examples=40)
@given(
    steps=st.sets(st.integers(1, 12), min_size=1, max_size=8),
    keep=st.integers(1, 3),
    data=st.data(),
)
def test_what_stays(tmp_path_factory: pytest.TempPathFactory, steps: set[int], keep: int, data: st.DataObject) -> None:
    saves = saves_in(tmp_path_factory.mktemp("node"), keep=keep)
    for step in sorted(steps):
        commit(saves, step)
    current = data.draw(st.sampled_from(sorted(steps)))
    complete = data.draw(st.sets(st.sampled_from(sorted(steps))))
    for step in complete:
        saves.copies.mark_complete(attempt_of(step))
    remove_old(saves, current)
    older = sorted(step for step in steps if step <= current)
    # A step that was given up stays as long as a lost node could cost all others.
    safe = sorted(complete & set(older)) or sorted(complete)
    assert steps_of(saves) == sorted({*older[-keep:], *safe[-1:]})


# -- when a step is durable -------------------------------------------------------------------------------------


def durable_steps(saves: FastSaves, count: int) -> list[int]:
    found = []
    for step in range(1, count + 1):
        is_durable, since = saves.plan_durable()
        saves.committed(step, attempt_of(step), since)
        if is_durable:
            found.append(step)
    return found


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (10, []), (None, [])])
def test_every_few_steps_are_durable(tmp_path: Path, every: int | None, expected: list[int]) -> None:
    assert durable_steps(saves_in(tmp_path, durable_every=every), 7) == expected


def test_the_count_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Otherwise a job that dies more often than it saves a durable step would never have one."""
    saves = saves_in(tmp_path, durable_every=5)
    placement = Placement(("a",), (), save_count=3)
    manifest: Any = SimpleNamespace(placement=placement, step=8, attempt=attempt_of(8))
    saves.loaded(manifest)
    assert durable_steps(saves, 8) == [2, 7]
    saves.loaded(SimpleNamespace(placement=None))  # type: ignore[arg-type]
    assert durable_steps(saves, 8) == [5]


def test_a_save_that_fails_counts(tmp_path: Path) -> None:
    """Else this role would choose other durable steps than the other roles from then on, and none would be whole."""
    saves = saves_in(tmp_path, durable_every=3)
    assert [saves.plan_durable() for _ in range(2)] == [(False, 1)] * 2  # nothing has begun
    found = []
    for number in range(1, 10):
        is_durable, count = saves.plan_durable()
        saves.begun(count, is_durable)
        if is_durable:
            found.append(number)
        if number not in (2, 6):  # which have failed
            saves.committed(number, attempt_of(number), count)
    assert found == [3, 6, 7, 9]


def test_a_durable_step_waits_for_an_earlier_one_that_is_copied_to_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saves = saves_in(tmp_path, durable_every=2)
    saves.drains._attempt = attempt_of(0)
    assert saves.drains.needed() == {attempt_of(0)}
    waited: list[int] = []
    monkeypatch.setattr(saves.drains, "wait_for_copy", lambda: waited.append(saves.save_count))
    for step in range(1, 5):
        saves.wait_before_durable()
        saves.committed(step, attempt_of(step), step)
    assert waited == [1, 3]
    assert "use a larger durable_every" in caplog.text


def test_after_a_failure_the_next_step_is_durable(tmp_path: Path) -> None:
    saves = saves_in(tmp_path, durable_every=10)
    saves.drains._handle = DrainHandle(1, tmp_path)
    assert saves.plan_durable() == (False, 1)
    saves.drains._handle.fail(CommitError("no space left"))
    assert saves.plan_durable() == (True, 1)


def test_without_a_root_a_failure_changes_nothing(tmp_path: Path) -> None:
    saves = saves_in(tmp_path, durable_every=None)
    saves.drains._handle = DrainHandle(1, tmp_path)
    saves.drains._handle.fail(CommitError("left over"))
    assert saves.plan_durable() == (False, 1)


# -- copies -----------------------------------------------------------------------------------------------------


def test_without_replicas_the_copies_are_complete_at_once(tmp_path: Path) -> None:
    saves = saves_in(tmp_path, replicas=0)
    attempt = Attempt(attempt_of(1), tmp_path / "staging", tmp_path / "actor")
    handle = saves.copies.add(1, attempt)
    assert (handle.step, handle.done, handle.complete, handle.problem, handle.wait(0)) == (1, True, True, None, None)
    assert saves.copies.is_complete(attempt_of(1))
    assert saves.copies.needed() == set()
    assert not saves.copies._worker.is_at_work
    saves.copies.wait(0)
    saves.copies.close()


# -- a signal handler -------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """What a handler of the training raises."""


def interrupt(*args: object) -> None:
    raise Interrupted


def test_an_interrupted_copy_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither closing nor the next save of the step waits for it, and its folder may be deleted."""
    copies = saves_in(tmp_path, replicas=1).copies
    role_dir = tmp_path / "actor"
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(Interrupted):
            copies.add(1, Attempt(attempt_of(1), role_dir, role_dir))
    assert copies.needed() == set()
    copies.wait()
    copies.close()


def drain_of(step: int, folder: Path, run: Any = None) -> Any:
    return SimpleNamespace(
        attempt=SimpleNamespace(number=attempt_of(step)),
        saving=SimpleNamespace(step=step, role_dir=folder),
        agreement=SimpleNamespace(runner=SimpleNamespace(run=lambda work: work()), limit_waits=lambda seconds: None),
        run=run,
    )


def test_no_step_waits_for_old_steps_that_are_being_deleted(tmp_path: Path) -> None:
    """The commit on the nodes ends when the next drain has begun."""
    drains, go_on, deleted = Drains(), threading.Event(), []

    def delete() -> None:
        go_on.wait(LONG_S)
        deleted.append(1)

    drains.start(drain_of(1, tmp_path, lambda: (None, delete))).wait(LONG_S)
    second = drains.start(drain_of(2, tmp_path, lambda: (None, None)))
    assert not deleted
    assert drains.wait_for_copy(1)
    assert not drains.wait_for_copy(timeout=0.0)
    go_on.set()
    second.wait(LONG_S)
    assert drains.wait_for_copy()
    assert deleted == [1]


def test_an_interrupted_drain_ends_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drains = Drains()
    drain = drain_of(1, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(Interrupted):
            drains.start(drain)
    assert (drains.busy, drains.has_failed, drains.needed()) == (False, True, set())
    drains.wait()
    # Where the system grants no thread, the copy itself may be interrupted.
    drain.run = interrupt
    with monkeypatch.context() as patched:
        limit_threads(patched, 0)
        with pytest.raises(Interrupted):
            drains.start(drain)
    assert (drains.busy, drains.has_failed) == (False, True)
