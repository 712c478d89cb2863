"""Copies files durably, and checks their bytes on the way."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.checksums import Progress, crc32
from mcore_ckpt.io.files import (
    make_parents,
    new_folder,
    open_new,
    open_regular,
    opened,
    sync_dir,
    write_all,
    write_file,
)

# ioctl(2), linux/fs.h: lets a file share the blocks of another file, on file systems that support this (btrfs, XFS).
_FICLONE = 0x40049409


def copy_checked(source: Path, target: Path, size: int, crc: int, progress: Progress = lambda nbytes: None) -> None:
    """Copies a file to a new file, in a folder that exists, and waits until the bytes are on the disk.

    `progress` is called with the number of bytes that were just written. An exception of `progress` ends the copying.

    Raises:
        CheckpointCorruptError: the source does not have the given size and CRC-32. The target must not be used.
        FileNotFoundError, OSError: the source is missing, or the target cannot be written. The message names the file.
    """
    reading = open_regular(source)
    try:
        writing = open_new(target)
        try:

            def take(piece: memoryview) -> None:
                _write(writing, piece, target)
                progress(piece.nbytes)

            found = _hash_pieces(reading, source, size, take)
            os.fsync(writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    if (found.size, found.crc32) != (size, crc):
        raise CheckpointCorruptError(
            f"{source}: has {found.size} bytes with CRC {found.crc32:08x}, not {size} with {crc:08x}: it is damaged"
        )


def copy_durably(source: Path, target: Path) -> None:
    """Copies a file, or a folder with its contents, to a new path. A link to a folder stays a link. Raises OSError."""
    make_parents(target)
    if source.is_symlink() and source.is_dir():
        target.symlink_to(os.readlink(source))
        return
    if not source.is_dir():
        write_file(target, pieces_of(source))
        return
    new_folder(target)
    for entry in sorted(source.iterdir()):
        copy_durably(entry, target / entry.name)
    sync_dir(target)


def clone_file(source: Path, target: Path) -> None:
    """Makes a new file with the bytes of another file, and does not wait until the bytes are on the disk.

    If the file system can, both files share their blocks until one of them changes, so that no byte is copied. Raises
    OSError.
    """
    with opened(source) as (reading, _):
        writing = open_new(target)
        try:
            if not _shares_blocks(writing, reading):
                for piece in pieces_of(source):
                    _write(writing, piece, target)
        finally:
            os.close(writing)


def share_blocks(source: Path, target: Path) -> bool:
    """Makes a new file that shares the blocks of another file until one of them changes.

    Returns False, and makes no file, if the file systems cannot do that. Raises OSError.
    """
    with opened(source) as (reading, _):
        writing = open_new(target)
        try:
            is_shared = _shares_blocks(writing, reading)
        finally:
            os.close(writing)
    if not is_shared:
        target.unlink()
    return is_shared


def link_file(source: Path, target: Path) -> None:
    """Gives a file a second name. If the file system cannot do that, makes a clone with the second name.

    Raises OSError.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # another file system, no links, too many links, or a file of another user
        clone_file(source, target)


def pieces_of(source: Path) -> Iterator[memoryview]:
    """Yields the bytes of a regular file in pieces.

    Each piece is valid until the next piece is yielded. Raises OSError.
    """
    descriptor = open_regular(source)
    try:
        piece = bytearray(tuning.READ_BYTES)
        while count := _read(descriptor, piece, source):
            yield memoryview(piece)[:count]
    finally:
        os.close(descriptor)


class Hashed(NamedTuple):
    """The size in bytes and the CRC-32 of a file that is on the disk, and whether the file took new disk space."""

    size: int
    crc32: int
    takes_space: bool = True


def copy_hashed(source: Path, target: Path) -> Hashed:
    """Copies a file to a new file as `clone_file` does, waits until the bytes are on the disk, and hashes them.

    Bytes that are copied are hashed on the way. Raises OSError, also if the source changes meanwhile.
    """
    with opened(source) as (reading, _):
        writing = open_new(target)
        try:
            if _shares_blocks(writing, reading):
                return hash_durably(target)._replace(takes_space=False)
            copied = _hash_open(reading, source, lambda piece: _write(writing, piece, target))
            os.fsync(writing)
            return copied
        finally:
            os.close(writing)


def _shares_blocks(writing: int, reading: int) -> bool:
    """Lets a new file share the blocks of another file. Returns False if the file systems cannot do that."""
    with suppress(OSError):
        fcntl.ioctl(writing, _FICLONE, reading)
        return True
    return False


def hash_durably(path: Path) -> Hashed:
    """Waits until the bytes of a file are on the disk, and hashes them. Raises OSError, also if the file changes."""
    with opened(path) as (reading, _):
        os.fsync(reading)
        return _hash_open(reading, path, lambda piece: None)


def _hash_open(reading: int, path: Path, take: Callable[[memoryview], None]) -> Hashed:
    before = os.fstat(reading)
    hashed = _hash_pieces(reading, path, before.st_size, take)
    after = os.fstat(reading)
    if (hashed.size, after.st_size, after.st_mtime_ns) != (before.st_size, before.st_size, before.st_mtime_ns):
        raise OSError(errno.EBUSY, "has changed while it was saved", str(path))
    return hashed


def _hash_pieces(reading: int, path: Path, size: int, take: Callable[[memoryview], None]) -> Hashed:
    """Reads and hashes a file that should have `size` bytes. `take` gets each piece, which is valid until the next.

    If the file is larger, stops soon after `size` bytes, because a file may grow for ever.
    """
    piece = bytearray(min(tuning.READ_BYTES, size + 1))  # one byte more than `size` shows that the file is larger
    done = crc = 0
    while done <= size and (count := _read(reading, piece, path)):
        memory = memoryview(piece)[:count]
        take(memory)
        done, crc = done + count, crc32(memory, crc)
    return Hashed(done, crc)


def _read(descriptor: int, memory: bytearray, path: Path) -> int:
    try:
        return os.readv(descriptor, [memory])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(descriptor: int, memory: memoryview, path: Path) -> None:
    try:
        write_all(descriptor, memory)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
