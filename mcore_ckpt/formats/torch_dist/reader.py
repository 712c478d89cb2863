"""Reads the model's tensors from a torch_dist checkpoint (megatron's `dist_checkpointing`), without a live model.

The checkpoint's keys come from `sharded_state_dict` (megatron-core 0.16.1). Homogeneous layers share one key, and the
stored tensor has an axis of layers in front (`TransformerBlock`). Experts share one key, too, and the stored tensor has
an axis of experts (`SequentialMLP`, `TEGroupedLinear`). With `non_homogeneous_layers` or `singleton_local_shards` each
layer or expert has its own key, and gate and up have separate keys (`apply_swiglu_sharded_factory`). The sections of a
mixer's fused projection always have separate keys (`_split_tensor_factory` of GatedDeltaNet and MambaMixer).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.formats.locate import same_bytes
from mcore_ckpt.formats.shard_reader import ShardReader, stored_shard
from mcore_ckpt.formats.torch_dist.files import OPTIMIZER_KEY, check_plain_bytes, read_metadata, stored_file
from mcore_ckpt.formats.torch_dist.kind import torch_dist_folders
from mcore_ckpt.formats.torch_save_files import PtTensor, read_pt
from mcore_ckpt.sharding.plan import StoredShard
from mcore_ckpt.sharding.regions import Piece, Region, Shape
from mcore_ckpt.sharding.synonyms import synonyms

# In Megatron-Bridge and mbridge, the mergers of Qwen3-VL's vision tower share keys, too, as layers do.
_ALIKE_LAYERS = re.compile(r"((?:.*\.)?(?:layers|deepstack_merger_list)\.)(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.*\.experts\.)experts\.(?:(\d+)\.)?(.+)")
# The sections of fused tensors, in the order that they have in a tensor. "w" and "v" are gate and up. The fused
# projection of a GatedDeltaNet has "query" to "alpha", and the convolution only "query", "key" and "value". The fused
# projection of a MambaMixer has "z", "x", "B", "C" and "dt", and the convolution only "x", "B" and "C".
_SECTIONS = ("w", "v", "query", "key", "value", "z", "beta", "alpha", "x", "B", "C", "dt")
_SECTION = re.compile(
    r"(.*\.linear_fc1\.(?:weight|bias))_([wv])"
    rf"|(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.({'|'.join(_SECTIONS[2:])})"
)
# The largest accepted number of tensors under one key (layers times experts), because damaged metadata can give any
# number.
_MOST_ALIKE = 1_000_000


@dataclass(frozen=True)
class _Key:
    """The global tensors that are stored under a key.

    Attributes:
        name: the tensors' global name. If the stored tensor has an axis of layers or experts, the name has `{layer}` or
            `{expert}` instead of the number.
        section: the section, one of `_SECTIONS`, that is stored under the key; None if whole tensors are stored.
    """

    name: str
    section: str | None

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in ("layer", "expert") if f"{{{axis}}}" in self.name)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A stored chunk of a key's tensor.

    Attributes:
        of: the global tensors that are stored under the key.
        shape: the shape of each global tensor that is stored under the key.
        first: the row of the global tensor at which the key's section begins.
        box: the chunk's offsets and sizes in the key's tensor.
        stored: the place of the chunk's bytes, an entry of torch's `storage_data`.
    """

    folder: Path
    key: str
    of: _Key
    shape: Shape
    first: int
    box: ChunkStorageMetadata
    stored: Any


def open_torch_dist(path: Path) -> ShardReader:
    """Opens a checkpoint. Global tensors have the names of megatron's local or transformer-engine layer specs.

    Args:
        path: the folder that `dist_checkpointing.save` wrote, or a role's folder of verl with `dist_ckpt` in it.

    Raises:
        CheckpointNotFoundError: the folder has no torch_dist checkpoint.
        CheckpointCorruptError: the metadata is missing, is damaged, or holds something other than data.
        CheckpointMismatchError: a tensor is stored under the names of two layer specs, with different values.
        UnsupportedError: a backend other than torch_dist wrote the checkpoint.
    """
    infos: dict[str, TensorInfo] = {}
    chunks: dict[str, list[tuple[Shape, _Chunk]]] = {}
    folders = torch_dist_folders(path)
    if not folders:
        raise CheckpointNotFoundError(f"{path}: is not a checkpoint of dist_checkpointing: it has no metadata.json")
    for folder in folders:
        metadata = read_metadata(folder)
        tensors = dict(_model_tensors(folder, metadata))
        rows = _rows_of_sections(tensors.values())
        for key, (of, stored) in tensors.items():
            shape, first = _whole(of, tuple(stored.size), rows)
            info = TensorInfo(stored.properties.dtype, shape)
            infos |= {_name(of, index): info for index in product(*map(range, tuple(stored.size)[: len(of.axes)]))}
            for box in stored.chunks:
                place = metadata.storage_data.get(MetadataIndex(key, box.offsets))
                chunk = _Chunk(folder, key, of, shape, first, box, place)
                for name, index in _held(chunk):
                    chunks.setdefault(name, []).append((index, chunk))

    # The files of a tensor's chunks are opened when the tensor is first needed.
    @cache
    def shards(name: str) -> Sequence[StoredShard]:
        return [_shard(name, index, chunk) for index, chunk in chunks.get(name, ())]

    return _without_other_names(ShardReader(path, infos, shards))


def _without_other_names(reader: ShardReader) -> ShardReader:
    """Keeps one of several equal tensors, because `convert` writes a norm under its names in all specs (`keys.py`)."""
    left_out: set[str] = set()
    for name in reader.names:
        for other in synonyms(name):
            if other == name or other not in reader.names or left_out & {name, other}:
                continue
            if not same_bytes(reader, name, other):
                raise CheckpointMismatchError(
                    f"{reader.place}: tensors {name} and {other} are names of one tensor in two layer specs, but the "
                    "stored values differ, so the trained values are unknown: save the checkpoint again"
                )
            left_out.add(other)
    return reader.without(sorted(left_out))


def _key(key: str) -> _Key:
    name, section = key, None
    if match := _SECTION.fullmatch(name):
        name, section = match[1] or match[3], match[2] or match[4]
    if match := _EXPERTS.fullmatch(name):
        name = f"{match[1]}local_experts.{match[2] or '{expert}'}.{match[3]}"
    if match := _ALIKE_LAYERS.fullmatch(name):
        name = f"{match[1]}{{layer}}.{match[2]}"
    return _Key(name, section)


def _model_tensors(folder: Path, metadata: Metadata) -> Iterator[tuple[str, tuple[_Key, TensorStorageMetadata]]]:
    for key, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata) or OPTIMIZER_KEY.match(key):
            continue
        of, size = _key(key), tuple(stored.size)
        if len(size) < len(of.axes) or (of.section is not None and len(size) == len(of.axes)):
            raise CheckpointCorruptError(f"{folder}: tensor {key}: shape {list(size)} has too few axes for this key")
        if prod(size[: len(of.axes)]) > _MOST_ALIKE:
            raise CheckpointCorruptError(
                f"{folder}: tensor {key}: has shape {list(size)}, which would mean more than {_MOST_ALIKE} layers or "
                "experts"
            )
        yield key, (of, stored)


def _rows_of_sections(tensors: Iterable[tuple[_Key, TensorStorageMetadata]]) -> dict[str, dict[str, int]]:
    """Returns the number of rows of each section, by the `name` of the `_Key`."""
    rows: dict[str, dict[str, int]] = {}
    for of, stored in tensors:
        if of.section is not None:
            rows.setdefault(of.name, {})[of.section] = stored.size[len(of.axes)]
    return rows


def _whole(of: _Key, size: Shape, rows: Mapping[str, Mapping[str, int]]) -> tuple[Shape, int]:
    """Returns a global tensor's shape, and the row at which the key's section begins. `size` is the stored shape."""
    shape = size[len(of.axes) :]
    if of.section is None:
        return shape, 0
    before = _SECTIONS[: _SECTIONS.index(of.section)]
    lengths = rows[of.name]
    return (sum(lengths.values()), *shape[1:]), sum(lengths.get(section, 0) for section in before)


def _name(of: _Key, index: Sequence[int]) -> str:
    name = of.name
    for axis, number in zip(of.axes, index, strict=True):
        # Do not use str.format, because a key may contain other braces.
        name = name.replace(f"{{{axis}}}", str(number))
    return name


def _held(chunk: _Chunk) -> Iterator[tuple[str, Shape]]:
    """Yields the name of each tensor that a chunk has elements of, and the tensor's index in the chunk's front axes."""
    box, count = chunk.box, len(chunk.of.axes)
    for index in product(*(range(length) for length in box.sizes[:count])):
        at = tuple(start + place for start, place in zip(box.offsets[:count], index, strict=True))
        yield _name(chunk.of, at), index


def _shard(name: str, index: Shape, chunk: _Chunk) -> StoredShard:
    place = 0
    for at, length in zip(index, chunk.box.sizes, strict=False):
        place = place * length + at
    return stored_shard(name, _open(chunk), _region(chunk), place, chunk.key)


def _region(chunk: _Chunk) -> Region:
    count = len(chunk.of.axes)
    shape, offset = tuple(chunk.box.sizes)[count:], tuple(chunk.box.offsets)[count:]
    if chunk.first:
        offset = (chunk.first + offset[0], *offset[1:])
    return Region(chunk.shape, shape, (Piece((0,) * len(shape), shape, offset),), (0, prod(shape)))


def _open(chunk: _Chunk) -> PtTensor:
    path = stored_file(chunk.folder, chunk.key, chunk.stored)
    check_plain_bytes(path, f"tensor {chunk.key}", chunk.stored)
    tensor = read_pt(path, chunk.stored.offset, chunk.stored.length)
    if not isinstance(tensor, PtTensor) or prod(tensor.shape) != prod(chunk.box.sizes):
        raise CheckpointCorruptError(
            f"{path}: tensor {chunk.key}: wanted {list(chunk.box.sizes)} at byte {chunk.stored.offset}, found {tensor}"
        )
    return tensor
