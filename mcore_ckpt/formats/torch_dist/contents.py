"""Describes a torch_dist checkpoint before it is written: files with slices of tensors, objects, and common state."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt.checkpoint.dtypes import dtype_name, torch_dtype
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.torch_dist.keys import Place
from mcore_ckpt.io import tuning
from mcore_ckpt.io.batches import batches
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Piece, Region, Shape


@dataclass(frozen=True)
class KeyRows:
    """The rows of a tensor that megatron stores under one key: all rows, or the rows of one section.

    Attributes:
        place: the key, and the tensor's index in the stored tensor's axes of layers and experts.
        first: the first of these rows, counted from the tensor's first row.
        count: the number of these rows.
        other_keys: further keys under which readers find the same bytes.
    """

    place: Place
    first: int
    count: int
    other_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slice:
    """Rows of a tensor that are written with one `torch.save` and stored under one key.

    Attributes:
        tensor: the tensor's name and its kind.
        key_rows: the key, and all rows of the tensor that are stored under this key.
        shape: the tensor's global shape.
        start: the first row of the slice, counted from the tensor's first row.
        stop: the row after the last row of the slice.
        dtype: the dtype without "torch.".
    """

    tensor: ShardKey
    key_rows: KeyRows
    shape: Shape
    start: int
    stop: int
    dtype: str

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.tensor.name

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys under which readers find the slice."""
        return (self.key_rows.place.key, *self.key_rows.other_keys)

    @property
    def sizes(self) -> Shape:
        """The shape of the slice in the stored tensor, including the axes of layers and experts."""
        return (*(1 for _ in self.key_rows.place.index), self.stop - self.start, *self.shape[1:])

    @property
    def offsets(self) -> Shape:
        """The offset of the slice in the stored tensor."""
        return (*self.key_rows.place.index, self.start - self.key_rows.first, *(0 for _ in self.shape[1:]))

    @property
    def global_shape(self) -> Shape:
        """The shape of the stored tensor."""
        return (*self.key_rows.place.lengths, self.key_rows.count, *self.shape[1:])

    @property
    def region(self) -> Region:
        """The slice as a region of the model's tensor."""
        local = (self.stop - self.start, *self.shape[1:])
        zeros = (0,) * (len(self.shape) - 1)
        return Region(self.shape, local, (Piece((0, *zeros), local, (self.start, *zeros)),), (0, prod(local)))

    @property
    def nbytes(self) -> int:
        """The size of the slice in bytes."""
        return self.region.numel * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class Contents:
    """Everything that one folder of `dist_checkpointing` will hold.

    Attributes:
        files: the slices of each file.
        objects: the sharded objects: for each key (`ShardedObject.unique_key`) the bytes that `saved_object` returns.
        common: the state that all ranks share, the content of `common.pt`.
    """

    files: tuple[tuple[Slice, ...], ...]
    objects: Mapping[str, bytes] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        slices: Sequence[Slice], objects: Mapping[str, bytes] | None = None, common: Mapping[str, Any] | None = None
    ) -> Contents:
        """Divides slices into files of at most HF_LEAST_FILE_BYTES; a larger slice gets its own file."""
        files = batches(slices, lambda each: each.nbytes, tuning.HF_LEAST_FILE_BYTES)
        return Contents(tuple(map(tuple, files)), objects or {}, common or {})

    def describe(self) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        """Returns the `state_dict_metadata` of `.metadata`: the stored tensors, each with its slices, and the objects.

        Raises CheckpointMismatchError: tensors that are stored under one key differ in dtype.
        """
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: BytesStorageMetadata() for key in self.objects
        }
        for each in (each for file in self.files for each in file):
            properties = TensorProperties(torch_dtype(each.dtype))
            for key in each.keys:
                entry = found.setdefault(key, TensorStorageMetadata(properties, torch.Size(each.global_shape), []))
                assert isinstance(entry, TensorStorageMetadata)
                if entry.properties.dtype != properties.dtype:
                    raise CheckpointMismatchError(
                        f"tensor {each.tensor}: has dtype {each.dtype}, but another part of {key} has "
                        f"{dtype_name(entry.properties.dtype)}, and megatron stores both parts as one tensor (of "
                        "several layers, for example): cast both to one dtype, or use --format native for a "
                        "HuggingFace model"
                    )
                entry.chunks.append(ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)))
        return found


def slices_of(tensor: ShardKey, rows: KeyRows, shape: Shape, dtype: str) -> Iterator[Slice]:
    """Cuts the rows of a key into slices of at most SCATTER_BYTES; a larger row is a slice by itself."""
    row_bytes = max(1, prod(shape[1:]) * torch_dtype(dtype).itemsize)
    step = max(1, tuning.SCATTER_BYTES // row_bytes)
    stop = rows.first + rows.count
    for start in range(rows.first, stop, step):
        yield Slice(tensor, rows, shape, start, min(stop, start + step), dtype)


def saved_object(value: Any) -> bytes:
    """Returns the bytes that are stored for the value of a sharded object."""
    saved = io.BytesIO()
    torch.save([value], saved)
    return saved.getvalue()
