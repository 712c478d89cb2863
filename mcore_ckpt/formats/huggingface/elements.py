"""Reads elements of HuggingFace tensors from the mcore tensors of a reader, and converts their values if necessary."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.contract import CheckpointReader, RegionRead
from mcore_ckpt.formats.huggingface.export_plan import FileTensor
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.io.streams import memory_at
from mcore_ckpt.models.mapping import Slab
from mcore_ckpt.sharding.plan import ShardKey

_AT_ONCE = 1 << 20


class Elements(NamedTuple):
    """Elements of a tensor to read: from element `first` on, as many as the flat `memory` (of the same dtype) has."""

    tensor: FileTensor
    first: int
    memory: torch.Tensor


class Scratch:
    """Host memory for elements that are converted before they are written; each batch reuses it."""

    def __init__(self) -> None:
        self._memory = HostMemory()

    def reserve(self, changes: Iterable[_Change]) -> list[torch.Tensor]:
        sizes = [change.nbytes for change in changes]
        # The memory of each change begins at a multiple of 16 bytes, so that it is aligned for any dtype.
        *offsets, end = itertools.accumulate((-(-size // 16) * 16 for size in sizes), initial=0)
        if not end:
            return []
        buffer = self._memory.take(end)
        return [memory_at(buffer, at, size, torch.uint8) for at, size in zip(offsets, sizes, strict=True)]


@dataclass(frozen=True, eq=False)
class _Change:
    """Elements `[start, stop)` of a slab that are read into scratch memory, converted, and copied to `memory`.

    `stored` is the elements' dtype in the source. If the slab has a `change` of values, the whole slab is read.
    """

    slab: Slab
    start: int
    stop: int
    stored: torch.dtype
    memory: torch.Tensor

    @property
    def read(self) -> tuple[int, int]:
        return (self.start, self.stop) if self.slab.change is None else (0, self.slab.numel)

    @property
    def nbytes(self) -> int:
        start, stop = self.read
        return (stop - start) * self.stored.itemsize

    def apply(self, values: torch.Tensor) -> None:
        if self.slab.change is not None:
            changed = self.slab.change.to_hf(values.view(self.slab.region.local_shape))
            values = changed.reshape(-1)[self.start : self.stop]
        self.memory.copy_(values)
        if self.memory.dtype != values.dtype:
            self._refuse_overflow(values)

    def _refuse_overflow(self, values: torch.Tensor) -> None:
        """Refuses weights that become infinite in a narrower dtype (float16 ends at 65,504) and so give NaN logits."""
        dtype = self.memory.dtype
        if not dtype.is_floating_point or torch.finfo(dtype).max >= torch.finfo(values.dtype).max:
            return
        # Compare some elements at a time, because the masks need memory, too.
        for found, wanted in zip(self.memory.split(_AT_ONCE), values.split(_AT_ONCE), strict=True):
            lost = found.isinf() & wanted.isfinite()
            if lost.any():
                raise CheckpointMismatchError(
                    f"tensor {self.slab.mcore}: has the value {float(wanted[lost][0])}, which {dtype} cannot hold: "
                    "choose a wider dtype"
                )


def fill(reader: CheckpointReader, wanted: Iterable[Elements], scratch: Scratch) -> None:
    """Reads all wanted elements into their memory.

    Raises:
        CheckpointCorruptError: the source is damaged.
        CheckpointMismatchError: the wanted dtype cannot hold a value.
    """
    reads: list[RegionRead] = []
    changes: list[_Change] = []
    for tensor, first, memory in wanted:
        for slab, start, stop, its_memory in _slabs(tensor, first, memory):
            if not slab.mcore:
                its_memory.zero_()
                continue
            info = reader.info(ShardKey(slab.mcore, reader.weight_kind))
            assert info is not None, "a plan has only tensors of the reader"
            stored = info.dtype
            if slab.change is None and stored == tensor.dtype:
                reads.append(_part(slab, start, stop, its_memory))
            else:
                changes.append(_Change(slab, start, stop, stored, its_memory))
    read_first = [memory.view(change.stored) for change, memory in zip(changes, scratch.reserve(changes), strict=False)]
    for change, memory in zip(changes, read_first, strict=True):
        reads.append(_part(change.slab, *change.read, memory))
    read_regions(reader, reads)
    for change, memory in zip(changes, read_first, strict=True):
        change.apply(memory)


def _slabs(tensor: FileTensor, first: int, memory: torch.Tensor) -> Iterator[tuple[Slab, int, int, torch.Tensor]]:
    """Yields each slab that has some of these elements, their start and stop in the slab, and their memory."""
    stop = first + memory.numel()
    for slab in tensor.tensor.slabs:
        low, high = max(slab.start, first), min(slab.start + slab.numel, stop)
        if low < high:
            yield slab, low - slab.start, high - slab.start, memory[low - first : high - first]


def _part(slab: Slab, start: int, stop: int, memory: torch.Tensor) -> RegionRead:
    first = slab.region.flat[0]
    return RegionRead(slab.mcore, slab.region.with_flat(first + start, first + stop), memory)
