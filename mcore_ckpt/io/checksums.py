"""Computes CRC-32 checksums of bytes in memory, of whole files and of parts of files.

All checksums of the package are computed here, or in `csrc/crc32.cpp` while bytes are copied, written or read.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.threads import results_of

# A function that is called with the number of bytes that were just read or written.
Progress = Callable[[int], object]


@dataclass(frozen=True)
class _Piece:
    """Bytes `[start, start + nbytes)` of a file. `start` is a multiple of the page size, which O_DIRECT requires."""

    path: Path
    start: int
    nbytes: int


class _Buffer:
    """Page-aligned memory that one thread reads a piece into."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


def crc32(data: bytes | memoryview, seed: int = 0) -> int:
    """Returns zlib's CRC-32 (polynomial 0xEDB88320) of bytes. `seed` is the CRC-32 of the bytes before `data`."""
    return zlib.crc32(data, seed)


def file_crcs(files: Sequence[tuple[Path, int]], progress: Progress = lambda nbytes: None) -> list[int | OSError]:
    """Returns the CRC-32 of each file, or the error that prevented reading it.

    After an error in one file, the other files are still read. Memory use is IO_THREADS buffers of READ_BYTES, whatever
    the sizes of the files.

    Args:
        files: paths and sizes in bytes. Bytes beyond the given size are not read.
        progress: called from several threads, each time with the number of bytes just read.
    """
    pieces = [list(_pieces(path, nbytes)) for path, nbytes in files]
    own = threading.local()

    def crc_of(piece: _Piece) -> int | OSError:
        if not hasattr(own, "buffer"):
            own.buffer = _Buffer(tuning.READ_BYTES)
        try:
            _read_piece(piece, own.buffer)
        except OSError as error:
            return error
        progress(piece.nbytes)
        return _native.crc32(own.buffer.address, piece.nbytes)

    # Use `results_of`, because a `DiskWatch` sees its threads. A `DiskWatch` would not see the threads of an executor.
    found = iter(results_of(list(chain.from_iterable(pieces)), crc_of, tuning.IO_THREADS, are_long=True))
    return [_combine([(piece, next(found)) for piece in of_file]) for of_file in pieces]


def block_crcs(path: Path, start: int, nbytes: int, block_bytes: int) -> Iterator[int]:
    """Yields the CRC-32 of each block in a range of a file. The last block may be shorter. Raises OSError."""
    buffer = _Buffer(block_bytes)
    with path.open("rb", buffering=0) as file:
        for offset in range(start, start + nbytes, block_bytes):
            size = min(block_bytes, start + nbytes - offset)
            _fill(file.fileno(), buffer.view[:size], offset, size, path)
            yield _native.crc32(buffer.address, size)


def _pieces(path: Path, nbytes: int) -> Iterator[_Piece]:
    for start in range(0, nbytes, tuning.READ_BYTES):
        yield _Piece(path, start, min(tuning.READ_BYTES, nbytes - start))


def _combine(parts: Sequence[tuple[_Piece, int | OSError]]) -> int | OSError:
    crc = 0
    for piece, found in parts:
        if isinstance(found, OSError):
            return found
        crc = _native.crc32_combine(crc, found, piece.nbytes)
    return crc


def _read_piece(piece: _Piece, buffer: _Buffer) -> None:
    # O_DIRECT reads whole pages. If the file ends within its last page, the read of that page returns fewer bytes.
    padded = -(-piece.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with _open_direct(piece.path) as descriptor:
        _fill(descriptor, buffer.view[:padded], piece.start, piece.nbytes, piece.path)


@contextmanager
def _open_direct(path: Path) -> Iterator[int]:
    """Opens a file for reading without the page cache. On file systems without O_DIRECT, reads use the cache."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _stop_direct(descriptor: int) -> bool:
    """Lets reads of a file use the page cache. Returns False if reads used the cache already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


def _fill(descriptor: int, target: memoryview, offset: int, nbytes: int, path: Path) -> None:
    """Reads at least `nbytes` bytes into `target`, which may be longer. Raises OSError if the file is too short."""
    done = 0
    while done < nbytes:
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            # Even before the end of the file, a direct read may end within a page. Then the next direct read is not
            # aligned, and fails. So the rest is read through the page cache.
            if error.errno != errno.EINVAL or not done % mmap.PAGESIZE or not _stop_direct(descriptor):
                raise
            continue
        if not count:
            raise OSError(errno.ENODATA, f"the file ends at byte {offset + done}", str(path))
        done += count
