"""Two trainers of one role below one root: the second is refused while the first may live, and never after."""

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import LockedError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.steps import leftovers, trainer_lock
from mcore_ckpt.steps.owner import Owner
from mcore_ckpt.steps.trainer_lock import TrainerLock
from tests.support.checkpoints import ROLE

HERE = Owner.this_process()
ELSEWHERE = Owner("node7 another-boot pid:[1]", 4321, 99)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_lock, "TRAINER_BEAT_S", 0.05)
    monkeypatch.setattr(trainer_lock, "TRAINER_LEASE_S", 1.0)


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[TrainerLock]:
    lock = TrainerLock(tmp_path, ROLE)
    yield lock
    lock.release()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return file_names.trainer_file(tmp_path, ROLE)


def claim(path: Path, owner: Owner) -> bytes:
    """Makes the lock another's."""
    content = fields.encode(asdict(owner) | {"claim": "f" * 32})
    path.write_bytes(content)
    return content


def named(path: Path) -> Owner:
    return Owner.of(json.loads(path.read_text()))


class Other:
    """A trainer in a process of its own: takes the lock, says so, and ends as it is told to."""

    def __init__(self, root: Path, role: str = ROLE) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _train(theirs, TrainerLock(root, role))
        theirs.close()
        self._socket = ours
        self.says = ours.recv(4096).decode()

    def end(self, how: str) -> None:
        if how == "kill":
            os.kill(self.pid, signal.SIGKILL)
        else:
            self._socket.send(how.encode())
        self._socket.close()
        os.waitpid(self.pid, 0)


def _train(told: socket.socket, lock: TrainerLock) -> None:
    try:
        lock.take(0)
        told.send(b"taken")
    except LockedError as error:
        told.send(f"refused: {error}".encode())
    how = told.recv(100)
    if how == b"release":
        lock.release()
    elif how == b"exit":
        trainer_lock._release_all()
    os._exit(0)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    other = Other(tmp_path)
    yield other
    with contextlib.suppress(ProcessLookupError, OSError):
        other.end("kill")


def test_a_second_trainer_on_this_host_is_refused_while_the_first_lives(
    lock: TrainerLock, other: Other, path: Path
) -> None:
    with pytest.raises(LockedError) as error:
        lock.take(60)
    assert f"process {other.pid} on {HERE.host.split()[0]}" in str(error.value)
    assert "another root or role" in str(error.value)
    assert str(path) in str(error.value)
    assert named(path).pid == other.pid


@pytest.mark.parametrize("how", ["kill", "release", "exit"])
def test_a_trainer_that_has_ended_is_in_nobody_s_way(lock: TrainerLock, other: Other, path: Path, how: str) -> None:
    """Killed, it leaves the file; closed or ended, it does not."""
    other.end(how)
    assert path.exists() == (how == "kill")
    lock.take(0)
    assert named(path) == HERE


def test_a_stopped_trainer_is_alive(lock: TrainerLock, other: Other) -> None:
    os.kill(other.pid, signal.SIGSTOP)
    with pytest.raises(LockedError):
        lock.take(0)


def test_this_one_refuses_others_until_it_is_closed(lock: TrainerLock, tmp_path: Path, path: Path) -> None:
    lock.take(0)
    others = [Other(tmp_path), Other(tmp_path, "critic")]
    assert others[0].says.startswith("refused: ")
    assert f"process {os.getpid()}" in others[0].says
    assert others[1].says == "taken"
    lock.release()
    assert not path.exists()
    others.append(Other(tmp_path))
    assert others[2].says == "taken"
    for other in others:
        other.end("release")
    assert not path.exists()


def test_managers_of_one_process_are_one_trainer(tmp_path: Path, path: Path) -> None:
    """One that was never closed, after an exception, must not be in the way of the next."""
    (tmp_path / "link").symlink_to(tmp_path)
    locks = [TrainerLock(root, ROLE) for root in (tmp_path, tmp_path, tmp_path / "link")]
    for lock in (*locks, locks[0]):
        lock.take(0)
    for lock in locks:
        assert path.exists()
        lock.release()
        lock.release()
    assert not path.exists()
    locks[0].take(0)
    locks[0].release()
    assert not path.exists()


def test_one_on_another_host_is_refused_if_it_gives_a_sign_of_life(lock: TrainerLock, path: Path) -> None:
    content = claim(path, ELSEWHERE)
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.05):
            os.utime(path)

    alive = threading.Thread(target=live)
    alive.start()
    try:
        with pytest.raises(LockedError, match=r"process 4321 on node7.*delete the file, or save again"):
            lock.take(3600)
    finally:
        over.set()
        alive.join()
    assert path.read_bytes() == content


def test_one_on_another_host_is_not_waited_for_longer_than_asked(lock: TrainerLock, path: Path) -> None:
    claim(path, ELSEWHERE)
    started = time.monotonic()
    with pytest.raises(LockedError):
        lock.take(0)
    assert time.monotonic() - started < trainer_lock.TRAINER_LEASE_S


def test_one_on_another_host_without_a_sign_of_life_is_followed(lock: TrainerLock, path: Path) -> None:
    """A job that was started again elsewhere after a crash must not be locked out for ever."""
    claim(path, ELSEWHERE)
    started = time.monotonic()
    lock.take(60)
    assert time.monotonic() - started >= trainer_lock.TRAINER_LEASE_S
    assert named(path) == HERE


def test_who_has_looked_long_before_need_not_wait(
    lock: TrainerLock, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the making of a manager to its first save there is mostly more time than that."""
    claim(path, ELSEWHERE)
    lock.look()
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + trainer_lock.TRAINER_LEASE_S)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    lock.take(60)
    assert named(path) == HERE


@pytest.mark.parametrize("clock", [0.0, 2e9, 1e18])
def test_the_time_of_day_is_nobody_s_business(lock: TrainerLock, path: Path, clock: float) -> None:
    """Neither the clock of the host that touched the file, nor this one's, says how long ago that was."""
    claim(path, ELSEWHERE)
    os.utime(path, (min(clock, 2e9), min(clock, 2e9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: clock)
        with pytest.raises(LockedError):
            lock.take(0)


@pytest.mark.parametrize("content", [b"", b'{"host": "a", "pi', b"\xff\xfe", b"[]"])
def test_a_file_that_names_nobody_is_waited_for_too(
    lock: TrainerLock, path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making it and writing to it its process may have died, or be slow."""
    # Nobody is there to give a sign of life. What a power loss has left must not hold a trainer up for two minutes.
    monkeypatch.setattr(trainer_lock, "TRAINER_LEASE_S", 1000.0)
    monkeypatch.setattr(trainer_lock, "TORN_LEASE_S", 0.2)
    path.write_bytes(content)
    with pytest.raises(LockedError, match="the file is damaged"):
        lock.take(0)
    lock.take(60)
    assert named(path) == HERE


def test_whose_place_was_taken_learns_it(lock: TrainerLock, path: Path) -> None:
    """As one that was stopped for long: it must not put a checkpoint in place, nor take the file away."""
    lock.take(0)
    content = claim(path, ELSEWHERE)
    with pytest.raises(LockedError, match="node7"):
        lock.take(0)
    lock.release()
    assert path.read_bytes() == content


def test_a_file_that_a_person_has_deleted_comes_back(lock: TrainerLock, path: Path) -> None:
    lock.take(0)
    path.unlink()
    lock.take(0)
    assert named(path) == HERE


def test_the_holder_gives_signs_of_life(lock: TrainerLock, path: Path) -> None:
    lock.take(0)
    content, first = path.read_bytes(), path.stat().st_mtime_ns
    deadline = time.monotonic() + 30
    while path.stat().st_mtime_ns == first:
        assert time.monotonic() < deadline
    assert path.read_bytes() == content


def test_a_forked_child_leaves_the_lock_alone(lock: TrainerLock, path: Path) -> None:
    """As workers of a data loader are: they run what was registered for the end of the interpreter."""
    lock.take(0)
    pid = os.fork()
    if pid == 0:
        trainer_lock._release_all()
        lock.release()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert named(path) == HERE


def test_looking_raises_nothing(lock: TrainerLock, tmp_path: Path, path: Path) -> None:
    """A job that only loads may have no right to read the file, or no root at all."""
    path.mkdir()
    lock.look()
    with pytest.raises(OSError, match="where a file should be"):
        lock.take(0)
    (tmp_path / "file").write_bytes(b"")
    TrainerLock(tmp_path / "file" / "root", ROLE).look()


@pytest.mark.parametrize("what", ["pipe", "folder", "zeros"])
def test_a_lock_that_is_no_file_is_not_waited_for(
    lock: TrainerLock, path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe has no end, nor has a device; and one as large as the disk would fill the memory."""
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    lock.look()
    with pytest.raises(OSError, match="where a file should be"):
        lock.take(0)


def test_a_lock_of_any_size_is_read_as_far_as_one_goes(lock: TrainerLock, path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(LockedError, match="damaged"):
        lock.take(0)


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        TrainerLock(tmp_path / "file" / "root", ROLE).take(0)


def test_the_sweep_takes_a_lock_that_was_being_written_and_no_other(
    lock: TrainerLock, tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock.take(0)
    names = [f".{path.name}.0123", f".{file_names.trainer_file(tmp_path, 'critic').name}.0123"]
    for name in names:
        (tmp_path / name).touch()
    with caplog.at_level(logging.WARNING):
        leftovers.remove_leftovers(tmp_path, ROLE, alone=False)
        assert all((tmp_path / name).exists() for name in names)
        leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert [(tmp_path / name).exists() for name in names] == [False, True]
    assert path.exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_the_file_is_there_whole_or_not_at_all(
    has_links: bool, lock: TrainerLock, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file names nobody, and the next start would wait until it is sure that nobody lives."""
    seen: list[bytes] = []
    link = os.link

    def look(source: Path, target: Path) -> None:
        seen.append(path.read_bytes() if path.exists() else b"")
        if not has_links:
            raise OSError(errno.EPERM, "no links here")
        link(source, target)

    monkeypatch.setattr(os, "link", look)
    lock.take(0)
    assert seen == [b""]
    assert named(path) == HERE
    assert list(path.parent.iterdir()) == [path]
    lock.release()
    assert list(path.parent.iterdir()) == []


def test_a_claim_that_was_never_made_is_swept(tmp_path: Path, path: Path) -> None:
    left = path.with_name(f".{path.name}.{'a' * 32}")
    left.touch()
    leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
    assert not left.exists()


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file of the lock is not what the user has to mend."""

    def claim_file(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path.with_name("..actor.trainer.json.0d")))

    monkeypatch.setattr(trainer_lock, "claim_file", claim_file)
    with pytest.raises(OSError, match="Read-only file system, so no checkpoint can be saved here") as caught:
        TrainerLock(tmp_path, "actor").take(0.0)
    assert (caught.value.errno, caught.value.filename) == (errno.EROFS, str(tmp_path))
