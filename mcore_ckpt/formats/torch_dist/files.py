"""Reads the files of a torch_dist checkpoint: lists its tensors and objects, and reads parts of them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcore_ckpt.checkpoint.shapes import is_possible_shape
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.foreign_pickles import load_metadata, load_safely
from mcore_ckpt.formats.torch_dist.kind import TORCH_DIST_CONFIG
from mcore_ckpt.formats.torch_save_files import PtTensor, read_bytes, read_pt
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import inside, opened, read_exact, read_small
from mcore_ckpt.sharding.regions import Box

METADATA_FILE = ".metadata"
# megatron-core up to 0.18 stores the state that all ranks share in this file; 0.19 stores this state in a sharded
# object (`dist_checkpointing.save`). If a checkpoint has both, this module reads the file, as `load_common_state_dict`
# of 0.19 does.
COMMON_FILE = "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
# The beginning of the keys of optimizer state, with a number if there are several chained optimizers.
OPTIMIZER_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.")


@dataclass(frozen=True, eq=False)
class _Folder:
    """A folder that `dist_checkpointing.save` wrote, with its metadata."""

    path: Path
    metadata: Metadata


@dataclass(frozen=True, eq=False)
class WantedPart:
    """A box of a stored tensor to read.

    Attributes:
        global_shape: the shape of the whole tensor.
        offset: the box's offset in the whole tensor.
        memory: the CPU tensor to fill, with as many axes as the whole tensor.
        may_differ: True if the stored tensor may have another number of rows (another padding of the vocabulary). Rows
            that the stored tensor lacks keep their values in `memory`.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    memory: torch.Tensor
    may_differ: bool = False

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.memory.shape))


def read_metadata(folder: Path) -> Metadata:
    """Reads and checks the metadata of one folder that `dist_checkpointing.save` wrote.

    Raises:
        CheckpointCorruptError: the metadata is missing, is damaged, or holds something other than data.
        UnsupportedError: a backend other than torch_dist wrote the folder.
    """
    _check_backend(folder / TORCH_DIST_CONFIG)
    metadata = load_metadata(folder / METADATA_FILE)
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise CheckpointCorruptError(f"{folder / METADATA_FILE}: is not metadata that megatron wrote")
    try:
        _check_metadata(metadata)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{folder / METADATA_FILE}: is damaged: {error}") from None
    return metadata


def _check_metadata(metadata: Metadata) -> None:
    """Raises TypeError, ValueError or AttributeError if a field has a wrong type or a chunk lies outside its tensor."""
    for key, stored in metadata.state_dict_metadata.items():
        fields.as_name(key, "a key")
        if isinstance(stored, TensorStorageMetadata):
            _check_tensor(key, stored)
        elif not isinstance(stored, BytesStorageMetadata):
            raise TypeError(f"{key} is a {type(stored).__name__}")
    assert metadata.storage_data is not None
    for index, place in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, _StorageInfo):
            raise TypeError(f"storage_data maps {fields.shown(index)} to {fields.shown(place)}")
        fields.as_name(place.relative_path, "relative_path")
        fields.as_ints([place.offset, place.length], "a place in a file")


def _check_tensor(key: str, stored: TensorStorageMetadata) -> None:
    size = fields.as_ints(list(stored.size), key)
    if not isinstance(stored.properties.dtype, torch.dtype) or not is_possible_shape(size):
        raise ValueError(f"{key} has no known dtype, or the impossible shape {fields.shown(size)}")
    for chunk in stored.chunks:
        offsets, sizes = fields.as_ints(list(chunk.offsets), key), fields.as_ints(list(chunk.sizes), key)
        if not Box(offsets, sizes).within(size):
            raise ValueError(f"{key} of shape {size} cannot have a part of shape {sizes} at {offsets}")


def stored_file(folder: Path, key: str, stored: Any) -> Path:
    """Returns the file that a `storage_data` entry names. Raises CheckpointCorruptError if it is outside the folder."""
    name = getattr(stored, "relative_path", None)
    if not isinstance(name, str) or Path(name).name != name or name in (".", ".."):
        raise CheckpointCorruptError(
            f"{folder}: {key}: {METADATA_FILE} names {name!r}, which is not a file of this folder"
        )
    return inside(folder, name)


class TorchDistFiles:
    """A torch_dist checkpoint in one or several folders. verl writes model, optimizer and extra to separate folders.

    Args:
        folders: the folders that `dist_checkpointing.save` wrote.

    Raises:
        CheckpointCorruptError: a folder's metadata is missing, is damaged, or holds something other than data.
        UnsupportedError: a backend other than torch_dist wrote a folder.
    """

    def __init__(self, path: Path, folders: Sequence[Path]) -> None:
        self.path = path
        self.common: dict[str, Any] = {}
        self.nbytes = 0
        self._tensors: dict[str, tuple[_Folder, TensorStorageMetadata]] = {}
        self._objects: dict[str, _Folder] = {}
        self._read: set[str] = set()
        for folder in folders:
            self._open(folder)
        self.names = tuple(sorted(self._tensors))

    def _open(self, path: Path) -> None:
        folder = _Folder(path, read_metadata(path))
        self.common |= _read_common(folder)
        for key, stored in folder.metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                self._tensors[key] = (folder, stored)
            elif isinstance(stored, BytesStorageMetadata):
                self._objects[key] = folder

    def has_tensor(self, key: str) -> bool:
        return key in self._tensors

    def size_of(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a stored tensor. Raises KeyError if there is no such tensor."""
        return tuple(self._tensors[key][1].size)

    def dtype_of(self, key: str) -> torch.dtype | None:
        """Returns the dtype of a stored tensor, or None if there is no such tensor."""
        found = self._tensors.get(key)
        return None if found is None else found[1].properties.dtype

    def object_keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self._objects if key.startswith(prefix))

    def digest(self) -> str:
        """Returns a digest of all names. Ranks that see the same checkpoint have the same digest."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()

    def positions_read(self) -> str:
        """Returns a hexadecimal number whose bits say which of `names` have been read: few bytes to send to rank 0."""
        return f"{sum(1 << number for number, name in enumerate(self.names) if name in self._read):x}"

    def names_not_in(self, positions: Sequence[str]) -> list[str]:
        """Returns the names that no rank has read. `positions` has the `positions_read()` of each rank."""
        read = 0
        for position in positions:
            read |= int(position, 16)
        return [name for number, name in enumerate(self.names) if not read >> number & 1]

    def read_object(self, key: str) -> Any:
        """Reads a sharded object, that is, the value that one rank saved under the key.

        Raises:
            CheckpointMismatchError: the checkpoint has no such object.
            CheckpointCorruptError: the object cannot be read, or holds something other than data.
        """
        folder = self._objects.get(key)
        if folder is None:
            raise CheckpointMismatchError(f"{self.path}: wanted the object {key}, found no such object")
        return _read_object(folder, key)

    def read(self, wanted: WantedPart) -> None:
        """Reads a wanted box into its memory.

        Raises:
            CheckpointMismatchError: the stored tensor is missing, or has another shape or dtype.
            CheckpointCorruptError: the tensor cannot be read, or some elements are not stored.
        """
        if self._has_flat_cells(wanted):
            self._read_cells(wanted)
            return
        folder, stored = self._stored(wanted)
        chunk = ChunkStorageMetadata(torch.Size(wanted.offset), wanted.memory.shape)
        items = create_read_items_for_chunk_list(wanted.key, stored, [chunk])
        there = Box((0,) * len(stored.size), tuple(stored.size)).intersect(wanted.box)
        found, needed = sum(prod(item.lengths) for item in items), 0 if there is None else there.numel
        if found != needed:
            raise CheckpointCorruptError(
                f"{folder.path}: tensor {wanted.key}: {METADATA_FILE} lists only {found} of {needed} wanted elements"
            )
        for item in items:
            _read_item(folder, wanted.key, item, wanted.memory)
        self._read.add(wanted.key)
        self.nbytes += found * wanted.memory.element_size()

    def _has_flat_cells(self, wanted: WantedPart) -> bool:
        """Returns True if the tensor is stored as a grid of equal cells, with a last axis for the elements of a cell.

        megatron-core up to 0.15 stores optimizer state in this way (`sharded_tensor_to_torch_sharded_tensor`) if the
        form is `fully_sharded_model_space`, the default of these versions. 0.16 no longer has this form. A cell is the
        part of one tensor-parallel rank.
        """
        found = self._tensors.get(wanted.key)
        if found is None or len(found[1].size) != len(wanted.global_shape) + 1:
            return False
        if not OPTIMIZER_KEY.match(wanted.key):
            return False  # weights are never stored in cells, so the additional axis shows that this is another tensor
        *grid, numel = found[1].size
        cell = _cell_shape(wanted.global_shape, grid)
        return cell is not None and prod(cell) == numel

    def _read_cells(self, wanted: WantedPart) -> None:
        *grid, numel = self.size_of(wanted.key)
        cell = _cell_shape(wanted.global_shape, grid)
        assert cell is not None, "_has_flat_cells has asked"
        box = wanted.box
        firsts = (offset // length for offset, length in zip(box.offset, cell, strict=True))
        lasts = (-(-(o + n) // length) for o, n, length in zip(box.offset, box.shape, cell, strict=True))
        flat = torch.empty((*(1 for _ in grid), numel), dtype=wanted.memory.dtype)
        for place in product(*map(range, firsts, lasts)):
            self.read(WantedPart(wanted.key, (*grid, numel), (*place, 0), flat))
            here = Box(tuple(at * length for at, length in zip(place, cell, strict=True)), cell)
            shared = here.intersect(box)
            assert shared is not None, "only cells that overlap are read"
            _part_of(wanted.memory, shared, box.offset).copy_(_part_of(flat.view(cell), shared, here.offset))

    def _stored(self, wanted: WantedPart) -> tuple[_Folder, TensorStorageMetadata]:
        found = self._tensors.get(wanted.key)
        wants = f"{list(wanted.global_shape)} {wanted.memory.dtype}"
        if found is None:
            raise CheckpointMismatchError(f"{self.path}: tensor {wanted.key}: wanted {wants}, found no such tensor")
        stored = found[1]
        shape_fits = tuple(stored.size) == wanted.global_shape or (
            wanted.may_differ and tuple(stored.size[1:]) == wanted.global_shape[1:]
        )
        if not shape_fits or stored.properties.dtype != wanted.memory.dtype:
            raise CheckpointMismatchError(
                f"{self.path}: tensor {wanted.key}: wanted {wants}, found {list(stored.size)} {stored.properties.dtype}"
            )
        return found


def _cell_shape(shape: Sequence[int], grid: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the shape of a cell if the grid divides the tensor into equal cells; else None."""
    if any(cells < 1 or length % cells for length, cells in zip(shape, grid, strict=True)):
        return None
    return tuple(length // cells for length, cells in zip(shape, grid, strict=True))


def _part_of(tensor: torch.Tensor, box: Box, offset: Sequence[int]) -> torch.Tensor:
    """Returns the part of a tensor that a box of the global tensor covers.

    The tensor begins at `offset` in the global tensor.
    """
    for axis, (start, length, first) in enumerate(zip(box.offset, box.shape, offset, strict=True)):
        tensor = tensor.narrow(axis, start - first, length)
    return tensor


def _read_item(folder: _Folder, key: str, item: ReadItem, memory: torch.Tensor) -> None:
    """Fills the part of the memory that one stored chunk covers.

    torch's `FileSystemReader.read_data` (2.13) is not used, because that method opens the chunk with `torch.load`,
    which is not safe (`checkpoint/unpickling.py`).
    """
    stored = folder.metadata.storage_data.get(item.storage_index)
    path = stored_file(folder.path, key, stored)
    check_plain_bytes(path, key, stored)
    try:
        tensor = read_pt(path, stored.offset, stored.length)
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"tensor {key}: cannot be read: {error}") from error
    if not isinstance(tensor, PtTensor) or not tensor.is_dense or tensor.dtype != memory.dtype:
        raise CheckpointCorruptError(
            f"{path}: tensor {key}: wanted a tensor of {memory.dtype} at byte {stored.offset}, found {tensor}"
        )
    whole = folder.metadata.state_dict_metadata[key]
    if not isinstance(whole, TensorStorageMetadata) or prod(tensor.shape) > prod(whole.size):
        raise CheckpointCorruptError(
            f"{path}: tensor {key}: a stored part has shape {list(tensor.shape)}, which is more elements than the "
            "whole tensor has"
        )
    data = bytearray(read_bytes(tensor))
    source = torch.frombuffer(data, dtype=tensor.dtype) if data else torch.empty(0, dtype=tensor.dtype)
    source, part = source.view(tensor.shape), memory
    try:
        for axis, length in enumerate(item.lengths):
            source = source.narrow(axis, item.storage_offsets[axis], length)
            part = part.narrow(axis, item.dest_offsets[axis], length)
        part.copy_(source)
    except (IndexError, RuntimeError) as error:
        raise CheckpointCorruptError(
            f"{path}: tensor {key}: the part at byte {stored.offset} has shape {list(tensor.shape)}, which does not "
            f"match {METADATA_FILE}: {error}"
        ) from None


def _read_common(folder: _Folder) -> dict[str, Any]:
    """Reads the state that all ranks share: counters, arguments, the optimizer's param groups, the scheduler."""
    place = folder.path / COMMON_FILE
    if os.path.lexists(place) or _COMMON_OBJECT not in folder.metadata.state_dict_metadata:
        shown, common = str(place), load_safely(place, str(place))
    else:
        shown, common = f"{folder.path}: object {_COMMON_OBJECT}", _read_object(folder, _COMMON_OBJECT)
    if not isinstance(common, dict):
        raise CheckpointCorruptError(f"{shown}: contains no dict, but megatron writes a dict")
    return common


def _read_object(folder: _Folder, key: str) -> Any:
    objects = load_safely(_read_bytes_of(folder, key), f"{folder.path}: object {key}")
    if not isinstance(objects, list) or len(objects) != 1:
        raise CheckpointCorruptError(f"{folder.path}: object {key}: wanted a list of one value, found {type(objects)}")
    return objects[0]


def _read_bytes_of(folder: _Folder, key: str) -> bytes:
    stored = folder.metadata.storage_data.get(MetadataIndex(key))
    path = stored_file(folder.path, key, stored)
    check_plain_bytes(path, key, stored)
    try:
        with opened(path) as (descriptor, size):
            if stored.length > limits.PLAIN_BYTES or stored.offset + stored.length > size:
                raise CheckpointCorruptError(
                    f"{path}: object {key}: needs {stored.length} bytes from byte {stored.offset} on, but the file has "
                    f"{size} bytes: the file was cut, or the object is too large"
                )
            return read_exact(descriptor, stored.length, stored.offset, path)
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from error


def check_plain_bytes(path: Path, key: str, stored: Any) -> None:
    """Raises UnsupportedError if a `storage_data` entry says that the bytes are compressed or otherwise transformed."""
    if getattr(stored, "transform_descriptors", None):
        raise UnsupportedError(
            f"{path}: {key}: is stored with {stored.transform_descriptors}: save the checkpoint without compression or "
            "other transforms"
        )


def _check_backend(file: Path) -> None:
    try:
        backend = fields.parse(read_small(file, limits.HF_JSON_BYTES)).get("sharded_backend")
    except (OSError, fields.FieldError) as error:
        raise CheckpointCorruptError(f"{file}: cannot be read: {error}") from None
    if backend != "torch_dist":
        raise UnsupportedError(
            f"{file}: the checkpoint was written by the backend {fields.shown(backend)}, but only torch_dist can be "
            "read: save the checkpoint again as torch_dist"
        )
