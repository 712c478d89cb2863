"""Fills live tensors by planned reads, either in place or through a limited amount of temporary memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.contract import Read
from mcore_ckpt.io import tuning
from mcore_ckpt.sharding.plan import ReadRange, ShardKey

Encode = Callable[[torch.Tensor], object]
"""A function that takes the elements that were read. Without it, the elements are copied into a tensor."""


@dataclass(frozen=True, eq=False)
class TensorFill:
    """One tensor to fill, and the stored ranges that fill it.

    Attributes:
        reads: the ranges of stored shards that together fill the tensor.
        dtype: the dtype of the stored elements.
        target: a function that returns the tensor. The function is called only when the training state may change.
        padded: True if some of the elements are not stored anywhere. These elements become zero.
        encode: a function that takes the elements that were read; None if the elements are copied into the tensor.
        finish: a function to call with the tensor once it is filled, or None.
        replicas: the world ranks that fill equal tensors, so that one rank can read for all of them; empty if each rank
            reads for itself.
        rounding: how the values are rounded, such as "exp_avg: float32 to bfloat16", for the report; None if they are
            not rounded.
    """

    reads: tuple[ReadRange, ...]
    dtype: torch.dtype
    target: Callable[[], torch.Tensor]
    padded: bool = False
    encode: Encode | None = None
    finish: Callable[[torch.Tensor], None] | None = None
    replicas: tuple[int, ...] = ()
    rounding: str | None = None


def fill_tensors(fills: Sequence[TensorFill], read: Read) -> int:
    """Fills tensors and returns the number of bytes read.

    If a tensor has another dtype than the stored tensor, or is not contiguous, the values are read into a temporary
    tensor first. At any time, the temporary tensors take less than CONVERT_BYTES plus the size of one tensor.
    """
    nbytes = 0
    for batch in _in_batches(fills):
        nbytes += _fill_batch(batch, read)
    return nbytes


def _in_batches(fills: Sequence[TensorFill]) -> Iterator[list[TensorFill]]:
    """Yields all fills that need no temporary tensor as one batch, then the other fills in batches of CONVERT_BYTES."""
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
    return fill.encode is None and target.is_contiguous() and target.dtype == fill.dtype


def _fill_batch(fills: Sequence[TensorFill], read: Read) -> int:
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
        if fill.encode is not None:
            fill.encode(memory)
        elif memory is not tensor:
            tensor.copy_(memory)
        if fill.finish is not None:
            fill.finish(tensor)
    return nbytes


def refuse_freed(key: ShardKey, tensor: torch.Tensor, call: str) -> None:
    """Refuses to fill a tensor if its memory has been freed.

    megatron's `offload_to_cpu` (0.16.1) frees the storage of a tensor. The allocator may then give the same address to
    another tensor, which a fill would overwrite.

    `call` is the public function that the user has called, for the message.

    Raises UnsupportedError: the tensor has elements but no memory.
    """
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise UnsupportedError(
            f"tensor {key} has no memory because it is offloaded: bring model and optimizer back to the device before "
            f"{call}"
        )
