"""Tells how many bytes a folder of this node can still take.

If the folder is in memory, free memory is a limit, too.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mcore_ckpt.io.disk_space import existing, space_of
from mcore_ckpt.io.file_systems import of_name
from mcore_ckpt.io.mounts import mount_of


def bytes_free(folder: Path) -> int | None:
    """Returns how many bytes a folder, or the place where it would be made, can still take.

    None if there is no limit.

    Free memory is a limit, too, if the folder is in memory: a tmpfs takes memory only when it is written to, so a tmpfs
    can report more free bytes than the node has memory. Raises OSError.
    """
    limits = [limit.free for limit in space_of(folder).limits if limit.kind == "nbytes"]
    if is_memory(folder):
        limits += _free_memory()
    return min(limits, default=None)


def is_memory(folder: Path) -> bool:
    """Returns True if a folder, or the place where it would be made, is in memory. Raises OSError."""
    mount = mount_of(existing(folder))
    return mount is not None and of_name(mount.kind).place == "memory"


def _free_memory() -> list[int]:
    """Returns how many bytes of memory the system can still give, and how many the process's control group can give."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")))
    # Control groups, version 2: pages of a tmpfs count for the group that wrote them.
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            found.append(max(0, int(most) - int((group / "memory.current").read_text())))
    return found
