"""Records which process a folder on disk belongs to, so that other processes can see whether the owner is alive.

A pid does not identify an owner: pids are reused, containers number their processes separately, and a process that runs
another program in its place (`exec`) keeps its pid. Therefore an owner is one life of a process: from its start, or
from its last `exec`, to its end. A life has ended if one of these is true in its pid namespace: no process has its pid;
a process with another start time has its pid; or the process that asks has its pid and is another life. A start time
that cannot be read leaves the answer unknown.
"""

from __future__ import annotations

import enum
import functools
import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import inside, read_small, write_hint
from mcore_ckpt.ranks.hosts import this_host


class Life(enum.Enum):
    """Whether a process is alive. UNKNOWN: this process cannot see the other process, which then counts as alive."""

    ALIVE = "alive"
    UNKNOWN = "unknown"
    DEAD = "dead"


@dataclass(frozen=True)
class Owner:
    """The process that a folder or a lock file belongs to.

    Attributes:
        host: the host's name, its boot id and the pid namespace. The name alone is not enough, because two containers
            can have the same name and still number their processes separately.
        pid: the process id in that namespace.
        start: when the process started, in clock ticks since boot; 0 if that is not known. A later process can get the
            same pid.
        clock: the time namespace whose clock counts the ticks of `start`; empty if it is not known.
        nonce: a random number that only this life has. A forked child has another number, and so has a program that the
            process runs in its place (`exec`). Empty in files of older versions.
    """

    host: str
    pid: int
    start: int
    clock: str = ""
    nonce: str = ""

    @staticmethod
    def this_process() -> Owner:
        """Returns the calling process."""
        return Owner(_here(), os.getpid(), _own_start(os.getpid()), _clock(), _nonce)

    @staticmethod
    def of(record: Mapping[str, Any]) -> Owner:
        """Returns the owner that `asdict` has turned into this record. Raises FieldError."""
        pid = fields.get_int(record, "pid")
        if pid == 0:  # kill(2) would take 0 for a group of processes
            raise fields.FieldError("'pid' is 0, which no process has")
        texts = (fields.get_name(record, key) if record.get(key) else "" for key in ("clock", "nonce"))
        return Owner(fields.get_name(record, "host"), pid, fields.get_int(record, "start"), *texts)

    @property
    def is_this_process(self) -> bool:
        """True if the owner is the calling process, and not an earlier life with the same pid."""
        mine = Owner.this_process()
        is_same = (self.host, self.pid, self.start) == (mine.host, mine.pid, mine.start)
        return is_same and self.nonce in ("", mine.nonce)

    @property
    def life(self) -> Life:
        """Whether the owner is alive, as far as this process can find out."""
        if self.is_this_process:
            return Life.ALIVE
        if self.host != _here():
            return Life.UNKNOWN
        if self.pid == os.getpid():
            return Life.DEAD
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return Life.DEAD
        except (OSError, OverflowError):
            pass  # the process is another user's
        # Look into /proc only if /proc shows this process's pid namespace: in a namespace above, another process has
        # the pid.
        stat = _stat_of(self.pid) if _shows_this_namespace() else None
        if stat is None:
            return Life.UNKNOWN  # /proc is mounted with hidepid, or the process has just ended
        if _is_over(stat):
            return Life.DEAD
        if self.start == 0 or self.clock not in ("", _clock()):
            return Life.UNKNOWN
        return Life.ALIVE if _start_in(stat) == self.start else Life.DEAD

    def __str__(self) -> str:
        name, _, rest = self.host.partition(" ")
        boot, _, namespace = rest.partition(" ")
        here = _here().split(" ")
        if [name, boot] == here[:2] and namespace != here[2]:
            # Without the words about the container, the pid would seem to name an innocent process of this container.
            return f"process {self.pid} in another container on {name}"
        return f"process {self.pid} on {name}"


def _new_life() -> None:
    global _nonce
    _nonce = uuid.uuid4().hex


# The nonce is only in memory, so that it does not outlive an `exec`.
_nonce = uuid.uuid4().hex
os.register_at_fork(after_in_child=_new_life)


def _here() -> str:
    try:
        return this_host()
    except OSError:
        # A container may hide /proc/sys. In that case use a random id, because another host with the same name must not
        # look like this host.
        return f"{socket.gethostname()} unknown {_nonce}"


@functools.cache
def _own_start(pid: int) -> int:
    # /proc/{pid} would be another process if /proc belongs to a pid namespace above this process's namespace.
    stat = _stat_of("self")
    return 0 if stat is None else _start_in(stat)


def _stat_of(pid: int | str) -> list[str] | None:
    """Returns the fields of a process in /proc, from field 3 on; None if they cannot be read."""
    with suppress(OSError, ValueError):
        # Linux shortens the name of the command, perhaps within a UTF-8 character, so replace bytes that are not UTF-8.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # Field 2, the command in parentheses, can contain spaces and parentheses, so split after the last parenthesis.
        found = stat.rpartition(")")[2].split()
        return found if len(found) > 19 else None
    return None


# proc(5): field 3 is the state, field 20 the number of threads, and field 22 is starttime.
def _start_in(stat: list[str]) -> int:
    return int(stat[19])


def _is_over(stat: list[str]) -> bool:
    # A zombie (Z) is dead, but stays in /proc until a process waits for it. In many containers no process waits for
    # orphans. Other threads of a zombie may still write while they are ending, so the zombie's life is over only once
    # no other thread is left.
    return stat[0] in "XZ" and int(stat[17]) <= 1


def _clock() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/time")
    return ""


def _shows_this_namespace() -> bool:
    """True if /proc numbers processes as this process's pid namespace does."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return len(line.split()) == 2  # the pid in each namespace, from /proc's to the innermost
        return os.readlink("/proc/self") == str(os.getpid())
    return False


def write_owner(folder: Path) -> None:
    """Records this process as the owner of a folder, replacing any earlier owner. Raises OSError."""
    # The file need not be durable: a power loss ends this process, and a damaged file counts as an unknown owner.
    (folder / file_names.OWNER_FILE).unlink(missing_ok=True)
    write_hint(folder / file_names.OWNER_FILE, fields.encode(asdict(Owner.this_process())))


def read_owner(folder: Path) -> Owner | None:
    """Returns the owner of a folder; None if the owner file is missing or damaged, or cannot be read."""
    try:
        record = fields.decode(read_small(inside(folder, file_names.OWNER_FILE), limits.SMALL_BYTES))
        return Owner.of(record)
    except (OSError, CheckpointCorruptError, fields.FieldError):
        return None


def life_of(folder: Path) -> Life | None:
    """Returns whether the owner of a folder is alive; None if the folder has no owner file."""
    owner = read_owner(folder)
    if owner is not None:
        return owner.life
    try:
        os.lstat(folder / file_names.OWNER_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass
    return Life.UNKNOWN
