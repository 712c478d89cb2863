"""Describes types of file systems, from their documents and from trials (docs/doctor.md).

The native writer finds out for itself whether a file is in memory (`has_no_disk` in csrc/file.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Numbers of statfs(2), from linux/magic.h. Ext2, ext3 and ext4 share one number.
EXT_MAGIC = 0xEF53
XFS_MAGIC = 0x58465342
TMPFS_MAGIC = 0x01021994


@dataclass(frozen=True)
class Abilities:
    """Whether a type of file system can bypass the page cache (O_DIRECT), exchange two folders, and has `flock`."""

    direct: bool
    exchange: bool
    locks: bool


@dataclass(frozen=True)
class FileSystem:
    """The description of a type of file system. The defaults describe an unknown type.

    Attributes:
        place: where the files are; `layer` for an overlay, such as a container's.
        magic: the type's number in statfs(2); None if nothing needs the number.
        is_exact: whether each file takes whole blocks of `f_frsize` and never less space than its bytes, and the system
            tells this host how much space is free. On other types, no file can be called too large before it is
            written.
        abilities: what the type can do; None if that was not tried.
    """

    place: Literal["disk", "memory", "network", "layer", "unknown"] = "unknown"
    magic: int | None = None
    is_exact: bool = False
    abilities: Abilities | None = None


_ALL = Abilities(direct=True, exchange=True, locks=True)
_UNKNOWN = FileSystem()
_NETWORK = FileSystem("network")
# These types neither compress nor deduplicate written data. XFS can share blocks of existing files, but new files take
# new blocks.
_EXT = FileSystem("disk", EXT_MAGIC, is_exact=True)
_XFS = FileSystem("disk", XFS_MAGIC, is_exact=True, abilities=_ALL)
_TMPFS = FileSystem("memory", TMPFS_MAGIC, is_exact=True, abilities=replace(_ALL, direct=False))

# The types, by their names in mountinfo.
_BY_NAME = {
    "ext2": _EXT,
    "ext3": _EXT,
    "ext4": replace(_EXT, abilities=_ALL),
    "xfs": _XFS,
    "tmpfs": _TMPFS,
    "ramfs": FileSystem("memory"),
    # btrfs can compress, so it is not exact.
    "btrfs": FileSystem("disk", abilities=_ALL),
    # statfs(2) reports the free space of the upper layer, but names overlayfs as the type (`ovl_statfs`). So the type
    # does not show whether the upper layer compresses, and an overlay does not count as exact. The upper layer cannot
    # be looked up either: mountinfo has its path on the host, which means nothing inside a container.
    "overlay": FileSystem("layer", abilities=_ALL),
    # Servers can compress and deduplicate. The free space that they report can also be old, in other units, or the rest
    # of a quota. So these types are not exact.
    **dict.fromkeys(
        ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs", "afs", "gfs2", "ocfs2"),
        _NETWORK,
    ),
}
_BY_MAGIC = {system.magic: system for system in (_EXT, _XFS, _TMPFS)}


def of_name(name: str) -> FileSystem:
    """Returns the description of a type by its name in mountinfo.

    Example:
        >>> of_name("nfs4").place, of_name("zfs").place
        ('network', 'unknown')
    """
    return _BY_NAME.get(name, _UNKNOWN)


def of_magic(magic: int) -> FileSystem:
    """Returns the description of a type by its number in statfs(2).

    The abilities are unknown if types with different abilities share the number, as ext2 to ext4 do.

    Example:
        >>> of_magic(0xEF53).is_exact, of_magic(0x6969).is_exact
        (True, False)
    """
    return _BY_MAGIC.get(magic, _UNKNOWN)
