"""The files of a torch_dist checkpoint: which tensors and objects are in it, and parts of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.foreign.kinds import TORCH_DIST_CONFIG
from mcore_ckpt.foreign.pickles import load_metadata, load_safely

_METADATA_FILE = ".metadata"
_COMMON_FILE = "common.pt"


@dataclass(frozen=True, eq=False)
class _Folder:
    path: Path
    metadata: Metadata


@dataclass(frozen=True, eq=False)
class WantedPart:
    """A box of a stored tensor.

    Attributes:
        key: the stored tensor's.
        global_shape, offset: of the whole tensor, and where the box begins in it.
        memory: what to fill, on the CPU, with as many axes.
        may_differ: the stored tensor may have other sizes (a vocabulary padded otherwise): what it does not have stays.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    memory: torch.Tensor
    may_differ: bool = False


def read_metadata(folder: Path) -> Metadata:
    """What is in one folder that `dist_checkpointing.save` wrote, and where.

    Raises:
        CheckpointCorruptError: it is missing, damaged, or holds anything but data.
        UnsupportedError: written by another backend than torch_dist.
    """
    _check_backend(folder / TORCH_DIST_CONFIG)
    metadata = load_metadata(folder / _METADATA_FILE)
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise CheckpointCorruptError(f"{folder / _METADATA_FILE}: is not what megatron writes")
    return metadata


def stored_file(folder: Path, key: str, stored: Any) -> Path:
    """The file of an entry of the metadata's `storage_data`. Raises CheckpointCorruptError for one elsewhere."""
    name = getattr(stored, "relative_path", None)
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointCorruptError(
            f"{folder}: {key}: {_METADATA_FILE} names {name!r}, which is not a file of this folder"
        )
    return folder / name


class TorchDistFiles:
    """One folder, or several that hold one checkpoint together (verl keeps model, optimizer and extra apart).

    Args:
        path: the checkpoint, for messages.
        folders: where `dist_checkpointing.save` wrote.

    Raises:
        CheckpointCorruptError: a folder's metadata is missing, damaged, or holds anything but data.
        UnsupportedError: written by another backend than torch_dist.
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
        metadata = read_metadata(path)
        common = load_safely(path / _COMMON_FILE, str(path / _COMMON_FILE))
        if not isinstance(common, dict):
            raise CheckpointCorruptError(f"{path / _COMMON_FILE}: is not what megatron writes")
        self.common |= common
        folder = _Folder(path, metadata)
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                self._tensors[key] = (folder, stored)
            elif isinstance(stored, BytesStorageMetadata):
                self._objects[key] = folder

    def has_tensor(self, key: str) -> bool:
        return key in self._tensors

    def object_keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self._objects if key.startswith(prefix))

    def digest(self) -> str:
        """Of all names: ranks that see the same checkpoint have the same."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()

    def positions_read(self) -> str:
        """Which of `names` have been read, as bits of a hexadecimal number: short, for rank 0 hears it of all ranks."""
        return f"{sum(1 << number for number, name in enumerate(self.names) if name in self._read):x}"

    def names_not_in(self, positions: Sequence[str]) -> list[str]:
        """The names that no rank has read."""
        read = 0
        for position in positions:
            read |= int(position, 16)
        return [name for number, name in enumerate(self.names) if not read >> number & 1]

    def read_object(self, key: str) -> Any:
        """A sharded object: what one rank handed over.

        Raises:
            CheckpointMismatchError: there is none of that key.
            CheckpointCorruptError: it cannot be read, or holds anything but data.
        """
        folder = self._objects.get(key)
        if folder is None:
            raise CheckpointMismatchError(f"{self.path}: wanted the object {key}, found no such object")
        target = _BytesTarget()
        self._run(folder, key, [_object_item(key)], target)
        objects = load_safely(target.data, f"{folder.path}: object {key}")
        if not isinstance(objects, list) or len(objects) != 1:
            raise CheckpointCorruptError(f"{folder.path}: object {key}: wanted a list of one, found {type(objects)}")
        return objects[0]

    def read(self, wanted: WantedPart) -> None:
        """Fills `wanted.memory`.

        Raises:
            CheckpointMismatchError: the stored tensor is missing, of another shape or dtype.
            CheckpointCorruptError: it cannot be read, or not all of it is there.
        """
        folder, stored = self._stored(wanted)
        chunk = ChunkStorageMetadata(torch.Size(wanted.offset), wanted.memory.shape)
        items = create_read_items_for_chunk_list(wanted.key, stored, [chunk])
        found, needed = sum(prod(item.lengths) for item in items), _overlap(wanted, tuple(stored.size))
        if found != needed:
            raise CheckpointCorruptError(
                f"{folder.path}: tensor {wanted.key}: {_METADATA_FILE} says where {found} of {needed} elements are"
            )
        self._run(folder, wanted.key, items, _TensorTarget(wanted.memory))
        self._read.add(wanted.key)
        self.nbytes += found * wanted.memory.element_size()

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

    def _run(self, folder: _Folder, key: str, items: Sequence[ReadItem], target: Any) -> None:
        storage = folder.metadata.storage_data
        for item in items:
            stored_file(folder.path, key, storage.get(item.storage_index))
        reader = FileSystemReader(folder.path)
        reader.storage_data = storage
        try:
            # Opens each tensor under weights_only=True, and hands objects over unopened.
            reader.read_data(LoadPlan(list(items)), target)
        except Exception as error:  # a damaged file raises anything
            raise CheckpointCorruptError(
                f"{folder.path}: {key}: cannot be read: {type(error).__name__}: {str(error)[:400]}"
            ) from error


class _TensorTarget:
    """What FileSystemReader.read_data asks of a planner, for tensors."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        part = self._memory
        for axis, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(axis, offset, length)
        return part

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """`resolve_tensor` has handed out the memory itself."""


class _BytesTarget:
    """What FileSystemReader.read_data asks of a planner, for objects: their bytes, never opened."""

    data = b""

    def load_bytes(self, item: ReadItem, value: Any) -> None:
        self.data = value.getvalue()


def _object_item(key: str) -> ReadItem:
    index, nothing = MetadataIndex(key), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def _overlap(wanted: WantedPart, stored: tuple[int, ...]) -> int:
    """How many elements of the box the stored tensor has."""
    ends = (
        min(offset + size, limit) - offset
        for offset, size, limit in zip(wanted.offset, wanted.memory.shape, stored, strict=True)
    )
    return prod(max(0, length) for length in ends)


def _check_backend(file: Path) -> None:
    backend = json.loads(file.read_bytes()).get("sharded_backend")
    if backend != "torch_dist":
        raise UnsupportedError(f"{file}: the checkpoint was written by the backend {backend!r}; torch_dist can be read")
