"""The model in a checkpoint of megatron's `dist_checkpointing` (torch_dist): its tensors by name, without a model.

Keys are those that `sharded_state_dict` gives (megatron-core 0.16.1): layers that are alike share one, with an axis of
layers in front (`TransformerBlock`), and so do experts (`SequentialMLP`, `TEGroupedLinear`); or each has its own
(`non_homogeneous_layers`, `singleton_local_shards`), gate and up apart (`apply_swiglu_sharded_factory`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.foreign.kinds import torch_dist_folders
from mcore_ckpt.foreign.pt_files import PtTensor, read_pt
from mcore_ckpt.foreign.torch_dist_files import read_metadata, stored_file
from mcore_ckpt.hf.shard_source import ShardSource
from mcore_ckpt.hf.source import TensorInfo
from mcore_ckpt.sharding.plan import MODEL, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Piece, Region, Shape
from mcore_ckpt.storage.dtypes import dtype_name

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_ALIKE_LAYERS = re.compile(r"((?:.*\.)?layers\.)(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.*\.experts\.)experts\.(?:(\d+)\.)?(.+)")
_SECTIONS = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")


@dataclass(frozen=True)
class _Key:
    """What a key stands for.

    Attributes:
        name: the tensors' global name, with `{layer}` and `{expert}` where the key has an axis of them.
        section: of a fused gate and up, which: 0, 1, or None for both.
    """

    name: str
    section: int | None

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in ("layer", "expert") if f"{{{axis}}}" in self.name)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A stored part of a key's tensor. `stored`: where it is, by torch's metadata."""

    folder: Path
    key: str
    of: _Key
    size: Shape
    box: ChunkStorageMetadata
    stored: Any


def open_torch_dist(path: Path) -> ShardSource:
    """The global tensors of a checkpoint, under the names of megatron's local layer specs or transformer-engine's.

    Args:
        path: the folder that `dist_checkpointing.save` wrote, or a role's of verl with `dist_ckpt` in it.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointCorruptError: its metadata is missing, damaged, or holds anything but data.
        UnsupportedError: written by another backend than torch_dist.
    """
    infos: dict[str, TensorInfo] = {}
    chunks: dict[str, list[tuple[Shape, _Chunk]]] = {}
    folders = torch_dist_folders(path)
    if not folders:
        raise CheckpointNotFoundError(f"{path}: is not a checkpoint of dist_checkpointing: there is no metadata.json")
    for folder in folders:
        metadata = read_metadata(folder)
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata) and not _OPTIMIZER.match(key):
                of = _key(key)
                infos |= _infos(folder, key, of, stored)
                found = list(_chunks(folder, key, of, stored, metadata.storage_data))
                for name, index, chunk in found:
                    chunks.setdefault(name, []).append((index, chunk))
    opened = _Opened(chunks)
    return ShardSource(path, infos, opened.shards)


# -- keys --------------------------------------------------------------------------------------------------


def _key(key: str) -> _Key:
    name, section = key, None
    if match := _SECTIONS.fullmatch(name):
        name, section = match[1], "wv".index(match[2])
    if match := _EXPERTS.fullmatch(name):
        name = f"{match[1]}local_experts.{match[2] or '{expert}'}.{match[3]}"
    if match := _ALIKE_LAYERS.fullmatch(name):
        name = f"{match[1]}{{layer}}.{match[2]}"
    return _Key(name, section)


def _infos(folder: Path, key: str, of: _Key, stored: TensorStorageMetadata) -> dict[str, TensorInfo]:
    size, axes = tuple(stored.size), of.axes
    if len(size) < len(axes) or (of.section is not None and len(size) == len(axes)):
        raise CheckpointCorruptError(f"{folder}: tensor {key}: has shape {list(size)}, without axes of {axes}")
    info = TensorInfo(stored.properties.dtype, _whole_shape(of, size))
    return {_name(of, index): info for index in product(*map(range, size[: len(axes)]))}


def _whole_shape(of: _Key, size: Shape) -> Shape:
    shape = size[len(of.axes) :]
    return shape if of.section is None else (2 * shape[0], *shape[1:])


def _name(of: _Key, index: Sequence[int]) -> str:
    return of.name.format(**dict(zip(of.axes, index, strict=True)))


# -- chunks ------------------------------------------------------------------------------------------------


def _chunks(
    folder: Path, key: str, of: _Key, stored: TensorStorageMetadata, storage: Mapping[Any, Any]
) -> Iterator[tuple[str, Shape, _Chunk]]:
    """Each stored part, with the tensors that it holds something of, and their places in it along the axes in front."""
    count = len(of.axes)
    for box in stored.chunks:
        chunk = _Chunk(folder, key, of, tuple(stored.size), box, storage.get(MetadataIndex(key, box.offsets)))
        for index in product(*(range(length) for length in box.sizes[:count])):
            at = tuple(start + place for start, place in zip(box.offsets[:count], index, strict=True))
            yield _name(of, at), index, chunk


class _Opened:
    """Finds where in a file a part's bytes are when they are first asked for: it takes a look into each part."""

    def __init__(self, chunks: Mapping[str, Sequence[tuple[Shape, _Chunk]]]) -> None:
        self._chunks = chunks
        self._found: dict[str, tuple[StoredShard, ...]] = {}

    def shards(self, name: str) -> Sequence[StoredShard]:
        found = self._found.get(name)
        if found is None:
            found = tuple(_shard(name, index, chunk) for index, chunk in self._chunks.get(name, ()))
            self._found[name] = found
        return found


def _shard(name: str, index: Shape, chunk: _Chunk) -> StoredShard:
    region = _region(chunk)
    tensor = _open(chunk)
    if not tensor.is_dense:
        raise UnsupportedError(f"{tensor.path}: tensor {chunk.key}: is stored with strides {tensor.stride}")
    place = 0
    for at, length in zip(index, chunk.box.sizes, strict=False):
        place = place * length + at
    nbytes = region.numel * tensor.dtype.itemsize
    return StoredShard(
        ShardKey(name, MODEL),
        region,
        dtype_name(tensor.dtype),
        str(tensor.path.absolute()),
        tensor.offset + place * nbytes,
        nbytes,
        None,
    )


def _region(chunk: _Chunk) -> Region:
    count = len(chunk.of.axes)
    shape, offset = tuple(chunk.box.sizes)[count:], tuple(chunk.box.offsets)[count:]
    if chunk.of.section:
        offset = (offset[0] + chunk.size[count], *offset[1:])
    return Region(
        _whole_shape(chunk.of, chunk.size), shape, (Piece((0,) * len(shape), shape, offset),), (0, prod(shape))
    )


def _open(chunk: _Chunk) -> PtTensor:
    path = stored_file(chunk.folder, chunk.key, chunk.stored)
    if getattr(chunk.stored, "transform_descriptors", None):
        raise UnsupportedError(f"{path}: tensor {chunk.key}: is stored {chunk.stored.transform_descriptors}")
    tensor = read_pt(path, chunk.stored.offset, chunk.stored.length)
    if not isinstance(tensor, PtTensor) or prod(tensor.shape) != prod(chunk.box.sizes):
        raise CheckpointCorruptError(
            f"{path}: tensor {chunk.key}: wanted {list(chunk.box.sizes)} at byte {chunk.stored.offset}, found {tensor}"
        )
    return tensor
