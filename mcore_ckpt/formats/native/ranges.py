"""Reads ranges of stored tensors into memory on native threads. Checks the CRC of each block before using the block."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_ckpt.checkpoint.element_sizes import item_bytes
from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.reading import open_file
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.contract import ReadTarget
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.device_waits import patience_s, saying_what_hangs
from mcore_ckpt.io.disk_watch import in_job


def read_ranges(
    role_dir: Path,
    files: Mapping[str, FileRecord],
    reads: Sequence[ReadTarget],
    check: bool = True,
    piece_bytes: int = tuning.READ_BYTES,
) -> int:
    """Fills tensors with ranges of stored shards, on several threads, and returns the number of bytes read.

    Args:
        files: the manifest's records, by path.
        reads: the ranges, each with the tensor to fill: contiguous, of the stored dtype, on the CPU or on a GPU.
        check: whether to check the CRC of each block before its bytes are used.
        piece_bytes: the number of bytes that one thread reads at a time.

    Raises:
        CheckpointCorruptError: a block's CRC is wrong, or a file cannot be read. The damaged block has not been copied,
            but other blocks may have been.
        CommitError: the GPU of a tensor hangs.
    """
    for path in {read.stored.file for read, _ in reads}:
        with open_file(role_dir, files[path]):
            pass
    return read_stored(role_dir, reads, check, piece_bytes)


# The jobs whose GPU hangs. Queued copies may still write to the destinations, so this list keeps the jobs alive, and
# the jobs keep the destinations alive.
_hung: list[_native.ReadJob] = []


def _run(job: _native.ReadJob) -> None:
    try:
        with in_job(job):
            job.run()
    except _native.DeviceStuck:
        _hung.append(job)
        raise


def read_stored(
    role_dir: Path, reads: Sequence[ReadTarget], check: bool = True, piece_bytes: int = tuning.READ_BYTES
) -> int:
    """Does the same as `read_ranges`, but does not check the files' sizes, which may be unknown."""
    paths = sorted({read.stored.file for read, _ in reads})
    numbers = {path: number for number, path in enumerate(paths)}
    job = _native.ReadJob(
        [str(role_dir / path) for path in paths],
        threads=tuning.IO_THREADS,
        piece_bytes=piece_bytes,
        block_bytes=BLOCK_BYTES,
        pinned=any(memory.is_cuda for _, memory in reads),
        device_timeout=patience_s(),
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
            memory.get_device() if memory.is_cuda else None,
            owner=memory,
        )
    try:
        with saying_what_hangs():
            _run(job)
    except _native.DamagedBlock as damage:
        number, offset, nbytes = damage.args
        stored = reads[number][0].stored
        raise CheckpointCorruptError(
            f"{role_dir / stored.file}: tensor {stored.key}: bytes [{offset}, {offset + nbytes}) have a wrong CRC: "
            "they are damaged"
        ) from None
    except OSError as error:
        cut = ": the file was cut" if error.errno == errno.ENODATA else ""
        raise CheckpointCorruptError(f"{error.filename}: cannot be read: {error.strerror}{cut}") from error
    return job.progress()
