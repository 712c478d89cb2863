"""Which steps may go, and that nothing else goes with them."""

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt import pin, unpin
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint import reading as reader
from mcore_ckpt.checkpoint.manifest import Placement, encode_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.steps import commit, hidden_step, leftovers, retention
from mcore_ckpt.steps.listing import StepStatus, complete_steps, list_steps
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps, judge
from mcore_ckpt.tools.maintain.prune import prune
from tests.support.checkpoints import (
    ROLE,
    Crash,
    checkpoints,
    crash,
    dead_owner,
    make,
    own,
    read_version,
    remains,
    stage,
)
from tests.support.privileges import without_privileges
from tests.support.small_steps import save_small


def test_retention_counts_what_is_on_disk(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, PreservationPolicy(2)) == [1, 2]
    assert checkpoints(tmp_path) == {3: 3, 10: 10}
    assert delete_old_steps(tmp_path, PreservationPolicy(2)) == []
    assert sorted(os.listdir(tmp_path)) == ["global_steps_10", "global_steps_3"]


def test_retention_keeps_what_is_not_of_ours(tmp_path: Path) -> None:
    foreign = tmp_path / "global_step_7" / "actor"
    foreign.mkdir(parents=True)
    (foreign / "model_world_size_8_rank_0.pt").write_bytes(b"of verl")
    (tmp_path / "global_steps_8").mkdir()
    (tmp_path / "iter_0000001").mkdir()
    for step in (9, 10, 11):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [9, 10]
    assert (foreign / "model_world_size_8_rank_0.pt").read_bytes() == b"of verl"
    assert sorted(os.listdir(tmp_path)) == ["global_step_7", "global_steps_11", "global_steps_8", "iter_0000001"]


def test_retention_does_not_count_incomplete_steps(tmp_path: Path) -> None:
    """Else the last one to come back to might go."""
    make(file_names.step_dir(tmp_path, 1) / ROLE, 1)
    make(file_names.step_dir(tmp_path, 2) / ROLE, 2, ("actor", "critic"))
    make(file_names.step_dir(tmp_path, 3) / ROLE, 3)
    make(file_names.step_dir(tmp_path, 4) / ROLE, 4, ("actor", "critic"))
    (file_names.step_dir(tmp_path, 5) / ROLE).mkdir(parents=True)
    assert delete_old_steps(tmp_path, PreservationPolicy(2)) == []
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1, 2]
    assert checkpoints(tmp_path) == {3: 3}
    assert file_names.step_dir(tmp_path, 4).is_dir()


def test_retention_keeps_a_step_that_a_role_is_saving(tmp_path: Path) -> None:
    """A role that is behind: its folder must not go from under its hands."""
    staging, attempt = stage(file_names.step_dir(tmp_path, 1) / "critic", 4)
    for step in (2, 3):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [2]
    commit.publish(staging, file_names.step_dir(tmp_path, 1) / "critic", attempt)
    assert read_version(file_names.step_dir(tmp_path, 1) / "critic") == 4


def test_a_crash_while_a_step_is_deleted(tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    with monkeypatch.context() as patch:
        patch.setattr(hidden_step, "remove_folder", crash)
        with pytest.raises(Crash):
            delete_old_steps(tmp_path, PreservationPolicy(1))
    assert checkpoints(tmp_path) == {2: 2}
    (deleted,) = [path for path in tmp_path.iterdir() if file_names.is_deleted_dir(path.name)]
    leftovers.remove_leftovers(tmp_path, ROLE, alone=False)
    assert deleted.exists(), "its owner lives, and may still put it back"
    own(deleted, dead_owner(dead_pid))
    leftovers.remove_leftovers(tmp_path, ROLE, alone=False)
    assert remains(tmp_path) == []


def test_the_step_just_saved_stays_after_a_rollback(tmp_path: Path) -> None:
    for step in (60, 100):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, PreservationPolicy(1), committed=60) == []
    assert checkpoints(tmp_path) == {60: 60, 100: 100}


def test_spared_steps_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, PreservationPolicy(1), spared=(2, 7)) == [1, 3]


def test_a_role_s_retention_leaves_another_role_its_newest(tmp_path: Path) -> None:
    for step in (8, 9):
        for role in (ROLE, "critic"):
            make(file_names.step_dir(tmp_path, step) / role, step, roles=(role,))
    make(file_names.step_dir(tmp_path, 10) / ROLE, 10, roles=(ROLE,))
    assert delete_old_steps(tmp_path, PreservationPolicy(1), committed=10) == [8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_steps_10", "global_steps_9"]


# -- the rule -----------------------------------------------------------------------------------------------

ROLES = ("actor", "critic", "ref")


@st.composite
def statuses(draw: st.DrawFn) -> list[StepStatus]:
    found = []
    for step in sorted(draw(st.sets(st.integers(0, 60), max_size=12))):
        committed = draw(st.frozensets(st.sampled_from(ROLES)))
        declared = committed | draw(st.frozensets(st.sampled_from(ROLES), max_size=1))
        problems = ("damaged",) if not draw(st.integers(0, 5)) else ()
        if problems:
            declared |= {"damaged"}
        pinned = draw(st.booleans())
        found.append(StepStatus(step, Path(f"{step}"), committed, declared, problems, pinned, seen=committed))
    return found


def complete_of(found: list[StepStatus], role: str) -> list[int]:
    return [status.step for status in found if status.is_complete and role in status.committed]


@given(statuses(), st.integers(1, 4), st.none() | st.integers(1, 20), st.data())
def test_what_stays(found: list[StepStatus], keep: int, every: int | None, data: st.DataObject) -> None:
    numbers = st.sampled_from([status.step for status in found] or [0])
    committed, named = data.draw(st.none() | numbers), data.draw(st.sets(numbers, max_size=2))
    verdicts = judge(found, PreservationPolicy(keep, every), committed, named)
    assert [verdict.status for verdict in verdicts] == found
    gone = [verdict.status for verdict in verdicts if not verdict.stays]
    wanted = {step for role in ROLES for step in complete_of(found, role)[-keep:]}
    for status in found:
        complete_and_old = status.is_complete and status.step not in wanted and status.step != committed
        spared = status.pinned or status.step in named or (every is not None and status.step % every == 0)
        if status.is_complete:
            assert (status in gone) == (complete_and_old and not spared)
    for status in gone:
        assert status.committed, "a folder without a manifest of ours is somebody else's"
        assert not status.problems, "what cannot be read may be of a newer version, or somebody's copy"
        assert not status.pinned
        assert status.step != committed
        assert status.step not in named
        if not status.is_complete:
            assert status.step < min(wanted), "another role may still be on its way into it"
    # Whoever comes back finds what he would have found.
    complete = [status for status in found if status.is_complete]
    assert not complete or complete[-1] not in gone


@given(statuses(), st.integers(1, 4), st.none() | st.integers(1, 20))
def test_judging_again_changes_nothing(found: list[StepStatus], keep: int, every: int | None) -> None:
    """As after a restart: what is counted is what is there."""
    policy = PreservationPolicy(keep, every)
    left = [verdict.status for verdict in judge(found, policy) if verdict.stays]
    assert all(verdict.stays for verdict in judge(left, policy))


@given(statuses(), st.integers(1, 3), st.none() | st.integers(1, 20))
def test_keeping_more_deletes_less(found: list[StepStatus], keep: int, every: int | None) -> None:
    def gone(policy: PreservationPolicy) -> set[int]:
        return {verdict.status.step for verdict in judge(found, policy) if not verdict.stays}

    assert (
        gone(PreservationPolicy(keep + 1, every))
        <= gone(PreservationPolicy(keep, every))
        <= gone(PreservationPolicy(keep))
    )
    assert gone(PreservationPolicy(None)) == gone(PreservationPolicy(None, every)) == set()


def test_while_nothing_is_complete_nothing_goes(tmp_path: Path) -> None:
    """The critic is late for step 1; the actor has saved steps 1 and 2."""
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / "actor", step, ("actor", "critic"))
    assert delete_old_steps(tmp_path, PreservationPolicy(1), committed=2) == []
    make(file_names.step_dir(tmp_path, 1) / "critic", 1, ("actor", "critic"))
    assert [status.step for status in complete_steps(tmp_path)] == [1]


def test_every_n_th(tmp_path: Path) -> None:
    for step in (0, 50, 100, 150, 200, 250):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, PreservationPolicy(1, keep_every=100)) == [50, 150]
    assert checkpoints(tmp_path) == {0: 0, 100: 100, 200: 200, 250: 250}


@pytest.mark.parametrize("how", ["newer", "damaged", "copied"])
def test_what_is_not_understood_stays(tmp_path: Path, how: str) -> None:
    for step in (1, 2, 3):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    manifest = file_names.step_dir(tmp_path, 1) / ROLE / file_names.MANIFEST_FILE
    if how == "newer":
        manifest.write_bytes(manifest.read_bytes().replace(b'"format_version":1', b'"format_version":3'))
    elif how == "damaged":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    else:
        shutil.copy(file_names.step_dir(tmp_path, 2) / ROLE / file_names.MANIFEST_FILE, manifest)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [2]
    assert manifest.exists()


def test_a_step_that_is_a_link_stays(tmp_path: Path) -> None:
    """Only the link could be taken away, and what it names is on another disk, maybe of another run."""
    for step in (1, 2):
        make(file_names.step_dir(tmp_path / "elsewhere", step) / ROLE, step)
    for step in (3, 4):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    file_names.step_dir(tmp_path, 1).symlink_to(file_names.step_dir(tmp_path / "elsewhere", 1))
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [3]
    assert checkpoints(tmp_path) == {1: 1, 4: 4}


@pytest.mark.parametrize("which", ["step", "role"])
def test_a_step_that_is_protected_stays_whole(tmp_path: Path, which: str, caplog: pytest.LogCaptureFixture) -> None:
    """Renamed it could be, but its files not be removed: it would be lost, and still take its space."""
    for step in (1, 2, 3, 4):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    folder = file_names.step_dir(tmp_path, 2) if which == "step" else file_names.step_dir(tmp_path, 2) / ROLE
    folder.chmod(0o555)
    with without_privileges():
        told = {found.step: found for found in prune(tmp_path, PreservationPolicy(1), dry_run=True)}
        assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1, 3]
        pruned = {found.step: found for found in prune(tmp_path, PreservationPolicy(1))}
    assert checkpoints(tmp_path) == {2: 2, 4: 4}
    for found in (told[2], pruned[2]):
        assert found.stays
        assert "may not be changed" in found.reason
        assert found.reason.endswith(f"/{folder.name}'")
    assert "may not be changed" in caplog.text


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM, errno.EIO])
def test_a_step_that_cannot_go_does_not_keep_others(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, or in a sticky folder: retention would delete nothing any more, until the disk is full."""
    for step in (1, 2, 3):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    rename, stuck = os.rename, file_names.step_dir(tmp_path, 1)

    def refuse(old: Path, new: Path) -> None:
        if old == stuck:
            raise OSError(number, os.strerror(number), str(old))
        rename(old, new)

    monkeypatch.setattr("os.rename", refuse)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [2]
    (found, *_) = prune(tmp_path, PreservationPolicy(1))
    assert found.stays
    assert os.strerror(number) in found.reason
    assert checkpoints(tmp_path) == {1: 1, 3: 3}


def test_remains_that_cannot_be_removed_are_not_said_to_be(tmp_path: Path, dead_pid: int) -> None:
    make(file_names.step_dir(tmp_path, 1) / ROLE, 1)
    staging, _ = stage(file_names.step_dir(tmp_path, 1) / ROLE, 1)
    own(staging, dead_owner(dead_pid))
    staging.chmod(0o555)
    with without_privileges():
        *_, found = prune(tmp_path, PreservationPolicy(1))
    assert found.path == staging
    assert found.stays
    assert "not all of it could be removed" in found.reason
    staging.chmod(0o755)
    *_, found = prune(tmp_path, PreservationPolicy(1))
    assert not found.stays
    assert not staging.exists()


def test_by_hand_the_step_saved_last_stays_after_a_rollback(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    (tmp_path / file_names.TRACKER_FILE).write_text("1")
    assert [found.step for found in prune(tmp_path, PreservationPolicy(1)) if not found.stays] == [2]


@contextmanager
def being_read(root: Path) -> Iterator[None]:
    with reading([file_names.step_dir(root, step) / ROLE for step in (1, 2)]):
        yield


@contextmanager
def in_a_protected_root(root: Path) -> Iterator[None]:
    root.chmod(0o555)
    with without_privileges():
        yield
    root.chmod(0o755)


@contextmanager
def in_a_node_s_folder(root: Path) -> Iterator[None]:
    for step in (1, 2, 3):
        role_dir = file_names.step_dir(root, step) / ROLE
        manifest = reader.read_manifest(role_dir)
        placement = Placement(("node1",), ((0,),) * len(manifest.files), save_count=step)
        (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, placement=placement)))
    yield


@pytest.mark.parametrize("place", [being_read, in_a_protected_root, in_a_node_s_folder])
def test_a_dry_run_finds_what_the_run_finds(
    tmp_path: Path, place: Callable[[Path], AbstractContextManager[None]]
) -> None:
    """One step is to be deleted, and one is to lose its optimizer."""
    for step in (1, 2, 3):
        save_small(tmp_path, step)
    policy = PreservationPolicy(1, keep_every=2, optimizer_for_last=1)
    with place(tmp_path):
        dry, wet = prune(tmp_path, policy, dry_run=True), prune(tmp_path, policy)
    assert dry == wet
    assert {found.step for found in wet if not found.stays or found.loses} == {
        being_read: set(),
        in_a_protected_root: {2},
        in_a_node_s_folder: {1},
    }[place]


# -- pins ---------------------------------------------------------------------------------------------------


def test_a_pinned_step_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    pin(tmp_path, 2)
    pin(str(tmp_path), 2)
    assert [status.pinned for status in list_steps(tmp_path)] == [False, True, False, False]
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1, 3]
    # A pin is of the step, whoever saves it again.
    make(file_names.step_dir(tmp_path, 2) / ROLE, 22)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == []
    assert checkpoints(tmp_path) == {2: 22, 4: 4}
    unpin(tmp_path, 2)
    unpin(tmp_path, 2)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [2]


def test_what_cannot_be_pinned(tmp_path: Path) -> None:
    make(file_names.step_dir(tmp_path, 1) / "actor", 1, ("actor", "critic"))
    with pytest.raises(CheckpointNotFoundError, match=r"step 1 cannot be pinned: .*not committed by critic"):
        pin(tmp_path, 1)
    with pytest.raises(CheckpointNotFoundError, match="there is no step 2"):
        pin(tmp_path, 2)
    with pytest.raises(CheckpointNotFoundError, match="there is no step 2"):
        unpin(tmp_path, 2)


# -- what comes into a step while it is on its way out ----------------------------------------------------------


def opens_a_save(step_path: Path) -> None:
    commit.open_staging(step_path / "critic", commit.new_attempt())


def commits(step_path: Path) -> None:
    make(step_path / "critic", 5)


def commits_again(step_path: Path) -> None:
    make(step_path / ROLE, 1)


def pins(step_path: Path) -> None:
    pin(step_path.parent, 1)


@pytest.mark.parametrize("comes", [opens_a_save, commits, commits_again, pins])
def test_a_step_comes_back_if_something_has_come_into_it(
    tmp_path: Path, comes: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look at it and the rename."""
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    first = file_names.step_dir(tmp_path, 1)
    looks: list[Path] = []

    def late(status: StepStatus, path: Path) -> str | None:
        obstacle = obstacle_to(status, path)
        looks.append(path)
        if len(looks) == 1:
            comes(first)
        return obstacle

    obstacle_to = retention.obstacle_to
    monkeypatch.setattr(retention, "obstacle_to", late)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == []
    assert len(looks) == 2
    assert read_version(first / ROLE) == 1
    assert not (first / file_names.OWNER_FILE).exists()
    assert sorted(os.listdir(tmp_path)) == ["global_steps_1", "global_steps_2"]


def test_a_step_that_was_saved_again_since_it_was_judged_stays(tmp_path: Path) -> None:
    """As after a rollback, while `prune` deletes one step after the other."""
    for step in (1, 2, 3):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    judged = list_steps(tmp_path)[0]
    make(file_names.step_dir(tmp_path, 1) / ROLE, 7)
    assert retention.delete_step(judged) == "it has just changed"
    assert checkpoints(tmp_path) == {1: 7, 2: 2, 3: 3}


def test_a_step_that_is_put_back_is_never_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another trainer may start at the moment when the step gets its name back."""
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    obstacle_to, put_back = retention.obstacle_to, hidden_step.HiddenStep.put_back

    def late(status: StepStatus, path: Path) -> str | None:
        obstacle = obstacle_to(status, path)
        if path == status.path:
            pins(path)
        return obstacle

    def start_before(hidden: hidden_step.HiddenStep) -> None:
        leftovers.remove_leftovers(tmp_path, ROLE, alone=False)
        put_back(hidden)

    monkeypatch.setattr(retention, "obstacle_to", late)
    monkeypatch.setattr(hidden_step.HiddenStep, "put_back", start_before)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == []
    assert checkpoints(tmp_path) == {1: 1, 2: 2}
    assert not (file_names.step_dir(tmp_path, 1) / file_names.OWNER_FILE).exists()


def test_two_that_delete_at_once(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    old = list_steps(tmp_path)[0]
    assert delete_old_steps(tmp_path, PreservationPolicy(2)) == [1]
    assert retention.delete_step(old) == "another process is deleting it"
    assert checkpoints(tmp_path) == {2: 2, 3: 3}


def test_a_full_disk_does_not_keep_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(retention, "write_owner", full)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]


# -- readers ------------------------------------------------------------------------------------------------


def test_a_step_that_another_process_reads_stays_until_it_has_read(tmp_path: Path) -> None:
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    (begun, begins), (may_end, end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        with reading([file_names.step_dir(tmp_path, 1) / ROLE]):
            os.write(begins, b"x")
            os.read(may_end, 1)
        os._exit(0)
    assert os.read(begun, 1) == b"x"
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == []
    assert checkpoints(tmp_path) == {1: 1, 2: 2}
    os.close(end)
    os.waitpid(pid, 0)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]


def test_a_reader_that_has_forked_does_not_keep_its_lock(tmp_path: Path) -> None:
    """A data loader's worker lives as long as the training, with all descriptors of its parent."""
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    ours, theirs = os.pipe()
    with reading([file_names.step_dir(tmp_path, 1) / ROLE]):
        pid = os.fork()
        if pid == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
        assert delete_old_steps(tmp_path, PreservationPolicy(1)) == []
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]
    os.close(theirs)
    os.waitpid(pid, 0)


def test_reading_what_is_not_there_is_the_reader_s_to_say(tmp_path: Path) -> None:
    with reading([tmp_path / "none"]):
        pass


@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_manifest_that_is_no_file_of_its_folder_is_not_opened(tmp_path: Path, what: str) -> None:
    """A pipe would be waited for without an end."""
    role_dir = file_names.step_dir(tmp_path, 1) / ROLE
    make(role_dir, 1)
    manifest = role_dir / file_names.MANIFEST_FILE
    if what == "pipe":
        manifest.unlink()
        os.mkfifo(manifest)
    else:
        manifest.rename(tmp_path / "outside.json")
        manifest.symlink_to(tmp_path / "outside.json")
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    with reading([role_dir]):
        pass
    assert not [path for path in opened if path.endswith(("outside.json", file_names.MANIFEST_FILE))]


@pytest.mark.parametrize("opened", range(6))
def test_without_locks_a_step_that_goes_while_it_is_read_is_read_whole_or_not_at_all(
    tmp_path: Path, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes after the reader has opened so many files."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    role_dir = file_names.step_dir(tmp_path, 1) / ROLE
    left, open_file = [opened], os.open

    def counting(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(str(role_dir)):
            left[0] -= 1
            if left[0] == -1:
                assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(reader.os, "open", counting)
    with reading([role_dir]), pytest.raises((CheckpointNotFoundError, CheckpointCorruptError), match="missing"):
        read_version(role_dir)
    assert checkpoints(tmp_path) == {2: 2}


def test_a_file_that_is_open_stays_readable(tmp_path: Path) -> None:
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    path = file_names.step_dir(tmp_path, 1) / ROLE / file_names.model_file(0, 0)
    data = path.read_bytes()
    with path.open("rb") as file:
        assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]
        assert file.read() == data
