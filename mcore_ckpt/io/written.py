"""Measures how many bytes of an unfinished file have been written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

# A file is written from its beginning on by a few threads, so it has few holes.
_MOST_EXTENTS = 64


def written_bytes(path: Path) -> int:
    """Returns how many bytes of a file have been written; 0 if the file is missing, or this process may not read it.

    The size and the allocated blocks of a file do not show this number: a save reserves the space of a file before it
    writes. Space that is reserved, but not written, counts as a hole (lseek(2), SEEK_DATA). If the file system does not
    report holes, the file's size is returned.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return _data_bytes(descriptor)
    except OSError:
        return 0
    finally:
        os.close(descriptor)


def _data_bytes(descriptor: int) -> int:
    end, total = 0, 0
    for _ in range(_MOST_EXTENTS):
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data after `end`
                return total
            return os.fstat(descriptor).st_size
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        total += end - start
    return total
