"""What is on disk: publishing, what crashes leave, the tracker, and what may be deleted."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoints import ROLE, checkpoints, make, read_version, remains, save_together, stage

from mcore_ckpt import layout
from mcore_ckpt.errors import CheckpointError, CommitError
from mcore_ckpt.storage import commit, steps
from mcore_ckpt.storage import json_fields as fields
from mcore_ckpt.storage.agreement import Agreement
from mcore_ckpt.storage.owner import Owner, read_owner

# In hexadecimal, as an attempt's id is.
ATTEMPT = "a" * 32


@pytest.fixture
def role_dir(tmp_path: Path) -> Path:
    return layout.step_dir(tmp_path, 7) / ROLE


@pytest.fixture(params=["exchange", "two renames"])
def renaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without renameat2's exchange."""
    if request.param == "two renames":
        monkeypatch.setattr(commit, "_exchange", lambda first, second: False)
    return str(request.param)


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


class Crash(BaseException):
    """The end of a process, in a test that goes on: nothing of the package may catch it."""


def crash(*args: object, **kwargs: object) -> None:
    raise Crash


def own(folder: Path, owner: Owner) -> None:
    record = {"host": owner.host, "pid": owner.pid, "start": owner.start}
    (folder / layout.OWNER_FILE).write_bytes(fields.encode(record))


def dead_owner(pid: int) -> Owner:
    return Owner(Owner.this_process().host, pid, 1)


def other_host() -> Owner:
    me = Owner.this_process()
    return Owner(me.host + "-another", me.pid, me.start)


def tree(folder: Path) -> dict[str, bytes]:
    """All that is there, to see that nothing has changed."""
    paths = sorted(folder.rglob("*"))
    return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else b"<folder>" for p in paths}


def alone_in_the_world() -> Agreement:
    return Agreement(dist.HashStore(), 0, 1, "test", 30.0)  # type: ignore[attr-defined]


# -- publish ----------------------------------------------------------------------------------------------


def test_publish_a_new_step(role_dir: Path) -> None:
    staging, attempt = stage(role_dir, 3)
    assert not role_dir.exists()
    commit.publish(staging, role_dir, attempt)
    assert read_version(role_dir) == 3
    assert os.listdir(role_dir.parent) == [ROLE]
    assert not (role_dir / layout.OWNER_FILE).exists()


def test_publish_over_an_existing_checkpoint(role_dir: Path, renaming: str) -> None:
    make(role_dir, 3)
    staging, attempt = stage(role_dir, 4)
    assert read_version(role_dir) == 3
    commit.publish(staging, role_dir, attempt)
    assert read_version(role_dir) == 4
    assert os.listdir(role_dir.parent) == [ROLE]
    assert remains(role_dir.parent.parent) == []


def test_this_file_system_can_exchange(tmp_path: Path) -> None:
    """Else the tests of the exchange above are tests of the two renames."""
    for name in ("first", "second"):
        (tmp_path / name / name).mkdir(parents=True)
    if not commit._exchange(tmp_path / "first", tmp_path / "second"):
        pytest.skip("no renameat2 with RENAME_EXCHANGE here")
    assert (tmp_path / "first" / "second").is_dir()
    assert (tmp_path / "second" / "first").is_dir()


def test_an_exchange_that_fails_is_an_error(tmp_path: Path) -> None:
    """Only a file system that cannot do it may lead to the two renames, not, say, a folder that is gone."""
    (tmp_path / "first").mkdir()
    with pytest.raises(FileNotFoundError):
        commit._exchange(tmp_path / "first", tmp_path / "missing")


def test_a_second_rename_that_fails_puts_the_old_one_back(role_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process goes on, and so may its loads: the next start's sweep comes too late for them."""
    monkeypatch.setattr(commit, "_exchange", lambda first, second: False)
    make(role_dir, 3)
    staging, attempt = stage(role_dir, 4)
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if source == staging:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        commit.publish(staging, role_dir, attempt)
    assert read_version(role_dir) == 3


def test_an_error_after_the_rename_is_not_the_save_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is in its place: raising would make the trainer believe that it is not."""

    def fail(path: Path) -> None:
        if path == layout.step_dir(tmp_path, 7):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(commit, "sync_dir", fail)
    save_together(alone_in_the_world(), tmp_path, 7, 3)
    assert checkpoints(tmp_path) == {7: 3}


def test_a_save_that_others_gave_up_at_its_opening_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has made the folder when it learns that another rank is gone. It lives on, so no sweep takes it."""
    agreement = alone_in_the_world()
    open_staging = commit.open_staging

    def give_up_meanwhile(role_dir: Path, attempt: str) -> Path:
        record = {"error": {"type": "CommitError", "message": "rank 1 waited"}}
        agreement._store.set("test/1/outcome", fields.encode(record))
        return open_staging(role_dir, attempt)

    monkeypatch.setattr(commit, "open_staging", give_up_meanwhile)
    with pytest.raises(CommitError, match="rank 1 waited"):
        save_together(agreement, tmp_path, 7, 3)
    assert [name for name in remains(tmp_path) if "staging" in name] == []


# -- crashes and the sweep --------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
def test_a_crash_between_the_two_renames(
    role_dir: Path, alone: bool, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(role_dir, 3)
    staging, attempt = stage(role_dir, 4)
    own(staging, dead_owner(dead_pid))
    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(commit, "_exchange", lambda first, second: False)
        patch.setattr(os, "rename", lambda a, b: crash() if a == staging else rename(a, b))
        with pytest.raises(Crash):
            commit.publish(staging, role_dir, attempt)
    assert not role_dir.exists()
    commit.sweep(role_dir.parent.parent, ROLE, alone)
    assert read_version(role_dir) == 3
    assert remains(role_dir.parent.parent) == []


def test_a_crash_after_both_renames(
    role_dir: Path, dead_pid: int, renaming: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(role_dir, 3)
    staging, attempt = stage(role_dir, 4)
    own(staging, dead_owner(dead_pid))
    with monkeypatch.context() as patch:
        patch.setattr(commit, "sync_dir", crash)
        with pytest.raises(Crash):
            commit.publish(staging, role_dir, attempt)
    root = role_dir.parent.parent
    commit.sweep(root, ROLE, alone=False)
    # The old one has no owner, so only a trainer that is alone knows that nobody needs it.
    assert read_version(role_dir) == 4
    assert not (role_dir / layout.OWNER_FILE).exists()
    commit.sweep(root, ROLE, alone=True)
    assert read_version(role_dir) == 4
    assert remains(root) == []


@pytest.mark.parametrize("alone", [False, True])
def test_a_living_owner_s_folder_stays(role_dir: Path, alone: bool) -> None:
    staging, attempt = stage(role_dir, 4)
    commit.sweep(role_dir.parent.parent, ROLE, alone)
    commit.publish(staging, role_dir, attempt)
    assert read_version(role_dir) == 4


@pytest.mark.parametrize("alone", [False, True])
def test_a_dead_owner_s_folder_goes(role_dir: Path, alone: bool, dead_pid: int) -> None:
    staging, _ = stage(role_dir, 4)
    own(staging, dead_owner(dead_pid))
    commit.sweep(role_dir.parent.parent, ROLE, alone)
    assert not staging.exists()


def test_a_pid_that_is_used_again_is_another_process(role_dir: Path) -> None:
    staging, _ = stage(role_dir, 4)
    me = Owner.this_process()
    own(staging, Owner(me.host, me.pid, me.start + 1))
    commit.sweep(role_dir.parent.parent, ROLE, alone=False)
    assert not staging.exists()


@pytest.fixture
def zombie() -> Iterator[Owner]:
    """A process that has ended, and that nobody has waited for yet."""
    told, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        os.write(end, b"x")
        os._exit(0)
    os.close(end)
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    # Returns when it has ended, and leaves it as it is.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.close(told)
    yield Owner(Owner.this_process().host, pid, int(start))
    os.waitpid(pid, 0)


def test_a_zombie_is_dead(role_dir: Path, zombie: Owner) -> None:
    """Where nobody waits for orphans, as in many containers, a killed rank stays in /proc until the machine goes."""
    staging, _ = stage(role_dir, 4)
    own(staging, zombie)
    commit.sweep(role_dir.parent.parent, ROLE, alone=True)
    assert not staging.exists()


@pytest.mark.parametrize("content", [None, b"", b'{"host": "a", "pi', b"\xff\xfe", b'{"host": 3}', b"[]"])
def test_a_folder_of_unknown_owner_is_only_for_one_that_is_alone(role_dir: Path, content: bytes | None) -> None:
    """Its maker may live, between making the folder and its name, or have died there."""
    staging, _ = stage(role_dir, 4)
    (staging / layout.OWNER_FILE).unlink()
    if content is not None:
        (staging / layout.OWNER_FILE).write_bytes(content)
    commit.sweep(role_dir.parent.parent, ROLE, alone=False)
    assert staging.exists()
    commit.sweep(role_dir.parent.parent, ROLE, alone=True)
    assert not staging.exists()


def test_another_host_s_folder_is_only_for_one_that_is_alone(role_dir: Path) -> None:
    staging, _ = stage(role_dir, 4)
    own(staging, other_host())
    commit.sweep(role_dir.parent.parent, ROLE, alone=False)
    assert staging.exists()
    commit.sweep(role_dir.parent.parent, ROLE, alone=True)
    assert not staging.exists()


def test_owner_of_a_folder(role_dir: Path) -> None:
    staging, _ = stage(role_dir, 4)
    owner = read_owner(staging)
    assert owner == Owner.this_process()
    assert owner is not None
    assert owner.is_alive_here


@pytest.mark.parametrize("alone", [False, True])
def test_other_roles_and_foreign_names_are_not_touched(tmp_path: Path, alone: bool, dead_pid: int) -> None:
    for role in ("critic", "actor2"):
        staging, _ = stage(layout.step_dir(tmp_path, 7) / role, 4)
        own(staging, dead_owner(dead_pid))
        replaced = layout.replaced_dir(layout.step_dir(tmp_path, 7) / role, ATTEMPT)
        shutil.copytree(staging, replaced)
    make(layout.step_dir(tmp_path, 7) / "critic", 5)
    for name in (".actor.staging-XYZ", ".actor.backup", "actor.staging-00", ".deleted-me", ".git"):
        (layout.step_dir(tmp_path, 7) / name).mkdir()
        (tmp_path / name).mkdir()
    before = tree(tmp_path)
    commit.sweep(tmp_path, ROLE, alone)
    assert tree(tmp_path) == before


def test_the_sweep_takes_deleted_steps_and_empty_ones(tmp_path: Path) -> None:
    make(layout.step_dir(tmp_path, 7) / ROLE, 3)
    shutil.copytree(layout.step_dir(tmp_path, 7), layout.deleted_dir(layout.step_dir(tmp_path, 6), ATTEMPT))
    layout.step_dir(tmp_path, 8).mkdir()
    commit.sweep(tmp_path, ROLE, alone=False)
    # Another role may be about to save there.
    assert sorted(os.listdir(tmp_path)) == ["global_steps_7", "global_steps_8"]
    commit.sweep(tmp_path, ROLE, alone=True)
    assert os.listdir(tmp_path) == ["global_steps_7"]
    assert checkpoints(tmp_path) == {7: 3}


def test_the_sweep_takes_a_tracker_that_was_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a process id in it: each crash there would leave one more."""
    make(layout.step_dir(tmp_path, 7) / ROLE, 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(Crash):
            steps.update_tracker(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    commit.sweep(tmp_path, ROLE, alone=True)
    assert os.listdir(tmp_path) == ["global_steps_7"]


def test_a_root_that_is_not_there(tmp_path: Path) -> None:
    commit.sweep(tmp_path / "none", ROLE, alone=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("alone", [False, True])
def test_the_sweep_of_whole_checkpoints_changes_nothing(tmp_path: Path, alone: bool) -> None:
    for step in (1, 2):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    steps.update_tracker(tmp_path)
    before = tree(tmp_path)
    commit.sweep(tmp_path, ROLE, alone)
    assert tree(tmp_path) == before


# -- which steps count ------------------------------------------------------------------------------------


def test_a_step_counts_when_all_declared_roles_have_committed(tmp_path: Path) -> None:
    roles = ("actor", "critic", "reward")
    for number, role in enumerate(roles):
        assert steps.complete_steps(tmp_path) == []
        assert steps.update_tracker(tmp_path) is None
        make(layout.step_dir(tmp_path, 7) / role, number, roles)
    (status,) = steps.complete_steps(tmp_path)
    assert (status.step, status.committed) == (7, frozenset(roles))
    assert steps.update_tracker(tmp_path) == 7


def test_an_incomplete_step_says_who_is_missing(tmp_path: Path) -> None:
    make(layout.step_dir(tmp_path, 7) / "actor", 3, ("actor", "critic"))
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert "not committed by critic" in status.reason


def test_any_manifest_s_roles_are_declared(tmp_path: Path) -> None:
    make(layout.step_dir(tmp_path, 7) / "actor", 3, ("actor",))
    make(layout.step_dir(tmp_path, 7) / "critic", 4, ("actor", "critic", "ref"))
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert "ref" in status.reason


def test_a_folder_under_another_name_does_not_count(tmp_path: Path) -> None:
    make(layout.step_dir(tmp_path, 7) / "actor", 3)
    shutil.copytree(layout.step_dir(tmp_path, 7), layout.step_dir(tmp_path, 8))
    shutil.copytree(layout.step_dir(tmp_path, 7) / "actor", layout.step_dir(tmp_path, 9) / "critic")
    assert checkpoints(tmp_path) == {7: 3}
    assert "its manifest is of actor at step 7" in steps.list_steps(tmp_path)[1].reason


def test_a_damaged_manifest_does_not_count(role_dir: Path) -> None:
    make(role_dir, 3)
    path = role_dir / layout.MANIFEST_FILE
    data = path.read_bytes()
    assert steps.complete_steps(role_dir.parent.parent)
    path.write_bytes(data[: len(data) // 2])
    assert steps.complete_steps(role_dir.parent.parent) == []
    assert str(path) in steps.list_steps(role_dir.parent.parent)[0].reason


def test_the_other_spelling_of_a_step(tmp_path: Path) -> None:
    make(tmp_path / "global_step_7" / ROLE, 3)
    make(layout.step_dir(tmp_path, 5) / ROLE, 2)
    assert checkpoints(tmp_path) == {5: 2, 7: 3}
    assert steps.update_tracker(tmp_path) == 7
    # Of two, the one that is complete.
    (layout.step_dir(tmp_path, 7) / ROLE).mkdir(parents=True)
    assert checkpoints(tmp_path) == {5: 2, 7: 3}


# -- the tracker ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\n", b"release", b"-7", b"7.0", b"7 8", b"1" * 30, b"\xff", b"\xd9\xa7"])
def test_a_tracker_of_garbage_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / layout.TRACKER_FILE).write_bytes(content)
    assert steps.read_tracker(tmp_path) is None
    make(layout.step_dir(tmp_path, 7) / ROLE, 3)
    assert steps.update_tracker(tmp_path) == 7
    assert (tmp_path / layout.TRACKER_FILE).read_bytes() == b"7"


def test_no_tracker(tmp_path: Path) -> None:
    assert steps.read_tracker(tmp_path) is None
    assert steps.update_tracker(tmp_path) is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"12", b"12\n"])
def test_a_tracker_that_disagrees_is_a_hint(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / layout.TRACKER_FILE).write_bytes(content)
    assert steps.read_tracker(tmp_path) == 12
    make(layout.step_dir(tmp_path, 7) / ROLE, 3)
    steps.warn_if_tracker_differs(tmp_path, 7)
    assert "names step 12, but the newest complete step is 7" in caplog.text
    assert "load(step=12)" in caplog.text


def test_a_crash_while_the_tracker_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(layout.step_dir(tmp_path, 7) / ROLE, 3)
    steps.update_tracker(tmp_path)
    make(layout.step_dir(tmp_path, 8) / ROLE, 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: crash())
        with pytest.raises(Crash):
            steps.update_tracker(tmp_path)
    assert steps.read_tracker(tmp_path) == 7
    assert steps.update_tracker(tmp_path) == 8
    assert steps.read_tracker(tmp_path) == 8


# -- retention --------------------------------------------------------------------------------------------


def test_retention_counts_what_is_on_disk(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert steps.delete_old_steps(tmp_path, 2, ATTEMPT) == [1, 2]
    assert checkpoints(tmp_path) == {3: 3, 10: 10}
    assert steps.delete_old_steps(tmp_path, 2, ATTEMPT) == []
    assert sorted(os.listdir(tmp_path)) == ["global_steps_10", "global_steps_3"]


def test_retention_keeps_what_is_not_of_ours(tmp_path: Path) -> None:
    foreign = tmp_path / "global_step_7" / "actor"
    foreign.mkdir(parents=True)
    (foreign / "model_world_size_8_rank_0.pt").write_bytes(b"of verl")
    (tmp_path / "global_steps_8").mkdir()
    (tmp_path / "iter_0000001").mkdir()
    for step in (9, 10, 11):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert steps.delete_old_steps(tmp_path, 1, ATTEMPT) == [9, 10]
    assert (foreign / "model_world_size_8_rank_0.pt").read_bytes() == b"of verl"
    assert sorted(os.listdir(tmp_path)) == ["global_step_7", "global_steps_11", "global_steps_8", "iter_0000001"]


def test_retention_does_not_count_incomplete_steps(tmp_path: Path) -> None:
    """Else the last one to come back to might go."""
    make(layout.step_dir(tmp_path, 1) / ROLE, 1)
    make(layout.step_dir(tmp_path, 2) / ROLE, 2, ("actor", "critic"))
    make(layout.step_dir(tmp_path, 3) / ROLE, 3)
    make(layout.step_dir(tmp_path, 4) / ROLE, 4, ("actor", "critic"))
    (layout.step_dir(tmp_path, 5) / ROLE).mkdir(parents=True)
    assert steps.delete_old_steps(tmp_path, 2, ATTEMPT) == []
    assert steps.delete_old_steps(tmp_path, 1, ATTEMPT) == [1, 2]
    assert checkpoints(tmp_path) == {3: 3}
    assert layout.step_dir(tmp_path, 4).is_dir()


def test_retention_keeps_a_step_that_a_role_is_saving(tmp_path: Path) -> None:
    """A role that is behind: its folder must not go from under its hands."""
    staging, attempt = stage(layout.step_dir(tmp_path, 1) / "critic", 4)
    for step in (2, 3):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert steps.delete_old_steps(tmp_path, 1, ATTEMPT) == [2]
    commit.publish(staging, layout.step_dir(tmp_path, 1) / "critic", attempt)
    assert read_version(layout.step_dir(tmp_path, 1) / "critic") == 4


def test_a_crash_while_a_step_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(Crash):
            steps.delete_old_steps(tmp_path, 1, ATTEMPT)
    assert checkpoints(tmp_path) == {2: 2}
    assert len(remains(tmp_path)) == 1
    commit.sweep(tmp_path, ROLE, alone=False)
    assert remains(tmp_path) == []


def test_a_save_refuses_a_file_in_the_place_of_its_step(tmp_path: Path) -> None:
    layout.step_dir(tmp_path, 7).write_bytes(b"not a folder")
    with pytest.raises(CheckpointError, match="FileExistsError"):
        save_together(alone_in_the_world(), tmp_path, 7, 3)
    assert layout.step_dir(tmp_path, 7).read_bytes() == b"not a folder"


# -- retention after a rollback, and with roles that do not know of each other --------------------------------


def test_the_step_just_saved_stays_after_a_rollback(tmp_path: Path) -> None:
    for step in (60, 100):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert steps.delete_old_steps(tmp_path, 1, commit.new_attempt(), committed=60) == []
    assert checkpoints(tmp_path) == {60: 60, 100: 100}


def test_a_role_s_retention_leaves_another_role_its_newest(tmp_path: Path) -> None:
    for step in (8, 9):
        for role in (ROLE, "critic"):
            make(layout.step_dir(tmp_path, step) / role, step, roles=(role,))
    make(layout.step_dir(tmp_path, 10) / ROLE, 10, roles=(ROLE,))
    assert steps.delete_old_steps(tmp_path, 1, commit.new_attempt(), committed=10) == [8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_steps_10", "global_steps_9"]
