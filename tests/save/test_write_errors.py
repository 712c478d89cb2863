"""A disk that says no: the same error on all ranks, the checkpoint before untouched, nothing left behind."""

import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CommitError
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.steps import commit, tracker
from mcore_ckpt.steps import listing as steps
from tests.support.checkpoints import ROLE, checkpoints, remains, save_together

WORLD = 2
TIMEOUT_S = 30.0

# A checkpoint of two ranks (tests/support/checkpoints.py) is 2.5 MiB: one fits, a second does not.
SMALL_DISK = "size=4m"
TWICE_THE_SPACE = "size=8m"

NOBODY = 65534
PR_SET_DUMPABLE = 4  # linux/prctl.h


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system that a second checkpoint does not fit in."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def save() -> Callable[[Path, int], list[CommitError | None]]:
    """A save of two ranks: what each has raised. One pair of seats for all saves of a test, as a manager has."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    agreements = [Agreement(store, rank, WORLD, "test", TIMEOUT_S) for rank in range(WORLD)]

    def run(root: Path, step: int) -> list[CommitError | None]:
        errors: list[CommitError | None] = [None] * WORLD

        def part(rank: int) -> None:
            try:
                save_together(agreements[rank], root, step, step)
            except CommitError as error:
                errors[rank] = error

        threads = [threading.Thread(target=part, args=(rank,), daemon=True) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive()
        return errors

    return run


Save = Callable[[Path, int], list[CommitError | None]]


def assert_refused(errors: list[CommitError | None], number: int) -> None:
    """All ranks have raised, and say what the disk has said."""
    assert [type(error) for error in errors] == [CommitError] * WORLD
    for error in errors:
        assert os.strerror(number) in str(error)
        assert "rank 0: rank" not in str(error)


def test_a_full_disk(small_disk: Path, save: Save) -> None:
    assert save(small_disk, 1) == [None] * WORLD
    assert_refused(save(small_disk, 2), errno.ENOSPC)
    assert checkpoints(small_disk) == {1: 1}
    assert tracker.read_tracker(small_disk) == 1
    assert [name for name in remains(small_disk) if name != "global_steps_2"] == []


def test_a_full_disk_under_an_existing_step(small_disk: Path, save: Save) -> None:
    """The old one is not destroyed to free space."""
    assert save(small_disk, 1) == [None] * WORLD
    assert_refused(save(small_disk, 1), errno.ENOSPC)
    assert checkpoints(small_disk) == {1: 1}
    assert remains(small_disk) == []


def test_a_disk_that_has_space_again(small_disk: Path, save: Save) -> None:
    """Training goes on after a failed save, and so do saves."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3 << 20))
    assert_refused(save(small_disk, 1), errno.ENOSPC)
    assert checkpoints(small_disk) == {}
    ballast.unlink()
    assert save(small_disk, 1) == [None] * WORLD
    assert checkpoints(small_disk) == {1: 1}
    assert remains(small_disk) == []


def test_a_disk_without_space_for_the_manifest(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone meets it, when all files are there."""
    assert save(tmp_path, 1) == [None] * WORLD
    opened = os.open

    def fail(path: str | Path, flags: int, *args: int, **kwargs: int) -> int:
        if Path(path).name == file_names.MANIFEST_FILE and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    assert_refused(save(tmp_path, 2), errno.ENOSPC)
    assert checkpoints(tmp_path) == {1: 1}
    assert [name for name in remains(tmp_path) if name != "global_steps_2"] == []


def fail_once(monkeypatch: pytest.MonkeyPatch, call: str, victim: str, number: int) -> list[int]:
    """Makes `os.<call>` fail on the file `victim`; returns the list of descriptors on which it has."""
    original = getattr(os, call)
    failed: list[int] = []

    def fail(descriptor: int, *args: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(victim):
            failed.append(descriptor)
            raise OSError(number, os.strerror(number))
        return int(original(descriptor, *args) or 0)

    monkeypatch.setattr(os, call, fail)
    return failed


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "write"])
def test_an_error_of_one_small_write(
    tmp_path: Path, save: Save, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the native threads have the large files. The system's errors of a descriptor do not name the file."""
    assert save(tmp_path, 1) == [None] * WORLD
    victim = file_names.rng_file(0, 0, 0, 1)
    failed = fail_once(monkeypatch, call, victim, number)
    errors = save(tmp_path, 2)
    assert len(failed) == 1
    assert_refused(errors, number)
    assert all(str(error).startswith("rank 1: OSError") and victim in str(error) for error in errors)
    assert checkpoints(tmp_path) == {1: 1}
    assert [name for name in remains(tmp_path) if name != "global_steps_2"] == []


def lost_mount(path: Path) -> None:
    path.symlink_to(path.parent / "lost" / path.name)


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    "victim", [file_names.optimizer_file(0, 0, 0, 1), file_names.model_file(0, 0)], ids=["own", "shared"]
)
@pytest.mark.parametrize(("harm", "number"), [(lost_mount, errno.ENOENT), (folder, errno.EISDIR)])
def test_an_error_of_one_native_write(
    tmp_path: Path,
    save: Save,
    victim: str,
    harm: Callable[[Path], None],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the place of one file there is something that cannot be written; without the name nobody knows which disk."""
    assert save(tmp_path, 1) == [None] * WORLD
    open_staging = commit.open_staging

    def open_and_harm(role_dir: Path, attempt: str, mode: int | None = None) -> Path:
        staging = open_staging(role_dir, attempt, mode)
        (staging / victim).parent.mkdir(parents=True)
        harm(staging / victim)
        return staging

    with monkeypatch.context() as patch:
        patch.setattr(commit, "open_staging", open_and_harm)
        errors = save(tmp_path, 2)
    assert_refused(errors, number)
    assert all(victim in str(error) for error in errors)
    assert checkpoints(tmp_path) == {1: 1}
    assert [name for name in remains(tmp_path) if name != "global_steps_2"] == []
    assert save(tmp_path, 2) == [None] * WORLD
    assert checkpoints(tmp_path) == {1: 1, 2: 2}


def test_a_file_in_the_place_of_the_root(tmp_path: Path, save: Save) -> None:
    (tmp_path / "root").write_bytes(b"x")
    assert_refused(save(tmp_path / "root", 1), errno.ENOTDIR)
    assert (tmp_path / "root").read_bytes() == b"x"


def test_a_file_in_the_place_of_a_step(tmp_path: Path, save: Save) -> None:
    assert save(tmp_path, 1) == [None] * WORLD
    file_names.step_dir(tmp_path, 2).write_bytes(b"x")
    assert_refused(save(tmp_path, 2), errno.EEXIST)
    assert checkpoints(tmp_path) == {1: 1}
    assert remains(tmp_path) == []


@pytest.fixture
def without_rights() -> Iterator[Path]:
    """A folder of a user who is not root, who this process is meanwhile."""
    # Not pytest's, whose folders no other user may enter.
    place = Path(tempfile.mkdtemp(dir=os.environ.get("TESTS_DISK")))
    if os.geteuid() != 0:
        yield place
    else:
        os.chown(place, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        # Else it may not look into /proc/self any more.
        assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1) == 0
        try:
            yield place
        finally:
            os.seteuid(0)
    place.chmod(0o755)
    shutil.rmtree(place)


@pytest.mark.parametrize("folder", ["", "global_steps_2"])
def test_a_folder_that_cannot_be_written(without_rights: Path, save: Save, folder: str) -> None:
    assert save(without_rights, 1) == [None] * WORLD
    closed = without_rights / folder
    closed.mkdir(exist_ok=True)
    closed.chmod(0o555)
    assert_refused(save(without_rights, 2), errno.EACCES)
    assert checkpoints(without_rights) == {1: 1}
    if closed.exists():
        closed.chmod(0o755)
    assert save(without_rights, 3) == [None] * WORLD
    assert checkpoints(without_rights) == {1: 1, 3: 3}


@pytest.mark.parametrize("gone", ["staging", "step", "root"])
@pytest.mark.parametrize("when", ["written", "sealed"])
def test_a_folder_that_is_deleted_under_a_save(
    tmp_path: Path, save: Save, gone: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a person who frees space, or a program that cleans up."""
    root = tmp_path / "root"
    assert save(root, 1) == [None] * WORLD
    saved = tmp_path / "saved"
    shutil.copytree(root, saved)

    def delete(staging: Path) -> None:
        shutil.rmtree({"staging": staging, "step": staging.parent, "root": root}[gone])

    with monkeypatch.context() as patch:
        if when == "written":
            check_files = commit.check_files
            patch.setattr(commit, "check_files", lambda staging, files: (delete(staging), check_files(staging, files)))
        else:
            write = commit.write_manifest
            patch.setattr(
                commit, "write_manifest", lambda staging, manifest: (write(staging, manifest), delete(staging))
            )
        errors = save(root, 2)
    assert [type(error) for error in errors] == [CommitError] * WORLD
    assert all("staging-" in str(error) for error in errors)
    assert checkpoints(root) == ({} if gone == "root" else {1: 1})
    assert save(root, 3) == [None] * WORLD
    assert checkpoints(root) == ({3: 3} if gone == "root" else {1: 1, 3: 3})
    assert remains(root) in ([], ["global_steps_2"])


def test_a_disk_that_fills_up_anywhere(small_disk: Path, save: Save) -> None:
    """With no space at all, with space for some of the files, for all but the manifest or the tracker, and for all."""
    assert save(small_disk, 1) == [None] * WORLD
    subprocess.run(["mount", "-o", f"remount,{TWICE_THE_SPACE}", str(small_disk)], check=True)
    ballast = small_disk / "ballast"
    space = os.statvfs(small_disk)
    needed = sum(path.stat().st_blocks * 512 for path in small_disk.rglob("*")) // space.f_frsize
    ends = set[bool]()
    for left in [*range(0, needed - 24, 53), *range(needed - 24, needed + 15, 3)]:
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (space.f_bfree - left) * space.f_frsize)
        errors = save(small_disk, 2)
        ends.add(errors == [None] * WORLD)
        if errors == [None] * WORLD:
            assert checkpoints(small_disk) == {1: 1, 2: 2}
            shutil.rmtree(file_names.step_dir(small_disk, 2))
        else:
            assert_refused(errors, errno.ENOSPC)
            assert checkpoints(small_disk) == {1: 1}
            assert [name for name in remains(small_disk) if name != "global_steps_2"] == []
        ballast.unlink()
    assert ends == {True, False}


def test_a_mount_that_is_read_only(small_disk: Path, save: Save) -> None:
    """As a network disk becomes when its server is gone; root cannot write there either."""
    assert save(small_disk, 1) == [None] * WORLD
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_refused(save(small_disk, 2), errno.EROFS)
    assert_refused(save(small_disk, 1), errno.EROFS)
    assert checkpoints(small_disk) == {1: 1}
    assert steps.complete_steps(small_disk)[-1].path / ROLE == file_names.step_dir(small_disk, 1) / ROLE
