"""What a process has in use at a moment: memory, threads, descriptors; and what lies in the store and on the disk."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("memory", "threads", "descriptors", "keys", "files")


class Usage(NamedTuple):
    """`memory` is what the process has in RAM, in bytes. `allocated`: what the C library has given out; `blocks`: of
    Python's objects. What both keep for later is in the first alone, and moves by itself.
    """

    memory: int
    allocated: int
    blocks: int
    threads: int
    descriptors: int
    keys: int
    files: int


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo2


def usage(store: Any, disk: Path) -> Usage:
    """`store`: the ranks' key-value store. `disk`: the folder of all roots, and of the remote store."""
    info = _libc.mallinfo2()
    return Usage(
        memory=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        allocated=info.uordblks + info.hblkhd,
        blocks=sys.getallocatedblocks(),
        threads=len(os.listdir("/proc/self/task")),
        descriptors=len(os.listdir("/proc/self/fd")),
        keys=store.num_keys(),
        files=sum(len(folders) + len(names) for _, folders, names in os.walk(disk)),
    )
