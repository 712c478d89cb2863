"""Read requests -> bytes, each block checked before it is handed on."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt import _native
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.knobs import HOST_THREADS, READ_CHUNK_BYTES
from mcore_ckpt.sharding.plan import ReadRange, StoredShard
from mcore_ckpt.storage.dtypes import item_bytes
from mcore_ckpt.storage.files import read_exact, read_exact_into
from mcore_ckpt.storage.index import BLOCK_BYTES, FileIndex, decode_index
from mcore_ckpt.storage.json_fields import FieldError
from mcore_ckpt.storage.manifest import FileRecord, Manifest, NewerFormatError, decode_manifest


def read_manifest(role_dir: Path, manifest_file: str) -> Manifest:
    """A role's manifest.

    Raises:
        CheckpointNotFoundError: it is missing, so the folder is not a checkpoint.
        CheckpointCorruptError: it is damaged, or of a newer format.
    """
    path = role_dir / manifest_file
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{path}: missing, so this folder is not a checkpoint (a save that did not finish?)"
        ) from None
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from error
    try:
        return decode_manifest(data)
    except (FieldError, NewerFormatError) as error:
        raise CheckpointCorruptError(f"{path}: {error}") from None


@contextmanager
def open_file(role_dir: Path, record: FileRecord) -> Iterator[int]:
    """A descriptor of a file whose size is the manifest's.

    Raises CheckpointCorruptError if it is missing or of another size.
    """
    path = role_dir / record.path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
    with open_file(role_dir, record) as descriptor:
        data = read_exact(descriptor, record.index.size, record.index.offset, path)
    if zlib.crc32(data) != record.index.crc32:
        raise CheckpointCorruptError(
            f"{path}: its index (byte {record.index.offset}) has a wrong CRC: damaged, or another file of that name"
        )
    try:
        return decode_index(data, record.path, record.index.offset)
    except FieldError as error:
        raise CheckpointCorruptError(f"{path}: index: {error}") from None


def read_plain(role_dir: Path, record: FileRecord) -> dict[str, Any]:
    """A small `.pt` file, whole, its checksum checked, without running anything in it.

    Raises CheckpointCorruptError.
    """
    path = role_dir / record.path
    with open_file(role_dir, record) as descriptor:
        data = read_exact(descriptor, record.size, 0, path)
    if zlib.crc32(data) != record.crc32:
        raise CheckpointCorruptError(f"{path}: has a wrong CRC: damaged, or another file of that name")
    try:
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many types for a bad pickle
        raise CheckpointCorruptError(f"{path}: does not open under weights_only=True: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointCorruptError(f"{path}: holds a {type(value).__name__}, not a dict")
    return value


class RangeReader:
    """Reads element ranges of stored shards into tensors, at most a scratch buffer of `READ_CHUNK_BYTES` at a time.

    Keeps the files it has opened until it is closed.
    """

    def __init__(self, role_dir: Path, files: Mapping[str, FileRecord], scratch: torch.Tensor) -> None:
        self._role_dir = role_dir
        self._files = files
        self._scratch = scratch
        self._open: dict[str, int] = {}
        self._stack = ExitStack()
        self.nbytes = 0

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._open.clear()

    def read(self, read: ReadRange, target: torch.Tensor) -> None:
        """Fills bytes of `target` (uint8, flat: the wanted shard's memory) from one range.

        Raises:
            CheckpointCorruptError: a block's CRC is wrong. Nothing of that block has been applied, blocks before it
                have.
        """
        stored = read.stored
        if read.start == read.stop:
            return
        item = item_bytes(stored.dtype)
        start, stop = read.start * item, read.stop * item
        destination = read.destination * item
        for chunk_start in range(start - start % BLOCK_BYTES, stop, READ_CHUNK_BYTES):
            chunk = self._checked_chunk(stored, chunk_start, stop)
            low, high = max(start, chunk_start), min(stop, chunk_start + chunk.numel())
            target[destination + low - start : destination + high - start].copy_(
                chunk[low - chunk_start : high - chunk_start]
            )

    def _checked_chunk(self, stored: StoredShard, start: int, stop: int) -> torch.Tensor:
        """Whole blocks from byte `start` (a block's first) of the shard, at least up to `stop` if they fit a chunk."""
        end = min(start + READ_CHUNK_BYTES, -(-stop // BLOCK_BYTES) * BLOCK_BYTES, stored.nbytes)
        chunk = self._scratch[: end - start]
        path = self._role_dir / stored.file
        read_exact_into(self._descriptor(stored.file), memoryview(chunk.numpy()), stored.offset + start, path)
        self.nbytes += end - start
        first = start // BLOCK_BYTES
        for number, crc in enumerate(
            _native.crc32_blocks(chunk.data_ptr(), end - start, BLOCK_BYTES, HOST_THREADS), first
        ):
            if crc != stored.crc32[number]:
                at = stored.offset + number * BLOCK_BYTES
                end = min(at + BLOCK_BYTES, stored.offset + stored.nbytes)
                raise CheckpointCorruptError(
                    f"{path}: tensor {stored.key}: bytes [{at}, {end}) have a wrong CRC: damaged"
                )
        return chunk

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(open_file(self._role_dir, self._files[file]))
        return self._open[file]
