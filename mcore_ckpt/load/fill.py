"""Planned reads into live tensors: where they are, or through bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.contract import Read
from mcore_ckpt.io import tuning
from mcore_ckpt.sharding.plan import ReadRange, ShardKey


@dataclass(frozen=True, eq=False)
class TensorFill:
    """One tensor to fill: where its bytes are, and how to get at its memory once it may change.

    Attributes:
        reads: rows of stored shards.
        dtype: of the stored elements.
        target: the tensor.
        padded: whether some of its elements are in no file and become zero.
        finish: what to do with the tensor once it is filled.
        replicas: world ranks that fill it alike, where one may do so for the others.
    """

    reads: tuple[ReadRange, ...]
    dtype: torch.dtype
    target: Callable[[], torch.Tensor]
    padded: bool = False
    finish: Callable[[torch.Tensor], None] | None = None
    replicas: tuple[int, ...] = ()


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
        if nbytes >= tuning.CONVERT_BYTES:
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


def refuse_freed(key: ShardKey, tensor: torch.Tensor, call: str) -> None:
    """Refuses to fill a tensor whose memory is freed; `call` is the user's call, for the message.

    megatron's `offload_to_cpu` (0.16.1) frees the storage below a tensor. Its address then belongs to somebody else.

    Raises:
        UnsupportedError: the tensor has elements and no memory.
    """
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise UnsupportedError(
            f"tensor {key} has no memory: it is offloaded; bring model and optimizer back before {call}"
        )
