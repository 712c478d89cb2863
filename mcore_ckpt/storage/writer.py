"""Write requests -> files."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt import _native
from mcore_ckpt.knobs import HOST_THREADS
from mcore_ckpt.sharding.plan import StoredShard
from mcore_ckpt.storage.dtypes import dtype_name
from mcore_ckpt.storage.files import make_folders, write_file
from mcore_ckpt.storage.index import BLOCK_BYTES, FileIndex, encode_index
from mcore_ckpt.storage.manifest import IndexPlace
from mcore_ckpt.storage.pt_image import PtImage
from mcore_ckpt.storage.requests import WriteRequest, WrittenFile


def write_image(role_dir: Path, request: WriteRequest, image: PtImage, buffer: torch.Tensor) -> WrittenFile:
    """Writes one indexed file durably.

    Args:
        role_dir: the folder the request's path is below.
        request: what the tensors are.
        image: the file's structure.
        buffer: host memory (uint8) of `image.records_end` bytes: gaps and payload; the payloads' CRCs are filled in
            here.

    Raises:
        OSError: the disk is full, a folder is not writable, ...
    """
    data = memoryview(buffer.numpy())
    shards = _checksum(request, image, buffer)
    crcs = [_join_blocks(shard) for shard in shards]
    for slot, crc in zip(image.slots, crcs, strict=True):
        if slot.descriptor_crc_at is not None:
            struct.pack_into("<I", data, slot.descriptor_crc_at, crc)
    index = encode_index(FileIndex(tuple(shards), request.aliases))
    index_crc = zlib.crc32(index)
    tail = image.tail(crcs, index, index_crc)
    make_folders(role_dir, request.path)
    write_file(role_dir / request.path, [data, tail])
    return WrittenFile(
        request.path,
        request.kind,
        size=image.records_end + len(tail),
        crc32=zlib.crc32(tail, _file_crc(image, data, crcs)),
        index=IndexPlace(image.index_offset, len(index), index_crc),
        names=tuple(
            dict.fromkeys(key.name for key in [*(t.key for t in request.tensors), *(a.key for a in request.aliases)])
        ),
    )


def _checksum(request: WriteRequest, image: PtImage, buffer: torch.Tensor) -> list[StoredShard]:
    shards = []
    for write, slot in zip(request.tensors, image.slots, strict=True):
        crcs = _native.crc32_blocks(buffer.data_ptr() + slot.offset, slot.nbytes, BLOCK_BYTES, HOST_THREADS)
        dtype = dtype_name(write.tensor.dtype)
        shards.append(StoredShard(write.key, write.region, dtype, request.path, slot.offset, slot.nbytes, tuple(crcs)))
    return shards


def _join_blocks(shard: StoredShard) -> int:
    crc, remaining = 0, shard.nbytes
    for block in shard.crc32:
        size = min(BLOCK_BYTES, remaining)
        crc = _native.crc32_combine(crc, block, size)
        remaining -= size
    return crc


def _file_crc(image: PtImage, data: memoryview, crcs: Sequence[int]) -> int:
    """CRC of `[0, records_end)` from those of its payloads and the few bytes between them."""
    spans = [(offset, len(gap), zlib.crc32(data[offset : offset + len(gap)])) for offset, gap in image.gaps]
    spans += [(slot.offset, slot.nbytes, crc) for slot, crc in zip(image.slots, crcs, strict=True)]
    crc = 0
    for _, nbytes, part in sorted(spans):
        crc = _native.crc32_combine(crc, part, nbytes)
    return crc


def pickle_plain(value: Mapping[str, Any]) -> bytes:
    """A small `.pt` file's bytes. Raises ValueError if they would not open under `weights_only=True`."""
    stream = io.BytesIO()
    torch.save(dict(value), stream)
    data = stream.getvalue()
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise ValueError(f"would not open under weights_only=True: {error}") from error
    return data


def write_plain(role_dir: Path, path: str, kind: str, value: Mapping[str, Any]) -> WrittenFile:
    """Writes a small `.pt` file of plain values durably. Raises OSError, ValueError."""
    data = pickle_plain(value)
    make_folders(role_dir, path)
    write_file(role_dir / path, [data])
    return WrittenFile(path, kind, len(data), zlib.crc32(data))
