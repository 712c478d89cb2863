"""Records which process a folder on disk belongs to, so that other processes can see whether that one is alive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import inside, read_small, write_hint
from mcore_ckpt.ranks.hosts import this_host


@dataclass(frozen=True)
class Owner:
    """The process that a folder or a lock file belongs to.

    Attributes:
        host: the host's name, its boot id and the pid namespace. The name is not enough, because two containers can
            have the same one and still number their processes separately.
        pid: the process id in that namespace.
        start: when the process started, in clock ticks since boot. A later process can get the same pid.
    """

    host: str
    pid: int
    start: int

    @staticmethod
    def this_process() -> Owner:
        """Returns the calling process."""
        return Owner(this_host(), os.getpid(), _start_of(os.getpid()) or 0)

    @staticmethod
    def of(record: Mapping[str, Any]) -> Owner:
        """Returns the owner that `asdict` has turned into this record. Raises FieldError."""
        return Owner(fields.get_name(record, "host"), fields.get_int(record, "pid"), fields.get_int(record, "start"))

    @property
    def is_on_this_host(self) -> bool:
        """True if the owner is on this host and in this pid namespace, so that this process can see if it is alive."""
        return self.host == this_host()

    @property
    def is_alive_here(self) -> bool:
        """True if the owner is on this host and alive."""
        return self.is_on_this_host and _start_of(self.pid) == self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition(' ')[0]}"


def _start_of(pid: int) -> int | None:
    try:
        # Linux shortens the name of the command, and may do so within a UTF-8 character.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # proc(5): field 3 is the state, and field 22 is starttime. Field 2, the command in parentheses, can itself contain
    # spaces and parentheses. A zombie (Z) is dead, but stays in /proc until a process waits for it. In many containers
    # none waits for orphans.
    fields_from_3 = stat.rpartition(")")[2].split()
    return None if fields_from_3[0] in "ZX" else int(fields_from_3[19])


def write_owner(folder: Path) -> None:
    """Records this process as the owner of a folder, in place of any earlier owner. Raises OSError."""
    # Not durably: a power loss ends this process, and a folder with a damaged owner file has no owner.
    (folder / file_names.OWNER_FILE).unlink(missing_ok=True)
    write_hint(folder / file_names.OWNER_FILE, fields.encode(asdict(Owner.this_process())))


def read_owner(folder: Path) -> Owner | None:
    """Returns the owner of a folder; None if the folder has no owner file or a damaged one."""
    try:
        record = fields.decode(read_small(inside(folder, file_names.OWNER_FILE), limits.SMALL_BYTES))
        return Owner.of(record)
    except (OSError, CheckpointCorruptError, fields.FieldError):
        return None
