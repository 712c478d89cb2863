"""Planned reads into live tensors: where they are, or through bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mcore_ckpt import knobs
from mcore_ckpt.planning import TensorFill
from mcore_ckpt.sharding.plan import ReadRange

Read = Callable[[Sequence[tuple[ReadRange, torch.Tensor]]], int]
"""Fills tensors with ranges of stored shards, and returns how many bytes were read: `storage.reader.read_ranges`."""


def fill_tensors(fills: Sequence[TensorFill], read: Read) -> int:
    """Fills tensors; returns how many bytes were read.

    What has another dtype than what is stored, or is not row-major, takes memory on the way: CONVERT_BYTES, or one
    tensor.
    """
    return sum(_fill_together(batch, read) for batch in _in_batches(fills))


def _in_batches(fills: Sequence[TensorFill]) -> Iterator[list[TensorFill]]:
    """Those filled where they are, at once; those that take memory on the way, as many as fit into CONVERT_BYTES."""
    direct = [fill for fill in fills if _is_direct(fill)]
    yield direct
    batch: list[TensorFill] = []
    nbytes = 0
    for fill in fills:
        if _is_direct(fill):
            continue
        batch.append(fill)
        nbytes += sum(read.rows.numel for read in fill.reads) * fill.dtype.itemsize
        if nbytes >= knobs.CONVERT_BYTES:
            yield batch
            batch, nbytes = [], 0
    yield batch


def _is_direct(fill: TensorFill) -> bool:
    target = fill.target()
    return target.is_contiguous() and target.dtype == fill.dtype


def _fill_together(fills: Sequence[TensorFill], read: Read) -> int:
    targets = [fill.target() for fill in fills]
    memories = [
        tensor if _is_direct(fill) else torch.empty(tensor.shape, dtype=fill.dtype, device=tensor.device)
        for fill, tensor in zip(fills, targets, strict=True)
    ]
    for fill, memory in zip(fills, memories, strict=True):
        if fill.padded:
            memory.zero_()
    nbytes = read([(part, memory) for fill, memory in zip(fills, memories, strict=True) for part in fill.reads])
    for fill, tensor, memory in zip(fills, targets, memories, strict=True):
        if memory is not tensor:
            tensor.copy_(memory)
        if fill.finish is not None:
            fill.finish(tensor)
    return nbytes
