"""Reads elements of HuggingFace tensors from the mcore tensors of a reader, and converts their values if necessary.

A slab may need a change of values, or may have an adapter. For an adapter, whole rows of the weight, the same rows of
B, and all of A are read. The sum of weight and adapter is computed in fp32, some rows at a time, and rounded once. If
the checkpoint has no base model, `JoinedReader` takes the weights from the folder of the base model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.contract import CheckpointReader, RegionRead
from mcore_ckpt.formats.huggingface.export_plan import FileTensor, QuantizedPart
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.io import tuning
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.io.streams import memory_at
from mcore_ckpt.models.low_rank import LowRank
from mcore_ckpt.models.mapping import HfTensor, Slab
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region

_AT_ONCE = 1 << 20


class Elements(NamedTuple):
    """The elements of a tensor, from element `first` on, that fill `memory`, a flat tensor of the same dtype."""

    tensor: FileTensor
    first: int
    memory: torch.Tensor


class Scratch:
    """Host memory for elements that are converted before they are written; all batches use the same memory."""

    def __init__(self) -> None:
        self._memory = HostMemory()

    def reserve(self, nbytes: Iterable[int]) -> list[torch.Tensor]:
        sizes = list(nbytes)
        # Each piece of memory begins at a multiple of 16 bytes, so that it is aligned for any dtype.
        *offsets, end = itertools.accumulate((-(-size // 16) * 16 for size in sizes), initial=0)
        if not end:
            return []
        buffer = self._memory.take(end)
        return [memory_at(buffer, at, size, torch.uint8) for at, size in zip(offsets, sizes, strict=True)]


@dataclass(frozen=True, eq=False)
class _Change:
    """Elements `[start, stop)` of a slab that are read into scratch memory, converted, and copied to `memory`.

    A slab with a `change` of values is read whole. For a slab with an adapter, whole rows are read, together with the
    parts of the adapter that change these rows.
    """

    slab: Slab
    start: int
    stop: int
    memory: torch.Tensor

    @property
    def _first_and_last(self) -> tuple[int, int]:
        """The range of the slab's elements that is read: its start and its stop."""
        if self.slab.change is not None:
            return 0, self.slab.numel
        if self.slab.low_rank is None:
            return self.start, self.stop
        columns = self.slab.low_rank.columns
        return self.start // columns * columns, -(-self.stop // columns) * columns

    def parts(self) -> list[tuple[str, Region]]:
        """Returns the names and regions to read: of the weight, and of the adapter's A, B and magnitudes."""
        first, last = self._first_and_last
        parts = [(self.slab.mcore, _part(self.slab.region, first, last))]
        if (adapter := self.slab.low_rank) is not None:
            rows = first // adapter.columns, last // adapter.columns
            parts.append((adapter.a.name, adapter.a.region))
            parts.append((adapter.b.name, _part(adapter.b.region, *(row * adapter.rank for row in rows))))
            if adapter.magnitude is not None:
                parts.append((adapter.magnitude.name, _part(adapter.magnitude.region, *rows)))
        return parts

    def apply(self, values: torch.Tensor, *adapter: torch.Tensor) -> None:
        """Converts the values of the tensors in `parts` and copies the result to `memory`."""
        for at, converted in self._converted(values, *adapter):
            low, high = max(at, self.start), min(at + converted.numel(), self.stop)
            memory, converted = self.memory[low - self.start : high - self.start], converted[low - at : high - at]
            memory.copy_(converted)
            if memory.dtype != converted.dtype:
                self._refuse_overflow(memory, converted)

    def _converted(self, values: torch.Tensor, *adapter: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields converted elements in parts, each with the position of its first element in the slab."""
        first, _ = self._first_and_last
        change, low_rank = self.slab.change, self.slab.low_rank
        if change is not None:
            if low_rank is not None:
                values = torch.cat(list(_adapted(low_rank, values, *adapter)))
            yield first, change.to_hf(values.view(self.slab.region.local_shape)).reshape(-1)
        elif low_rank is None:
            yield first, values
        else:
            for rows in _adapted(low_rank, values, *adapter):
                yield first, rows
                first += rows.numel()

    def _refuse_overflow(self, memory: torch.Tensor, values: torch.Tensor) -> None:
        """Refuses weights that would be infinite in a narrower dtype (float16 ends at 65,504) and make logits NaN."""
        dtype = memory.dtype
        if not dtype.is_floating_point or torch.finfo(dtype).max >= torch.finfo(values.dtype).max:
            return
        # Compare a limited number of elements at a time, because the masks need memory, too.
        for found, wanted in zip(memory.split(_AT_ONCE), values.split(_AT_ONCE), strict=True):
            lost = found.isinf() & wanted.isfinite()
            if lost.any():
                raise CheckpointMismatchError(
                    f"tensor {self.slab.mcore}: has the value {float(wanted[lost][0])}, which {dtype} cannot hold: "
                    "choose a wider dtype"
                )


def _adapted(
    adapter: LowRank, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor | None = None
) -> Iterator[torch.Tensor]:
    """Yields the adapted weight, some rows at a time, in fp32 or wider.

    The caller rounds the values once, when it copies them.

    Computing all rows at once would need several times the memory of the weight.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a = a.view(adapter.rank, adapter.columns).to(dtype)
    at_once = max(1, _AT_ONCE // adapter.columns)
    lengths: Iterable[torch.Tensor | None] = itertools.repeat(None) if magnitude is None else magnitude.split(at_once)
    for rows, own, length in zip(
        weight.view(-1, adapter.columns).split(at_once), b.view(-1, adapter.rank).split(at_once), lengths, strict=False
    ):
        merged = torch.addmm(rows.to(dtype), own.to(dtype), a, alpha=adapter.scale)
        if length is not None:
            merged *= (length.to(dtype) / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1)
        yield merged.view(-1)


def fill(reader: CheckpointReader, wanted: Iterable[Elements], scratch: Scratch) -> None:
    """Reads all wanted elements into their memory.

    Raises:
        CheckpointCorruptError: the source is damaged.
        CheckpointMismatchError: the wanted dtype cannot hold a value.
    """
    reads: list[RegionRead] = []
    changes: list[_Change] = []
    for tensor, first, memory in wanted:
        if tensor.quantized is not None:
            _fill_quantized(reader, tensor.tensor, tensor.quantized, first, memory)
            continue
        for slab, start, stop, its_memory in _slabs(tensor, first, memory):
            if not slab.mcore:
                its_memory.zero_()
                continue
            if slab.change is None and slab.low_rank is None and _dtype_of(reader, slab.mcore) == tensor.dtype:
                reads.append(RegionRead(slab.mcore, _part(slab.region, start, stop), its_memory))
            else:
                changes.append(_Change(slab, start, stop, its_memory))
    needed = [change.parts() for change in changes]
    parts = [(name, region, _dtype_of(reader, name)) for its_parts in needed for name, region in its_parts]
    memories = scratch.reserve(region.numel * dtype.itemsize for _, region, dtype in parts)
    read_first = [memory.view(dtype) for memory, (_, _, dtype) in zip(memories, parts, strict=False)]
    reads += (RegionRead(name, region, memory) for (name, region, _), memory in zip(parts, read_first, strict=True))
    read_regions(reader, reads)
    values = iter(read_first)
    for change, its_parts in zip(changes, needed, strict=True):
        change.apply(*itertools.islice(values, len(its_parts)))


def _dtype_of(reader: CheckpointReader, name: str) -> torch.dtype:
    info = reader.info(ShardKey(name, reader.weight_kind))
    assert info is not None, "a plan contains only tensors of the reader"
    return info.dtype


def _fill_quantized(
    reader: CheckpointReader, tensor: HfTensor, part: QuantizedPart, first: int, memory: torch.Tensor
) -> None:
    """Fills memory with codes or scales, from element `first` on. Reads whole rows of blocks, a few rows at a time."""
    (rows, columns), height = tensor.shape, part.blocks.block[0]
    in_block_row = part.blocks.grid(tensor.shape)[1] if part.is_scales else height * columns
    step = max(1, tuning.SCATTER_BYTES // (height * columns * part.source.itemsize))
    last = first + memory.numel()
    for block in range(first // in_block_row, -(-last // in_block_row), step):
        top, bottom = block * height, min((block + step) * height, rows)
        values = torch.empty((bottom - top, columns), dtype=part.source)
        fill(reader, [Elements(FileTensor(tensor, part.source), top * columns, values.view(-1))], Scratch())
        codes, scales = part.blocks.quantize(values, tensor.name)
        found = (scales if part.is_scales else codes).view(-1)
        at = block * in_block_row
        low, high = max(first, at), min(last, at + found.numel())
        memory[low - first : high - first] = found[low - at : high - at]


def _slabs(tensor: FileTensor, first: int, memory: torch.Tensor) -> Iterator[tuple[Slab, int, int, torch.Tensor]]:
    """Yields each slab that has some of these elements, their start and stop in the slab, and their memory."""
    stop = first + memory.numel()
    for slab in tensor.tensor.slabs:
        low, high = max(slab.start, first), min(slab.start + slab.numel, stop)
        if low < high:
            yield slab, low - slab.start, high - slab.start, memory[low - first : high - first]


def _part(region: Region, start: int, stop: int) -> Region:
    first = region.flat[0]
    return region.with_flat(first + start, first + stop)
