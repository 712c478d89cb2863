"""Publishing a checkpoint, and what crashes leave of it."""

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CommitError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.steps import commit, leftovers, tracker
from mcore_ckpt.steps.owner import Life, Owner, read_owner
from tests.support.checkpoints import (
    ATTEMPT,
    ROLE,
    Alone,
    Crash,
    alone_in_the_world,
    checkpoints,
    crash,
    dead_owner,
    make,
    manifest_of,
    other_host,
    own,
    read_version,
    remains,
    save_together,
    stage,
    write_files,
)


@pytest.fixture(params=["exchange", "two renames"])
def renaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without renameat2's exchange."""
    if request.param == "two renames":
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    return str(request.param)


def tree(folder: Path) -> dict[str, bytes]:
    """All that is there, to see that nothing has changed."""
    paths = sorted(folder.rglob("*"))
    return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else b"<folder>" for p in paths}


# -- publish ----------------------------------------------------------------------------------------------


def test_publish_a_new_step(role_dir: Path) -> None:
    staging, attempt = stage(role_dir, 3)
    assert not role_dir.exists()
    commit.publish(staging, role_dir, attempt)
    assert read_version(role_dir) == 3
    assert os.listdir(role_dir.parent) == [ROLE]
    assert not (role_dir / file_names.OWNER_FILE).exists()


def test_a_manifest_that_nobody_could_read_is_not_written(role_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save would be reported as done, and be no checkpoint."""
    staging = commit.open_staging(role_dir, commit.new_attempt())
    manifest = manifest_of([(0, file) for file in write_files(staging, Alone(), 1, 1)], 1, 1, ATTEMPT, ROLE, (ROLE,))
    first = manifest.files[0]
    for wrong, why in (
        (replace(manifest, files=(*manifest.files, first)), r"rng_states\S+' is listed twice"),
        (replace(manifest, files=(structs.replace(first, path="a\u200bb"),)), "path"),
        (replace(manifest, files=(structs.replace(first, path="a\udc80b"),)), "surrogates"),
        (replace(manifest, step=-1), "step"),
    ):
        with pytest.raises(CommitError, match=why):
            commit.write_manifest(staging, wrong)
    with monkeypatch.context() as patched:
        patched.setattr(limits, "MANIFEST_BYTES", 100)
        with pytest.raises(CommitError, match="more than 100"):
            commit.write_manifest(staging, manifest)
    assert not (staging / file_names.MANIFEST_FILE).exists()
    commit.write_manifest(staging, manifest)
    assert read_manifest(staging) == manifest


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
    if not commit.exchange(tmp_path / "first", tmp_path / "second"):
        pytest.skip("no renameat2 with RENAME_EXCHANGE here")
    assert (tmp_path / "first" / "second").is_dir()
    assert (tmp_path / "second" / "first").is_dir()


def test_an_exchange_that_fails_is_an_error(tmp_path: Path) -> None:
    """Only a file system that cannot do it may lead to the two renames, not, say, a folder that is gone."""
    (tmp_path / "first").mkdir()
    with pytest.raises(FileNotFoundError):
        commit.exchange(tmp_path / "first", tmp_path / "missing")


def test_a_second_rename_that_fails_puts_the_old_one_back(role_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process goes on, and so may its loads: the next start's sweep comes too late for them."""
    monkeypatch.setattr(commit, "exchange", lambda first, second: False)
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
        if path == file_names.step_dir(tmp_path, 7):
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

    def give_up_meanwhile(role_dir: Path, attempt: str, mode: int | None = None) -> Path:
        record = {"error": {"type": "CommitError", "message": "rank 1 waited"}}
        agreement._store.set("test/1-1/outcome", fields.encode(record))
        return open_staging(role_dir, attempt, mode)

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
        patch.setattr(commit, "exchange", lambda first, second: False)
        patch.setattr(os, "rename", lambda a, b: crash() if a == staging else rename(a, b))
        with pytest.raises(Crash):
            commit.publish(staging, role_dir, attempt)
    assert not role_dir.exists()
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone)
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
    (old,) = [path for path in role_dir.parent.iterdir() if file_names.parse_work_dir(path.name)]
    own(old, dead_owner(dead_pid))  # as this process would be
    root = role_dir.parent.parent
    leftovers.remove_leftovers(root, ROLE, alone=False)
    assert read_version(role_dir) == 4
    assert remains(root) == []


@pytest.mark.parametrize("alone", [False, True])
def test_a_living_owner_s_folder_stays(role_dir: Path, alone: bool) -> None:
    staging, attempt = stage(role_dir, 4)
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone)
    commit.publish(staging, role_dir, attempt)
    assert read_version(role_dir) == 4


@pytest.mark.parametrize("alone", [False, True])
def test_a_dead_owner_s_folder_goes(role_dir: Path, alone: bool, dead_pid: int) -> None:
    staging, _ = stage(role_dir, 4)
    own(staging, dead_owner(dead_pid))
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone)
    assert not staging.exists()


def test_a_process_whose_name_is_no_text_is_a_process_too(role_dir: Path) -> None:
    """The kernel cuts names after 15 bytes, within a letter where there are others than ASCII's."""
    libc = ctypes.CDLL(None)
    name, set_name = threading.current_thread().native_id, 15
    told = Path(f"/proc/self/task/{name}/comm").read_bytes().strip()
    libc.prctl(set_name, "entraînement_é".encode()[:15], 0, 0, 0)
    try:
        assert Owner.this_process().life is Life.ALIVE
    finally:
        libc.prctl(set_name, told, 0, 0, 0)


def test_a_pid_that_is_used_again_is_another_process(role_dir: Path) -> None:
    staging, _ = stage(role_dir, 4)
    me = Owner.this_process()
    own(staging, Owner(me.host, me.pid, me.start + 1))
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone=False)
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
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone=True)
    assert not staging.exists()


@pytest.mark.parametrize("content", [None, b"", b'{"host": "a", "pi', b"\xff\xfe", b'{"host": 3}', b"[]"])
def test_a_folder_of_unknown_owner_is_only_for_one_that_is_alone(role_dir: Path, content: bytes | None) -> None:
    """Its maker may live, between making the folder and its name, or have died there."""
    staging, _ = stage(role_dir, 4)
    (staging / file_names.OWNER_FILE).unlink()
    if content is not None:
        (staging / file_names.OWNER_FILE).write_bytes(content)
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone=False)
    assert staging.exists()
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone=True)
    assert not staging.exists()


def test_another_host_s_folder_is_only_for_one_that_is_alone(role_dir: Path) -> None:
    staging, _ = stage(role_dir, 4)
    own(staging, other_host())
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone=False)
    assert staging.exists()
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone=True)
    assert not staging.exists()


def test_owner_of_a_folder(role_dir: Path) -> None:
    staging, _ = stage(role_dir, 4)
    owner = read_owner(staging)
    assert owner == Owner.this_process()
    assert owner is not None
    assert owner.life is Life.ALIVE


@pytest.mark.parametrize("alone", [False, True])
def test_other_roles_and_foreign_names_are_not_touched(tmp_path: Path, alone: bool, dead_pid: int) -> None:
    for role in ("critic", "actor2"):
        staging, _ = stage(file_names.step_dir(tmp_path, 7) / role, 4)
        own(staging, dead_owner(dead_pid))
        replaced = file_names.replaced_dir(file_names.step_dir(tmp_path, 7) / role, ATTEMPT)
        shutil.copytree(staging, replaced)
    make(file_names.step_dir(tmp_path, 7) / "critic", 5)
    for name in (".actor.staging-XYZ", ".actor.backup", "actor.staging-00", ".deleted-me", ".git"):
        (file_names.step_dir(tmp_path, 7) / name).mkdir()
        (tmp_path / name).mkdir()
    before = tree(tmp_path)
    leftovers.remove_leftovers(tmp_path, ROLE, alone)
    assert tree(tmp_path) == before


def test_the_sweep_takes_deleted_steps_and_empty_ones(tmp_path: Path) -> None:
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    shutil.copytree(file_names.step_dir(tmp_path, 7), file_names.deleted_dir(file_names.step_dir(tmp_path, 6), ATTEMPT))
    file_names.step_dir(tmp_path, 8).mkdir()
    leftovers.remove_leftovers(tmp_path, ROLE, alone=False)
    # Another role may be about to save there.
    assert sorted(os.listdir(tmp_path)) == ["global_steps_7", "global_steps_8"]
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert os.listdir(tmp_path) == ["global_steps_7"]
    assert checkpoints(tmp_path) == {7: 3}


def test_the_sweep_takes_a_tracker_that_was_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a process id in it: each crash there would leave one more."""
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        patch.setattr(Path, "unlink", crash)  # a process that has died removes nothing
        with pytest.raises(Crash):
            tracker.update_tracker(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert os.listdir(tmp_path) == ["global_steps_7"]


def test_a_role_s_folder_that_is_a_link_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    role_dir, elsewhere = file_names.step_dir(tmp_path, 5) / ROLE, tmp_path / "elsewhere" / ROLE
    make(file_names.step_dir(tmp_path / "elsewhere", 5) / ROLE, 1)
    (file_names.step_dir(tmp_path / "elsewhere", 5) / ROLE).rename(elsewhere)
    (elsewhere / "notes").mkdir()
    role_dir.parent.mkdir()
    role_dir.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    make(role_dir, 2)
    assert not role_dir.is_symlink()
    assert read_version(role_dir) == 2
    assert remains(tmp_path) == []
    assert sorted(elsewhere.rglob("*")) == before
    assert read_version(elsewhere) == 1


def test_the_sweep_stays_out_of_a_step_that_is_a_link(tmp_path: Path) -> None:
    """It is another run's, who may be saving there, on another host."""
    role_dir = file_names.step_dir(tmp_path / "other", 5) / ROLE
    make(role_dir, 1)
    staging, _ = stage(role_dir, 2)
    own(staging, other_host())
    (tmp_path / "mine").mkdir()
    file_names.step_dir(tmp_path / "mine", 5).symlink_to(role_dir.parent)
    leftovers.remove_leftovers(tmp_path / "mine", ROLE, alone=True)
    assert staging.exists()
    assert leftovers.find_leftovers(tmp_path / "mine") == []


def test_a_root_that_is_not_there(tmp_path: Path) -> None:
    leftovers.remove_leftovers(tmp_path / "none", ROLE, alone=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("alone", [False, True])
def test_the_sweep_of_whole_checkpoints_changes_nothing(tmp_path: Path, alone: bool) -> None:
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    tracker.update_tracker(tmp_path)
    before = tree(tmp_path)
    leftovers.remove_leftovers(tmp_path, ROLE, alone)
    assert tree(tmp_path) == before


def test_a_folder_that_can_never_be_made() -> None:
    """In /proc every folder "is not there" when it is made: trying again must end."""
    with pytest.raises(FileNotFoundError):
        commit.open_staging(Path("/proc/none"), commit.new_attempt())


def test_a_folder_that_is_not_there_is_no_problem_on_a_read_only_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """rmdir answers EROFS there, whether the folder exists or not."""

    def rmdir(self: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "rmdir", rmdir)
    commit.remove_if_empty(tmp_path / "global_steps_3")
    assert not caplog.text
    commit.remove_if_empty(tmp_path)
    assert "cannot remove" in caplog.text
