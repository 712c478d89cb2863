"""Reads the quotas of users, groups and projects that limit what can be written into a folder.

The system call quotactl_fd(2) needs no name of a device. The call has existed since Linux 5.14. Many containers forbid
the call, and network file systems do not support it. In these cases no quota is found.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# quotactl_fd(2) has the same number on all architectures except alpha. The commands and structures are defined in
# linux/quota.h and linux/dqblk_xfs.h.
_QUOTACTL_FD = 443
_GET_QUOTA = 0x800007
_GET_STATE = (ord("X") << 8) + 5
_DQBLK = struct.Struct("=8QI4x")
_QUOTA_BLOCK = 1024
_KINDS = ("user", "group", "project")
# ioctl_xfs_fsgetxattr(2)
_GET_ATTRIBUTES = 0x801C581F
_ATTRIBUTES = struct.Struct("=5I8x")
_INHERITS_PROJECT = 0x200


class Usage(NamedTuple):
    """The use and the limits of a quota, either for bytes or for entries.

    A limit of 0 means no limit. `ends` is the end of the grace period, in seconds since the epoch.
    """

    used: int
    soft: int
    hard: int
    ends: int

    @property
    def free(self) -> int | None:
        """How much may still be written; None if there is no limit."""
        is_over = self.ends and self.soft and self.used >= self.soft and self.ends < time.time()
        limit = self.soft if is_over else self.hard
        return max(0, limit - self.used) if limit else None

    @property
    def shown(self) -> int | None:
        """The free amount that the system shows in a folder of the project."""
        limit = self.soft or self.hard
        return max(0, limit - self.used) if limit else None


@dataclass(frozen=True)
class Quota:
    """A quota of bytes and entries (files and folders) of the user, group or project (`kind`) with this number."""

    kind: str
    number: int
    nbytes: Usage
    entries: Usage

    def __str__(self) -> str:
        return f"quota of {self.kind} {self.number}"

    def is_shown_by(self, space: os.statvfs_result) -> bool:
        """True if `space` shows the rest of this quota instead of the free space of the disk."""
        blocks = None if self.nbytes.shown is None else self.nbytes.shown // space.f_frsize
        return blocks == space.f_bfree or (self.entries.shown is not None and self.entries.shown == space.f_ffree)


def quotas_of(descriptor: int, options: Collection[str], without_0: bool) -> Iterator[Quota]:
    """Yields the enforced quotas that new files in an open folder count towards, as far as this process may read them.

    `options` are the names of the mount's options. `without_0`: whether to leave out the user, group or project with
    number 0, where XFS keeps the default limits.
    """
    status = os.fstat(descriptor)
    enforced = _enforced(descriptor)
    if not enforced:
        return
    takes_folders_group = status.st_mode & stat.S_ISGID or "grpid" in options or "bsdgroups" in options
    numbers = (os.geteuid(), status.st_gid if takes_folders_group else os.getegid(), _project_of(descriptor))
    for type_, number in enumerate(numbers):
        if number is None or not enforced >> (2 * type_ + 1) & 1 or (without_0 and number == 0):
            continue
        quota = _read_quota(descriptor, type_, number)
        if quota is not None:
            yield quota


def _enforced(descriptor: int) -> int:
    """Returns the flags of Q_XGETQSTAT.

    Each kind of quota has two bits: one says that the quota is counted, the other that it is enforced.
    """
    buffer = ctypes.create_string_buffer(256)
    if not _quotactl(descriptor, _GET_STATE, 0, 0, buffer):
        return 0
    return int(struct.unpack_from("=xxH", buffer)[0])


def _project_of(descriptor: int) -> int | None:
    """Returns the project that new files in a folder will belong to; None if new files inherit no project."""
    try:
        data = fcntl.ioctl(descriptor, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size))
    except OSError:
        return None
    flags, _, _, project, _ = _ATTRIBUTES.unpack(data)
    return project if flags & _INHERITS_PROJECT else None


def _read_quota(descriptor: int, type_: int, number: int) -> Quota | None:
    buffer = ctypes.create_string_buffer(_DQBLK.size)
    if not _quotactl(descriptor, _GET_QUOTA, type_, number, buffer):
        return None
    hard, soft, used, files_hard, files_soft, files, ends, files_end, _ = _DQBLK.unpack(buffer)
    nbytes = Usage(used, soft * _QUOTA_BLOCK, hard * _QUOTA_BLOCK, ends)
    return Quota(_KINDS[type_], number, nbytes, Usage(files, files_soft, files_hard, files_end))


def _quotactl(descriptor: int, command: int, type_: int, number: int, buffer: ctypes.Array[ctypes.c_char]) -> bool:
    """Calls quotactl_fd(2). Returns False if the file system has no quotas, or the system forbids the call."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_long(_QUOTACTL_FD), ctypes.c_uint(descriptor), ctypes.c_uint(command << 8 | type_))
    return bool(libc.syscall(*words, ctypes.c_int(number), buffer) == 0)
