"""Read requests -> bytes, each block checked before it is handed on."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt import _native, knobs
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.sharding.plan import ReadRange
from mcore_ckpt.storage.dtypes import item_bytes
from mcore_ckpt.storage.files import inside, open_regular, read_exact, read_small
from mcore_ckpt.storage.index import BLOCK_BYTES, FileIndex, decode_index
from mcore_ckpt.storage.json_fields import FieldError
from mcore_ckpt.storage.manifest import FileRecord, Manifest, NewerFormatError, decode_manifest
from mcore_ckpt.storage.pt_values import decode_pt


def read_manifest(role_dir: Path, manifest_file: str) -> Manifest:
    """A role's manifest.

    Raises:
        CheckpointNotFoundError: it is missing, so the folder is not a checkpoint.
        CheckpointCorruptError: it is damaged, or of a newer format.
    """
    path = inside(role_dir, manifest_file)
    try:
        data = read_small(path, knobs.MANIFEST_BYTES)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{path}: missing, so this folder is not a checkpoint (a save that did not finish?)"
        ) from None
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from error
    return parse_manifest(data, path)


def parse_manifest(data: bytes, path: Path | str) -> Manifest:
    """The manifest that a file holds. Raises CheckpointCorruptError: it is damaged, or of a newer format."""
    try:
        return decode_manifest(data)
    except (FieldError, NewerFormatError) as error:
        raise CheckpointCorruptError(f"{path}: {error}") from None


@contextmanager
def open_file(role_dir: Path, record: FileRecord) -> Iterator[int]:
    """A descriptor of a file whose size is the manifest's.

    Raises CheckpointCorruptError if it is missing, of another size, no file, or a link out of the folder.
    """
    path = inside(role_dir, record.path)
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        raise CheckpointCorruptError(
            f"{path}: missing; the manifest says it has {record.size} bytes, written by rank {record.rank}"
        ) from None
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be opened: {error}") from error
    try:
        size = os.fstat(descriptor).st_size
        if size != record.size:
            raise CheckpointCorruptError(
                f"{path}: has {size} bytes, not the {record.size} of the manifest: cut or replaced"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def read_index(role_dir: Path, record: FileRecord) -> FileIndex:
    """A file's index, its checksum and numbers checked. Raises CheckpointCorruptError."""
    path = role_dir / record.path
    assert record.index is not None
    check_size(path, "an index", record.index.size, knobs.INDEX_BYTES)
    with open_file(role_dir, record) as descriptor:
        data = read_exact(descriptor, record.index.size, record.index.offset, path)
    return parse_index(data, record, path)


def parse_index(data: bytes, record: FileRecord, path: Path | str) -> FileIndex:
    """An index out of its bytes, checked as `read_index` does."""
    assert record.index is not None
    if zlib.crc32(data) != record.index.crc32:
        raise CheckpointCorruptError(
            f"{path}: its index (byte {record.index.offset}) has a wrong CRC: damaged, or another file of that name"
        )
    try:
        return decode_index(data, record.path, record.index.offset)
    except FieldError as error:
        raise CheckpointCorruptError(f"{path}: index: {error}") from None


def check_size(path: Path | str, what: str, size: int, most: int) -> None:
    """Raises CheckpointCorruptError for what is too large to be read into memory."""
    if size > most:
        raise CheckpointCorruptError(
            f"{path}: the manifest speaks of {what} of {size} bytes: more than {most} are not read into memory"
        )


def read_plain(role_dir: Path, record: FileRecord) -> dict[str, Any]:
    """A small `.pt` file, whole, its checksum checked, without running anything in it.

    Raises CheckpointCorruptError.
    """
    path = role_dir / record.path
    check_size(path, "a small file", record.size, knobs.PLAIN_BYTES)
    with open_file(role_dir, record) as descriptor:
        data = read_exact(descriptor, record.size, 0, path)
    return parse_plain(data, record, path)


def parse_plain(data: bytes, record: FileRecord, path: Path | str) -> dict[str, Any]:
    """What a small `.pt` file holds, checked as `read_plain` does."""
    if zlib.crc32(data) != record.crc32:
        raise CheckpointCorruptError(f"{path}: has a wrong CRC: damaged, or another file of that name")
    try:
        value = decode_pt(data)
    except Exception as error:  # torch may raise any type for bytes that are no tensor
        raise CheckpointCorruptError(f"{path}: does not hold plain values alone: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointCorruptError(f"{path}: holds a {type(value).__name__}, not a dict")
    return value


def read_ranges(
    role_dir: Path,
    files: Mapping[str, FileRecord],
    reads: Sequence[tuple[ReadRange, torch.Tensor]],
    check: bool = True,
) -> int:
    """Fills tensors with ranges of stored shards, on several threads. Returns how many bytes were read.

    Args:
        role_dir: the folder of the files.
        files: the manifest's records, by path.
        reads: each range, and the contiguous tensor of the stored dtype that is the wanted shard's memory, on the CPU
            or a GPU.
        check: compare the CRCs of blocks.

    Raises:
        CheckpointCorruptError: a block's CRC is wrong, or a file cannot be read. Nothing of a bad block has been
            applied, other blocks may have.
    """
    for path in {read.stored.file for read, _ in reads}:
        with open_file(role_dir, files[path]):
            pass
    return read_stored(role_dir, reads, check)


def read_stored(role_dir: Path, reads: Sequence[tuple[ReadRange, torch.Tensor]], check: bool = True) -> int:
    """As `read_ranges`, of files whose sizes nobody has written down, or that have been looked at."""
    paths = sorted({read.stored.file for read, _ in reads})
    numbers = {path: number for number, path in enumerate(paths)}
    job = _native.ReadJob(
        [str(role_dir / path) for path in paths],
        threads=knobs.IO_THREADS,
        piece_bytes=knobs.READ_BYTES,
        block_bytes=BLOCK_BYTES,
        pinned=any(memory.is_cuda for _, memory in reads),
    )
    for read, memory in reads:
        stored, rows, item = read.stored, read.rows, item_bytes(read.stored.dtype)
        job.add(
            numbers[stored.file],
            stored.offset,
            stored.nbytes,
            list(stored.crc32) if check and stored.crc32 is not None else None,
            rows.start * item,
            rows.row * item,
            rows.rows,
            rows.source_stride * item,
            memory.data_ptr() + rows.destination * item,
            rows.destination_stride * item,
            memory.is_cuda,
        )
    try:
        job.run()
    except _native.DamagedBlock as damage:
        number, offset, nbytes = damage.args
        stored = reads[number][0].stored
        raise CheckpointCorruptError(
            f"{role_dir / stored.file}: tensor {stored.key}: bytes [{offset}, {offset + nbytes}) have a wrong CRC: "
            "damaged"
        ) from None
    except OSError as error:
        cut = ": the file was cut" if error.errno == errno.ENODATA else ""
        raise CheckpointCorruptError(f"{error.filename}: cannot be read: {error.strerror}{cut}") from error
    return job.progress()
