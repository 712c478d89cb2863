"""A process counts as dead only with a proof: hidden ones, those of other pid namespaces, those that began anew."""

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.steps import commit, leftovers, owner, read_lock, trainer_watch, work_folders
from mcore_ckpt.steps.owner import Life, Owner
from mcore_ckpt.steps.trainer_watch import TrainerWatch
from tests.support.checkpoints import ROLE, dead_owner, make, own, read_version, stage
from tests.support.owners import owner_of_process, parent

HERE = Owner.this_process()
SYS_EXIT = 60  # of x86-64

# Parts of the scripts below. A child says that it is ready with a byte.
START = """
import ctypes, os, signal, subprocess, sys
from pathlib import Path
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import LockedError
from mcore_ckpt.steps import leftovers, work_folders
from mcore_ckpt.steps.commit import new_attempt, open_staging
from mcore_ckpt.steps.owner import Life, read_owner
from mcore_ckpt.steps.trainer_lock import TrainerLock, read_claim

def save(root):
    TrainerLock(root, "actor").take(0)
    open_staging(file_names.step_dir(root, 5) / "actor", new_attempt())

def child(does, *arguments):
    told, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        does(*arguments)
        os.write(end, b"x")
        signal.pause()
    os.close(end)
    assert os.read(told, 1) == b"x", "the child has died"
    return pid

def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

def look(root):
    "What a trainer sees of another one: its folder's life, whether that stays, and whether it has the lock."
    (staging,) = (file_names.step_dir(root, 5)).glob(".actor.*")
    life = read_owner(staging).life
    leftovers.remove_leftovers(root, "actor", alone=False)
    lock = TrainerLock(root, "actor")
    try:
        lock.take(0)
        lock.release()
        locked = "free"
    except LockedError:
        locked = "locked"
    return f"{life.value} {'stays' if staging.exists() else 'gone'} {locked}"
"""

HIDDEN = """
root = Path("/mnt/root")
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True)
subprocess.run(["mount", "-o", "remount,hidepid=2", "/proc"], check=True)
os.umask(0)
root.mkdir()
root.chmod(0o777)

def as_user(user, does):
    os.setgroups([])
    os.setgid(5000)
    os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1)  # else it may not look into its own /proc/self
    does()

first = child(as_user, 5001, lambda: save(root))
end(child(as_user, 5002, lambda: print(look(root), flush=True)))
end(first)
end(child(as_user, 5002, lambda: print(look(root), flush=True)))
"""

NESTED = """
root, above = Path(sys.argv[1]), int(sys.argv[2])
# The number of the first child is that of a process above, and the number of the second one is nobody's there.
for wanted in (above, next(pid for pid in range(above + 1, 4 << 20) if not os.path.exists(f"/proc/{pid}"))):
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(wanted - 1))
    first = child(save, root)
    if first != wanted:
        sys.exit("skip: pids cannot be chosen here")
    print(look(root))
    end(first)
    print(look(root))
"""

REPLACED = """
root = Path(sys.argv[1])
if sys.argv[2] == "first":
    save(root)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[3], sys.argv[1], "second", ""])
print(look(root))
"""


def run(script: str, *arguments: str, within: tuple[str, ...] = ()) -> list[str]:
    if within and shutil.which(within[0]) is None:
        pytest.skip(f"no {within[0]} here")
    command = [*within, sys.executable, "-c", START + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if within and (done.stderr.startswith(("unshare:", "skip")) or "Command '['mount'" in done.stderr):
        pytest.skip(f"not permitted here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_another_user_s_trainer_that_proc_hides_is_not_dead() -> None:
    """`mount -o remount,hidepid=2 /proc`: its folder was deleted, and its lock was taken."""
    seen = run(HIDDEN, within=("unshare", "--mount", "--pid", "--fork", "--mount-proc"))
    assert seen == ["unknown stays locked", "dead gone free"]


def test_trainers_in_a_pid_namespace_whose_proc_is_that_of_another(tmp_path: Path) -> None:
    """`unshare --pid --fork`: /proc/2 is not the process 2 of this namespace, but perhaps kthreadd."""
    seen = run(NESTED, str(tmp_path), str(os.getpid()), within=("unshare", "--pid", "--fork"))
    assert seen == ["unknown stays locked", "dead gone free"] * 2


def test_a_process_that_runs_another_program_in_its_place_has_begun_a_new_life(tmp_path: Path) -> None:
    """It has the same number and start. What it left was in use for ever."""
    assert run(REPLACED, str(tmp_path), "first", START + REPLACED) == ["dead gone free"]


def test_a_forked_child_has_a_life_of_its_own() -> None:
    told, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(end, Owner.this_process().nonce.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(told, 100).decode() not in ("", HERE.nonce)


def test_a_process_whose_first_thread_has_ended_still_lives() -> None:
    """It looks like a zombie, but its other threads may write, as those of a killed process that waits for a disk."""
    told, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=lambda: (os.write(end, b"x"), signal.pause())).start()
        ctypes.CDLL(None).syscall(SYS_EXIT, 0)
    try:
        assert os.read(told, 1) == b"x"
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.sched_yield()
        left = owner_of_process(pid)
        assert left.life is Life.ALIVE
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert left.life is Life.DEAD


PARENT = parent()


@pytest.mark.parametrize(
    ("who", "life"),
    [
        (PARENT, Life.ALIVE),
        (replace(PARENT, start=PARENT.start + 1), Life.DEAD),
        # A start by another clock, or one that its process could not read, proves nothing.
        (replace(PARENT, start=PARENT.start + 1, clock="time:[1]"), Life.UNKNOWN),
        (replace(PARENT, start=0), Life.UNKNOWN),
        (replace(PARENT, host="node7 another-boot pid:[1]"), Life.UNKNOWN),
        (replace(PARENT, pid=1 << 40), Life.UNKNOWN),
        (HERE, Life.ALIVE),
        (replace(HERE, nonce=""), Life.ALIVE),
        (replace(HERE, nonce="0" * 32), Life.DEAD),
    ],
)
def test_what_proves_a_death(who: Owner, life: Life) -> None:
    assert who.life is life


def test_a_host_that_does_not_tell_who_it_is_proves_nothing(monkeypatch: pytest.MonkeyPatch, dead_pid: int) -> None:
    """In a container that hides /proc/sys, another host of the same name looks like this one."""

    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(owner, "this_host", refuse)
    mine = Owner.this_process()
    assert mine.life is Life.ALIVE
    assert Owner(HERE.host, dead_pid, 1).life is Life.UNKNOWN
    monkeypatch.setattr(owner, "_nonce", "0" * 32)
    assert replace(mine, pid=dead_pid).life is Life.UNKNOWN


def test_a_process_of_another_container_is_named_as_such() -> None:
    """Its number is that of an innocent process here."""
    name, boot, _ = HERE.host.split()
    assert str(Owner(f"{name} {boot} pid:[1]", 2, 99)) == f"process 2 in another container on {name}"
    assert str(Owner("node7 another-boot pid:[1]", 2, 99)) == "process 2 on node7"


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of owners belong to another user, who lets nobody read them."""

    def refuse(path: Path, most: int) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(owner, "read_small", refuse)


def test_an_owner_that_may_not_be_read_may_live(role_dir: Path, unreadable: None) -> None:
    stage(role_dir, 4)
    assert work_folders.is_in_use(role_dir.parent, role_dir.parent)
    deleted = role_dir.parent.with_name(".global_steps_7.deleted-0")
    deleted.mkdir()
    assert work_folders.is_deleted_for_good(deleted, alone=False)
    own(deleted, HERE)
    assert not work_folders.is_deleted_for_good(deleted, alone=False)
    assert work_folders.is_deleted_for_good(deleted, alone=True)


@pytest.mark.parametrize("what", ["damaged", "unreadable"])
def test_a_lock_that_does_not_say_whose_it_is_may_be_that_of_a_living_trainer(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_names.trainer_file(tmp_path, ROLE).write_bytes(b"{")
    if what == "unreadable":

        def refuse(path: Path) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(trainer_watch, "read_claim", refuse)
    assert TrainerWatch(tmp_path).lives() == {ROLE: Life.UNKNOWN}


@pytest.mark.parametrize(("number", "is_unread"), [(errno.EBADF, False), (errno.EIO, False), (errno.ENOLCK, True)])
def test_only_a_file_system_without_locks_says_that_nobody_reads(
    role_dir: Path, number: int, is_unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(role_dir, 4)

    def fail(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with read_lock.unread([role_dir]) as alone:
        assert alone == is_unread


def test_who_comes_back_does_not_put_a_half_removed_checkpoint_in_place(
    role_dir: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for dead, as a stopped one on another host is, and goes on while its folder is removed."""
    make(role_dir, 3)
    staging, attempt = stage(role_dir, 4)
    own(staging, dead_owner(dead_pid))
    remove, tried = commit.remove_tree, []

    def come_back(folder: Path) -> None:
        next(path for path in folder.rglob("*") if path.suffix == ".pt").unlink()
        with pytest.raises(FileNotFoundError):
            commit.publish(staging, role_dir, attempt)
        tried.append(folder)
        remove(folder)

    monkeypatch.setattr(commit, "remove_tree", come_back)
    leftovers.remove_leftovers(role_dir.parent.parent, ROLE, alone=True)
    assert tried
    assert read_version(role_dir) == 3
    assert sorted(entry.name for entry in role_dir.parent.iterdir()) == [ROLE]
