"""Copies files durably, and checks their bytes on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.checksums import Progress, crc32
from mcore_ckpt.io.files import make_parents, new_folder, open_new, open_regular, sync_dir, write_all, write_file


def copy_checked(source: Path, target: Path, size: int, crc: int, progress: Progress = lambda nbytes: None) -> None:
    """Copies a file to a new one, in a folder that exists, and waits until its bytes are on the disk.

    `progress` is called with the number of bytes that were just written. What it raises ends the copying.

    Raises:
        CheckpointCorruptError: the source has another size or CRC-32. The target must not be used.
        FileNotFoundError, OSError: the source is missing, or the target cannot be written. The message names the file.
    """
    found, done = 0, 0
    reading = open_regular(source)
    try:
        writing = open_new(target)
        try:
            # One byte more than there should be shows that the file is too large.
            piece = bytearray(min(tuning.READ_BYTES, size + 1))
            while done <= size and (count := _read(reading, piece, source)):
                memory = memoryview(piece)[:count]
                found, done = crc32(memory, found), done + count
                _write(writing, memory, target)
                progress(count)
            os.fsync(writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    if (done, found) != (size, crc):
        raise CheckpointCorruptError(
            f"{source}: has {done} bytes with CRC {found:08x}, not {size} with {crc:08x}: it is damaged"
        )


def copy_durably(source: Path, target: Path) -> None:
    """Copies a file, or a folder with all that is in it, to a new one. A link to a folder stays one. Raises OSError."""
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


def pieces_of(source: Path) -> Iterator[memoryview]:
    """Yields the bytes of a regular file in pieces. Each piece is valid until the next one. Raises OSError."""
    descriptor = open_regular(source)
    try:
        piece = bytearray(tuning.READ_BYTES)
        while count := _read(descriptor, piece, source):
            yield memoryview(piece)[:count]
    finally:
        os.close(descriptor)


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
