"""Copies in a remote store: a step counts when it is there whole, whatever an upload met on its way."""

import logging
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt import pin, unpin
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, RemoteError
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.io import retries, tuning
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.io.store import Store
from mcore_ckpt.steps import leftovers, upload_queue
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from mcore_ckpt.steps.upload import Upload
from mcore_ckpt.steps.upload_queue import UploadQueue
from tests.support import checkpoints
from tests.support.checkpoints import ROLE, make, stage
from tests.support.remote_store import LONG_S, Outage, failing, files, role_dir, save, upload, version_at, versions
from tests.support.small_disks import tmpfs
from tests.support.thread_starts import limit_threads
from tests.support.waiting import wait_for

POINTS = 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "REMOTE_PAUSE_S", 0.001)
    # Files go in several parts, and are read in several requests.
    monkeypatch.setattr(tuning, "UPLOAD_PART_BYTES", 300_000)


# CI runs both stores where folders are made and deleted or an upload ends half-way, and elsewhere the one of files. S3
# has tests of its own (tests/s3).
@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.full), "file"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteSteps:
    return RemoteSteps(Store(f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/remote"))


in_both_stores = pytest.mark.parametrize("remote", ["memory", "file"], indirect=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "local"


def uploads_of(remote: RemoteSteps, root: Path, keep: int | None = None, role: str = ROLE) -> UploadQueue:
    return UploadQueue(remote, root, role, PreservationPolicy(keep))


def test_what_is_known_of_steps_that_are_gone_is_forgotten(remote: RemoteSteps, root: Path) -> None:
    """A long run uploads thousands of steps."""
    uploads = uploads_of(remote, root, keep=2)
    for step in range(1, 6):
        save(root, step, version=step)
        upload(uploads, step)
    assert [step.step for step in remote.steps()] == [4, 5]
    attempts = {file_names.remote_dir(step, ROLE, read_manifest(role_dir(root, step)).attempt) for step in (4, 5)}
    assert remote._manifests.keys() == attempts


# -- what arrives -----------------------------------------------------------------------------------------------


@in_both_stores
def test_a_committed_step_arrives_whole_and_the_tracker_names_it(remote: RemoteSteps, root: Path) -> None:
    uploads = uploads_of(remote, root)
    for step in (1, 2):
        save(root, step, version=step)
        told = upload(uploads, step)
        assert told.done
        assert told.exception is None
        assert told.nbytes == read_manifest(role_dir(root, step)).nbytes
    assert versions(remote) == {1: 1, 2: 2}
    assert remote.read_tracker() == 2
    attempt = read_manifest(role_dir(root, 2)).attempt
    # As docs/format.md has it: an attempt's folder is what the role's folder is here.
    there = {name.partition(f"{attempt}/")[2] for name in files(remote) if attempt in name}
    assert there == {p.relative_to(role_dir(root, 2)).as_posix() for p in role_dir(root, 2).rglob("*") if p.is_file()}
    assert not checkpoints.remains(root)


def test_the_manifest_goes_last_and_then_the_tracker(
    remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, 1, version=1)
    written: list[str] = []
    writing, replace = remote.store.writing, remote.store.replace
    monkeypatch.setattr(remote.store, "writing", lambda key, part: (written.append(key), writing(key, part))[1])
    monkeypatch.setattr(remote.store, "replace", lambda key, data: (written.append(key), replace(key, data))[1])
    upload(uploads_of(remote, root), 1)
    in_order = list(dict.fromkeys(written))  # some stores replace a file by writing it
    assert [path.rpartition("/")[2] for path in in_order[-2:]] == [file_names.MANIFEST_FILE, file_names.TRACKER_FILE]
    assert len(in_order) == 3 + 2


@in_both_stores
def test_a_step_saved_again_replaces_its_copy(remote: RemoteSteps, root: Path) -> None:
    uploads = uploads_of(remote, root)
    for version in (1, 2):
        save(root, 5, version=version)
        assert upload(uploads, 5).done
        assert versions(remote) == {5: version}
    (attempt,) = {name.split("/")[2] for name in files(remote) if "/" in name}
    assert attempt == read_manifest(role_dir(root, 5)).attempt


def test_the_newer_attempt_counts_even_if_the_clock_was_put_back(
    remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = uploads_of(remote, root)
    original = checkpoints.manifest_of
    for version, year in ((1, "2031"), (2, "2029")):
        monkeypatch.setattr(
            checkpoints,
            "manifest_of",
            lambda *args, year=year: replace(original(*args), created=f"{year}-01-01T00:00:00+00:00"),
        )
        save(root, 5, version=version)
        upload(uploads, 5)
    assert versions(remote) == {5: 2}


def test_steps_that_earlier_runs_have_left_behind_are_uploaded_the_newest_first(
    remote: RemoteSteps, root: Path
) -> None:
    for step in (1, 2, 3, 4):
        save(root, step, version=step)
    upload(uploads_of(remote, root), 1)  # an earlier run's; all are newer than what is there: nothing
    assert set(versions(remote)) == {1, 2, 3, 4}
    remote.delete(file_names.step_name(2))  # by somebody's hand: not newer than what is there, so it stays away
    save(root, 5, version=5)
    upload(uploads_of(remote, root), 5)
    assert set(versions(remote)) == {1, 3, 4, 5}


def test_what_the_policy_would_delete_is_not_sent(remote: RemoteSteps, root: Path) -> None:
    for step in (1, 2, 3, 4):
        save(root, step, version=step)
    opened: list[str] = []
    with failing(remote, before=lambda number, name: opened.append(name)):
        upload(uploads_of(remote, root, keep=2), 4)
    assert versions(remote) == {3: 3, 4: 4}
    assert opened.count("open") == 2 * (3 + 1) + 1


@in_both_stores
def test_retention_counts_what_is_in_the_store(remote: RemoteSteps, root: Path) -> None:
    uploads = uploads_of(remote, root, keep=2)
    for step in (1, 2, 3, 4):
        save(root, step, version=step)
        upload(uploads, step)
        assert set(versions(remote)) == {step, max(1, step - 1)}
    # After a rollback the step just saved is not the newest, and stays.
    save(root, 2, version=22)
    upload(uploads, 2)
    assert versions(remote) == {2: 22, 3: 3, 4: 4}
    assert remote.read_tracker() == 4


def test_what_is_pinned_here_stays_in_the_store_when_this_disk_is_lost(remote: RemoteSteps, root: Path) -> None:
    save(root, 1, version=1)
    pin(root, 1)
    upload(uploads_of(remote, root, keep=1), 1)
    assert remote.step(1).pinned
    shutil.rmtree(root)
    uploads = uploads_of(remote, root, keep=1)
    for step in (2, 3):
        save(root, step, version=step)
        upload(uploads, step)
    assert versions(remote) == {1: 1, 3: 3}
    # While the step is here, what is said here counts.
    for pinned in (True, False):
        (pin if pinned else unpin)(root, 3)
        save(root, 4, version=4)
        upload(uploads, 4)
        assert remote.step(3).pinned == pinned
        assert set(versions(remote)) == ({1, 3, 4} if pinned else {1, 4})


def test_what_was_unpinned_is_told_although_it_is_deleted_here_at_once(remote: RemoteSteps, root: Path) -> None:
    """As retention does behind the same commit, while the upload has only begun."""
    uploads = uploads_of(remote, root, keep=1)
    save(root, 1, version=1)
    pin(root, 1)
    upload(uploads, 1)
    unpin(root, 1)
    save(root, 2, version=2)
    told = uploads.committed(2)
    assert delete_old_steps(root, PreservationPolicy(1)) in ([1], [])
    assert told.wait(LONG_S)
    assert uploads.wait(LONG_S)
    delete_old_steps(root, PreservationPolicy(1))
    assert versions(remote) == {2: 2}


@pytest.mark.parametrize("what", ["step", "role"])
def test_what_a_link_in_the_store_leads_to_stays(root: Path, tmp_path: Path, what: str) -> None:
    """Somebody has moved it to a better place: it is not the store's any more."""
    remote = RemoteSteps(Store(f"file://{tmp_path}/remote"))
    uploads = uploads_of(remote, root, keep=1 if what == "step" else None)
    save(root, 1, version=1)
    upload(uploads, 1)
    moved = tmp_path / "remote" / file_names.step_name(1) / (ROLE if what == "role" else "")
    moved.rename(tmp_path / "best")
    moved.symlink_to(tmp_path / "best")
    before = sorted((tmp_path / "best").rglob("*"))
    # Of the step itself a newer attempt: the one that is behind the link counts no more.
    for step in (2, 3) if what == "step" else (1,):
        save(root, step, version=10 + step)
        upload(uploads, step)
    assert set(before) <= set((tmp_path / "best").rglob("*"))
    assert moved.is_symlink()


@in_both_stores
def test_a_deletion_takes_the_manifest_first_and_what_it_leaves_goes_later(
    remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "REMOTE_TRIES", 1)
    uploads = uploads_of(remote, root, keep=1)
    save(root, 1, version=1)
    upload(uploads, 1)

    def no_folders(number: int, name: str) -> None:
        if name == "rm":
            raise Outage

    save(root, 2, version=2)
    with failing(remote, before=no_folders):
        assert upload(uploads, 2).done
    assert any(name.startswith("global_steps_1/") for name in files(remote))
    assert versions(remote) == {2: 2}
    save(root, 3, version=3)
    upload(uploads, 3)
    assert {name.partition("/")[0] for name in files(remote)} == {"global_steps_3", file_names.TRACKER_FILE}


def test_a_step_counts_when_all_its_roles_are_there(remote: RemoteSteps, root: Path) -> None:
    roles = ("actor", "critic")
    for role, step in (("actor", 1), ("critic", 1), ("actor", 2)):
        make(role_dir(root, step, role), version=step, roles=roles)
        assert upload(uploads_of(remote, root, role=role), step).done
    assert [step.step for step in remote.steps() if step.is_complete] == [1]
    assert remote.read_tracker() == 1
    assert "critic" in remote.step(2).reason
    make(role_dir(root, 2, "critic"), version=2, roles=roles)
    upload(uploads_of(remote, root, role="critic"), 2)
    assert remote.read_tracker() == 2
    assert version_at(remote, 2, "critic") == 2


# -- what fails -------------------------------------------------------------------------------------------------


def test_what_a_store_fails_to_do_now_and_then_is_tried_again(remote: RemoteSteps, root: Path) -> None:
    chance = random.Random(6)

    def flaky(number: int, name: str) -> None:
        if chance.random() < 0.03:
            raise Outage(name)

    uploads = uploads_of(remote, root, keep=2)
    with failing(remote, before=flaky, after=flaky) as store:
        for step in (1, 2, 3):
            save(root, step, version=step)
            told = upload(uploads, step)
            assert told.done, told.exception
        assert store.count > 100
    assert set(versions(remote)) == {2, 3}


Interrupt = Callable[[int, str], None]


def from_operation(number: int) -> Interrupt:
    """Nothing gets through from here on, as where the process was killed."""

    def interrupt(at: int, name: str) -> None:
        if at >= number:
            raise Outage(f"{name}, number {at}")

    return interrupt


@in_both_stores
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stride", [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.full)])
def test_an_upload_interrupted_anywhere_leaves_a_newest_step_that_loads(
    remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch, stride: int, when: str
) -> None:
    """A new step with retention, and then the only step that is there, saved again.

    CI interrupts the first operation and every fourth: each file, the manifest, the tracker and what retention deletes
    take about as many.
    """
    monkeypatch.setattr(retries, "REMOTE_TRIES", 1)
    save(root, 1, version=1)
    upload(uploads_of(remote, root, keep=1), 1)
    for step, new in ((2, 12), (2, 22)):
        old = versions(remote)
        save(root, step, version=new)
        interrupted = 0
        for number in range(1, 1000, stride):
            uploads = uploads_of(remote, root, keep=1)
            with failing(remote, **{when: from_operation(number)}) as store:  # type: ignore[arg-type]
                upload(uploads, step)
            found = versions(remote)
            assert found, number
            newest = max(found)
            assert found[newest] in (old.get(newest), new), number
            if store.count < number:
                break
            interrupted += 1
        assert interrupted >= POINTS // stride
        assert versions(remote) == {step: new}
        assert remote.read_tracker() == step
        attempt = read_manifest(role_dir(root, step)).attempt
        assert {name.split("/")[2] for name in files(remote) if "/" in name} == {attempt}


def test_a_failed_upload_warns_and_is_made_good_behind_the_next_commit(
    remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "REMOTE_TRIES", 2)
    uploads = uploads_of(remote, root)
    save(root, 1, version=1)
    with failing(remote, before=from_operation(8)), caplog.at_level(logging.WARNING):
        told = upload(uploads, 1)
    assert not told.done
    assert isinstance(told.exception, RemoteError)
    assert "tried again after the next commit" in caplog.text
    assert versions(remote) == {}
    save(root, 2, version=2)
    assert upload(uploads, 2).done
    assert told.done
    assert told.exception is None
    assert versions(remote) == {1: 1, 2: 2}


def test_what_has_arrived_does_not_go_again(remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "REMOTE_TRIES", 1)
    monkeypatch.setattr(tuning, "UPLOAD_FILES", 1)
    save(root, 1, version=1)
    uploads, opened = uploads_of(remote, root), list[str]()

    def third_file(number: int, name: str) -> None:
        opened.append(name)
        if opened.count("open") == 3:
            raise Outage

    with failing(remote, before=third_file):
        upload(uploads, 1)
    opened.clear()
    with failing(remote, before=lambda number, name: opened.append(name)):
        upload(uploads, 1)
    assert opened.count("open") == 3  # a file, the manifest, the tracker
    assert versions(remote) == {1: 1}


def test_a_damaged_local_file_is_not_uploaded(remote: RemoteSteps, root: Path) -> None:
    save(root, 1, version=1)
    path = role_dir(root, 1) / file_names.model_file(0, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    uploads = uploads_of(remote, root)
    told = upload(uploads, 1)
    assert not told.done
    assert str(path) in str(told.exception)
    assert "another CRC" in str(told.exception)
    assert versions(remote) == {}
    save(root, 2, version=2)
    assert upload(uploads, 2).done
    assert versions(remote) == {2: 2}


def test_bytes_that_change_on_their_way_are_sent_again(remote: RemoteSteps, root: Path) -> None:
    save(root, 1, version=1)
    real, changed = remote.store.fs.open, []

    class Changing:
        def __init__(self, stream: object) -> None:
            self.stream = stream

        def __getattr__(self, name: str) -> object:
            return getattr(self.stream, name)

        def write(self, data: memoryview) -> None:
            flipped = bytearray(data)
            if not changed:
                flipped[7] ^= 1
                changed.append(1)
            self.stream.write(flipped)

    remote.store.fs.open = lambda path, mode="rb", **kwargs: (
        Changing(real(path, mode, **kwargs)) if mode == "wb" else real(path, mode, **kwargs)
    )
    assert upload(uploads_of(remote, root), 1).done
    assert changed
    assert versions(remote) == {1: 1}


def test_a_manifest_does_not_come_for_files_that_somebody_has_deleted_meanwhile(
    remote: RemoteSteps, root: Path
) -> None:
    save(root, 1, version=1)
    run = Upload(remote.store, role_dir(root, 1), threading.Event())
    real = remote.store.sizes
    remote.store.sizes = lambda key: (remote.delete(key), real(key))[1]  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="3 uploaded files are no longer there"):
        run.run()
    remote.store.sizes = real  # type: ignore[method-assign]
    assert versions(remote) == {}
    run.run()
    assert versions(remote) == {1: 1}


class HeldWrites:
    """Called before each operation of a store: holds up writes until the test lets them go on."""

    def __init__(self) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, number: int, name: str) -> None:
        if name == "write":
            self.reached.set()
            assert self.may_go_on.wait(LONG_S)


def test_a_step_that_is_uploaded_is_not_deleted_here_meanwhile(remote: RemoteSteps, root: Path) -> None:
    """Else a store that is slower than the saves would never get one."""
    uploads = uploads_of(remote, root)
    held = HeldWrites()
    save(root, 1, version=1)
    with failing(remote, before=held):
        first = uploads.committed(1)
        assert held.reached.wait(LONG_S)
        for step in (2, 3):
            save(root, step, version=step)
            delete_old_steps(root, PreservationPolicy(1), step)
            later = uploads.committed(step)
        leftovers.remove_leftovers(root, ROLE, alone=True)  # as another manager's first save does
        assert set(file_names.step_dirs(root)) == {1, 3}
        held.may_go_on.set()
        assert uploads.wait(LONG_S)
    assert first.done
    assert later.done
    assert versions(remote) == {1: 1, 3: 3}
    delete_old_steps(root, PreservationPolicy(1), 3)
    assert set(file_names.step_dirs(root)) == {3}


def test_a_step_that_is_gone_before_its_turn_is_given_up(remote: RemoteSteps, root: Path) -> None:
    uploads = uploads_of(remote, root)
    told = upload(uploads, 9)
    assert not told.done
    assert "step 9 is not uploaded" in str(told.exception)


def test_close_ends_an_upload_that_takes_too_long(
    remote: RemoteSteps, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uploads = uploads_of(remote, root)
    held = HeldWrites()
    save(root, 1, version=1)
    with failing(remote, before=held):
        told = uploads.committed(1)
        assert held.reached.wait(LONG_S)
        started = time.monotonic()
        assert not uploads.wait(0.05)
        uploads.close(0.05)
        assert time.monotonic() - started < LONG_S / 2
        assert "ends unfinished" in caplog.text
        held.may_go_on.set()
        assert uploads.wait(LONG_S)
    assert not told.done
    assert versions(remote) == {}


# -- what is read -----------------------------------------------------------------------------------------------


def folder_of(remote: RemoteSteps, root: Path, step: int = 1) -> RemoteFolder:
    save(root, step, version=step)
    assert upload(uploads_of(remote, root), step).done
    return RemoteFolder(remote.store, file_names.remote_dir(step, ROLE, remote.step(step).found[ROLE].attempt))


def first_file(folder: RemoteFolder, kind: str = "optimizer") -> FileRecord:
    return folder.manifest().files_of(kind)[0]


def spoil(folder: RemoteFolder, path: str, change: Callable[[bytearray], None]) -> None:
    key = folder.store._path(f"{folder.key}/{path}")
    data = bytearray(folder.store.fs.cat_file(key))
    change(data)
    folder.store.fs.pipe_file(key, bytes(data))


def flip(position: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[position] ^= 1

    return change


def cut(data: bytearray) -> None:
    del data[-2:]  # more than the newline


def test_a_block_with_a_wrong_crc_is_found(remote: RemoteSteps, root: Path) -> None:
    folder = folder_of(remote, root)
    spoil(folder, first_file(folder).path, flip(700_000))
    with pytest.raises(CheckpointCorruptError, match="wrong CRC: they are damaged"):
        checkpoints.read_folder(folder)


@in_both_stores
@pytest.mark.parametrize("kind", ["rng", "model"])
def test_a_file_that_is_cut_or_missing_is_found(remote: RemoteSteps, root: Path, kind: str) -> None:
    folder = folder_of(remote, root)
    record = first_file(folder, kind)
    spoil(folder, record.path, cut)
    with pytest.raises(CheckpointCorruptError, match=f"the manifest says {record.size}"):
        checkpoints.read_folder(folder)
    remote.store.fs.rm_file(remote.store._path(f"{folder.key}/{record.path}"))
    with pytest.raises(CheckpointCorruptError, match="missing"):
        checkpoints.read_folder(RemoteFolder(remote.store, folder.key))


def test_a_damaged_manifest_makes_no_step(remote: RemoteSteps, root: Path) -> None:
    folder = folder_of(remote, root)
    spoil(folder, file_names.MANIFEST_FILE, cut)
    fresh = RemoteSteps(Store(remote.store.url))
    (found,) = fresh.steps()
    assert not found.is_complete
    assert file_names.MANIFEST_FILE in found.reason
    save(root, 1, version=11)
    assert upload(uploads_of(fresh, root), 1).done
    assert versions(fresh) == {1: 11}


def test_a_store_that_does_not_answer_is_told(remote: RemoteSteps, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(remote, root)
    monkeypatch.setattr(retries, "REMOTE_TRIES", 3)
    with failing(remote, before=from_operation(1)) as store:
        with pytest.raises(RemoteError, match="has failed 3 times; the last error: Outage"):
            checkpoints.read_folder(folder)
        assert store.count == 3


@in_both_stores
def test_foreign_things_in_the_root_are_left_alone(remote: RemoteSteps, root: Path) -> None:
    foreign = ["notes.txt", "global_steps_x/a", "global_steps_7/README", "global_steps_1/actor/notes/x"]
    for name in foreign:
        with remote.store.writing(name, 1 << 20) as stream:
            stream.write(b"mine")
    uploads = uploads_of(remote, root, keep=1)
    for step in (1, 2):
        save(root, step, version=step)
        upload(uploads, step)
    assert versions(remote) == {2: 2}
    assert {"notes.txt", "global_steps_x/a", "global_steps_7/README"} <= set(files(remote))


def test_the_stage_of_a_save_is_no_checkpoint_to_upload(remote: RemoteSteps, root: Path) -> None:
    stage(role_dir(root, 1), 1)
    assert not upload(uploads_of(remote, root), 1).done
    assert files(remote) == []


# -- too little space -------------------------------------------------------------------------------------------


def test_an_upload_that_does_not_fit_sends_no_byte(tmp_path: Path, root: Path) -> None:
    """The next commit tries it again, when there may be space."""
    with tmpfs(tmp_path / "disk", "1m") as disk:
        remote = RemoteSteps(Store(f"file://{disk}/remote"))
        uploads = uploads_of(remote, root)
        save(root, 1, version=1)
        handle = upload(uploads, 1)
        assert isinstance(handle.exception, RemoteError)
        assert "does not fit into the remote store" in str(handle.exception)
        assert "bytes are needed, but only 1,048,576 bytes are free" in str(handle.exception)
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        save(root, 2, version=2)
        upload(uploads, 2)
        assert handle.done
        assert versions(remote) == {1: 1, 2: 2}


def test_what_an_earlier_try_has_sent_in_part_is_overwritten(tmp_path: Path, root: Path) -> None:
    """So it takes no space beside the new file."""
    save(root, 1, version=1)
    manifest = read_manifest(role_dir(root, 1))
    with tmpfs(tmp_path / "disk", str(manifest.nbytes + (64 << 10))) as disk:
        remote = RemoteSteps(Store(f"file://{disk}/remote"))
        largest = max(manifest.files, key=lambda file: file.size)
        part = disk / "remote" / file_names.remote_dir(1, ROLE, manifest.attempt) / largest.path
        part.parent.mkdir(parents=True)
        part.write_bytes(bytes(largest.size // 2))
        assert upload(uploads_of(remote, root), 1).done
        assert versions(remote) == {1: 1}


def space_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mcore_ckpt space"]


def test_a_store_without_space_is_warned_about_once_before_the_save(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tmpfs(tmp_path / "disk", "1m") as disk:
        uploads = uploads_of(RemoteSteps(Store(f"file://{disk}/remote")), root)
        for size, warnings in ((2 << 20, 1), (2 << 20, 1), (1000, 1), (2 << 20, 2)):
            uploads.expect(Need((size,)))
            wait_for(lambda: not space_threads())
            assert caplog.text.count("will not fit into the remote store: 2,097,152 bytes are needed") == warnings


def test_one_thread_at_most_looks_at_a_store_that_hangs(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the store answers at last, it is asked once more, about the newest save."""
    answers, asked, threads = threading.Semaphore(0), [], set()

    def hangs(store: Store, need: Need) -> None:
        asked.append(need)
        threads.add(threading.get_ident())
        assert answers.acquire(timeout=LONG_S)

    monkeypatch.setattr(upload_queue, "shortage_of", hangs)
    uploads = uploads_of(RemoteSteps(Store(f"file://{tmp_path}/remote")), root)
    for size in range(5):
        uploads.expect(Need((size,)))
        wait_for(lambda: asked)
        assert len(space_threads()) == 1
    answers.release()
    wait_for(lambda: len(asked) == 2)
    answers.release()
    wait_for(lambda: not space_threads())
    assert asked == [Need((0,)), Need((4,))]
    assert len(threads) == 1
    uploads.expect(Need((5,)))
    answers.release()
    wait_for(lambda: len(asked) == 3 and not space_threads())


def test_where_no_thread_is_allowed_the_next_save_looks(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(upload_queue, "shortage_of", lambda store, need: asked.append(need))
    uploads = uploads_of(RemoteSteps(Store(f"file://{tmp_path}/remote")), root)
    with monkeypatch.context() as patch:
        limit_threads(patch, 0)
        uploads.expect(Need((1,)))
    uploads.expect(Need((2,)))
    wait_for(lambda: not space_threads())
    assert asked == [Need((2,))]
