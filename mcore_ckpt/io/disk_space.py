"""Finds out how much can still be written into a folder, and whether given files fit.

Three things limit a folder: the free bytes of its file system, the number of files (inodes) that can still be made, and
the quotas of the user, group or project that the files will belong to.

A save that would fit is never refused. So the size of the files to write is a lower bound, and a limit that the
system does not tell is ignored. `DiskSpace.is_certain` is False if files may take less space than their bytes.
`is_certain` is True only for the types of file systems that are exact (`io/file_systems.py`).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from mcore_ckpt.io.file_systems import EXT_MAGIC, XFS_MAGIC, of_magic
from mcore_ckpt.io.mounts import mount_of
from mcore_ckpt.io.quotas import quotas_of

Kind = Literal["nbytes", "entries"]

_CAP_SYS_RESOURCE = 1 << 24  # linux/capability.h


@dataclass(frozen=True)
class Need:
    """Files that are to be written.

    Attributes:
        sizes: the size of each file in bytes, or a lower bound of it.
        folders: the folders to make, as paths below a common folder.
        loose: further bytes, in an unknown number of files.
    """

    sizes: tuple[int, ...] = ()
    folders: frozenset[str] = frozenset()
    loose: int = 0

    def __add__(self, other: Need) -> Need:
        return Need.sum((self, other))

    @staticmethod
    def sum(needs: Iterable[Need]) -> Need:
        """Returns the files and folders of all needs together. Folders of the same path are made only once."""
        needs = tuple(needs)
        return Need(
            tuple(size for need in needs for size in need.sizes),
            frozenset().union(*(need.folders for need in needs)),
            sum(need.loose for need in needs),
        )

    @staticmethod
    def of(files: Iterable[tuple[str, int]]) -> Need:
        """Returns the need of files, which are given as pairs of path and size in bytes.

        Example:
            >>> Need.of([("model/a.pt", 100), ("b.pt", 5)])
            Need(sizes=(100, 5), folders=frozenset({'model'}), loose=0)
        """
        files = tuple(files)
        folders = (str(parent) for path, _ in files for parent in Path(path).parents[:-1])
        return Need(tuple(size for _, size in files), frozenset(folders))


NOTHING = Need()


@dataclass(frozen=True)
class Amount:
    """An amount of disk space: bytes, and entries (files and folders)."""

    nbytes: int
    entries: int

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.nbytes + other.nbytes, self.entries + other.entries)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.nbytes - other.nbytes, self.entries - other.entries)

    def at_least(self, other: Amount) -> Amount:
        """Returns the larger number of bytes and the larger number of entries."""
        return Amount(max(self.nbytes, other.nbytes), max(self.entries, other.entries))


@dataclass(frozen=True)
class Limit:
    """One limit on what can be written. `where` names the place that has this limit, for messages."""

    kind: Kind
    free: int
    where: str

    @property
    def name(self) -> str:
        """The name that distinguishes this limit from other limits of the same folder."""
        return f"{self.kind} {self.where}"

    def holds(self, amount: Amount) -> bool:
        """True if the amount fits."""
        return getattr(amount, self.kind) <= self.free

    def describe(self, amount: Amount) -> str:
        """Says how much is needed and how much is free."""
        if self.kind == "nbytes":
            return f"{amount.nbytes:,} bytes are needed, but only {self.free:,} bytes are free ({self.where})"
        return f"{amount.entries:,} files and folders are needed, but only {self.free:,} are free ({self.where})"


@dataclass(frozen=True)
class DiskSpace:
    """How much can be written into a folder.

    Attributes:
        limits: the limits that the system tells.
        block: each file takes a multiple of this many bytes.
        folder_bytes: how many bytes a new folder takes.
        is_certain: False if files may take less space than their bytes, for example because of compression. Then
            files that seem too large are written nevertheless, after a warning.
    """

    limits: tuple[Limit, ...]
    block: int = 1
    folder_bytes: int = 0
    is_certain: bool = True

    def taken_by(self, need: Need) -> Amount:
        """Returns how much space the files will take in this folder."""
        nbytes = sum(-(-size // self.block) for size in need.sizes) * self.block
        return Amount(nbytes + need.loose + len(need.folders) * self.folder_bytes, len(need.sizes) + len(need.folders))

    def free(self, kind: Kind) -> int | None:
        """Returns how many bytes or entries can still be written; None if the system tells no limit."""
        return min((limit.free for limit in self.limits if limit.kind == kind), default=None)

    def times(self, amount: Amount) -> int | None:
        """Returns how many times an amount fits; None if the system tells no limit for it.

        Example:
            >>> DiskSpace((Limit("nbytes", 100, "disk"),)).times(Amount(30, 1))
            3
        """
        parts = [(limit.free, getattr(amount, limit.kind)) for limit in self.limits]
        return min((free // part for free, part in parts if part), default=None)

    def without(self, nbytes: int) -> DiskSpace:
        """Returns the free space after another `nbytes` bytes are used."""
        limits = (
            replace(limit, free=max(0, limit.free - nbytes)) if limit.kind == "nbytes" else limit
            for limit in self.limits
        )
        return replace(self, limits=tuple(limits))

    def shortages(self, amount: Amount) -> tuple[Limit, ...]:
        """Returns the limits that the amount exceeds."""
        return tuple(limit for limit in self.limits if not limit.holds(amount))

    def shortage(self, amount: Amount) -> Limit | None:
        """Returns the first limit that the amount exceeds; None if it fits."""
        return next(iter(self.shortages(amount)), None)


def existing(folder: Path) -> Path:
    """Returns the folder if it exists, or else the nearest folder above it that exists. Raises OSError."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def space_of(folder: Path) -> DiskSpace:
    """Returns how much can be written into a folder. If the folder is missing, the place where it would be made counts.

    Raises OSError.
    """
    folder = existing(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _space_of(descriptor, folder)
    finally:
        os.close(descriptor)


def _space_of(descriptor: int, folder: Path) -> DiskSpace:
    space, status, magic = os.fstatvfs(descriptor), os.fstat(descriptor), _magic_of(descriptor)
    is_exact = of_magic(magic).is_exact
    rights = _Rights.of_this_thread()
    mount = mount_of(folder)
    options = {} if mount is None else mount.options
    quotas = list(quotas_of(descriptor, options, without_0=magic == XFS_MAGIC))
    project = next((quota for quota in quotas if quota.kind == "project"), None)
    limits: list[Limit] = []
    # If the folder's project has a quota, the system may report the rest of the quota as the disk's free space. Such a
    # number is ignored: it is 0 at the soft limit, although the soft limit may be exceeded for some days.
    if project is None or not project.is_shown_by(space):
        limits += _disk_limits(space, status.st_dev, magic, folder, rights, options)
    # Processes with the capability CAP_SYS_RESOURCE may exceed all quotas except the quotas of XFS.
    if not rights.may_exceed_quotas or magic == XFS_MAGIC:
        for quota in quotas:
            where = f"{quota} in the file system of {folder}"
            if quota.nbytes.free is not None:
                limits.append(Limit("nbytes", quota.nbytes.free, where))
            if quota.entries.free is not None:
                limits.append(Limit("entries", quota.entries.free, f"inodes, {where}"))
    return DiskSpace(
        tuple(limits),
        block=space.f_frsize if is_exact else 1,
        # On most file systems, and on ext4 with `inline_data`, a small folder is stored in its inode and takes no
        # block. So a new folder counts as one block only on ext2 to ext4, and only if the existing folder has blocks.
        folder_bytes=space.f_frsize if magic == EXT_MAGIC and status.st_blocks else 0,
        is_certain=is_exact,
    )


# -- the disk ---------------------------------------------------------------------------------------------------


def _disk_limits(
    space: os.statvfs_result, device: int, magic: int, folder: Path, rights: _Rights, options: Mapping[str, str]
) -> Iterator[Limit]:
    if space.f_blocks > 0:
        free = space.f_bavail
        if rights.may_use_reserve(options):
            # ext4 keeps some blocks for itself, and even root cannot use them.
            free = space.f_bfree - (_own_blocks(device) if magic == EXT_MAGIC else 0)
        # Some network file systems report a negative number of free blocks, which reads as a number larger than the
        # number of all blocks. Such a number is ignored.
        if free <= space.f_blocks:
            yield Limit("nbytes", max(0, free) * space.f_frsize, f"file system of {folder}")
    if space.f_files > 0 and space.f_favail <= space.f_files:
        yield Limit("entries", space.f_favail, f"inodes in the file system of {folder}")


def _magic_of(descriptor: int) -> int:
    """Returns the number of the file system's type; 0 if the system does not tell."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fstatfs") or libc.fstatfs(descriptor, buffer) != 0:
        return 0
    # The first field is the type. It has the size of a word on all systems except s390x.
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def _own_blocks(device: int) -> int:
    with suppress(OSError, ValueError):
        name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
        return int(Path(f"/sys/fs/ext4/{name}/reserved_clusters").read_text())
    return 0


# -- rights -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rights:
    """The rights of this thread. Capabilities in a user namespace are ignored, because they may have no effect."""

    uid: int
    gids: frozenset[int]
    may_exceed_quotas: bool

    @staticmethod
    def of_this_thread() -> _Rights:
        capabilities = 0
        with suppress(OSError):
            found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/thread-self/status").read_text(), re.MULTILINE)
            capabilities = int(found[1], 16) if found else 0
        may_exceed = bool(capabilities & _CAP_SYS_RESOURCE) and not _is_in_user_namespace()
        return _Rights(os.geteuid(), frozenset((os.getegid(), *os.getgroups())), may_exceed)

    def may_use_reserve(self, options: Mapping[str, str]) -> bool:
        """True if this thread may use the blocks that ext4 reserves for root, or for another user or group."""
        if self.may_exceed_quotas:
            return True
        gid = int(options.get("resgid", "0"))
        return self.uid == int(options.get("resuid", "0")) or (gid > 0 and gid in self.gids)


@lru_cache(maxsize=1)
def _is_in_user_namespace() -> bool:
    with suppress(OSError):
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    return False
