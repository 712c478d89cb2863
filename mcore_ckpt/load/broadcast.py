"""Chooses one reader for each replicated tensor, and broadcasts what the reader has read, in large batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.batches import batches as by_bytes
from mcore_ckpt.load.fill import TensorFill
from mcore_ckpt.ranks.topology import Replicas


@dataclass(frozen=True, eq=False)
class Batch:
    """Tensors of one dtype that are equal on the world ranks `replicas`; world rank `reader` reads them."""

    fills: tuple[TensorFill, ...]
    replicas: tuple[int, ...]
    reader: int


def batches(fills: Iterable[TensorFill]) -> list[Batch]:
    """Divides the replicated tensors into batches of about BROADCAST_BYTES, which the replicas read in turn.

    The result is the same on all replicas. A batch of one tensor is sent from the tensor's own memory. The tensors of a
    larger batch are first copied into one tensor.
    """
    members: dict[tuple[tuple[int, ...], torch.dtype], list[TensorFill]] = {}
    for fill in fills:
        if len(fill.replicas) > 1:
            members.setdefault((fill.replicas, fill.target().dtype), []).append(fill)
    found: list[Batch] = []
    for (replicas, _), alike in members.items():
        for number, batch in enumerate(by_bytes(alike, lambda fill: fill.target().nbytes, tuning.BROADCAST_BYTES)):
            found.append(Batch(tuple(batch), replicas, replicas[number % len(replicas)]))
    return found


def to_read(fills: Iterable[TensorFill], shared: Iterable[Batch], rank: int) -> list[TensorFill]:
    """Returns the fills that world rank `rank` reads: tensors without replicas, and batches with `rank` as reader."""
    own = [fill for fill in fills if len(fill.replicas) <= 1]
    return own + [fill for batch in shared if batch.reader == rank for fill in batch.fills]


def broadcast(shared: Iterable[Batch], replicas: Replicas) -> None:
    """Broadcasts each batch from its reader. All replicas call this function, with the batches in the same order."""
    for batch in shared:
        targets = [fill.target() for fill in batch.fills]
        group = replicas.group_of(batch.replicas)
        with torch.no_grad():
            if len(targets) == 1 and targets[0].is_contiguous():
                dist.broadcast(targets[0], batch.reader, group)
                continue
            flat = torch.cat([target.detach().reshape(-1) for target in targets])
            dist.broadcast(flat, batch.reader, group)
            for target, part in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
                target.copy_(part.view(target.shape))


def refuse_broadcast(chunks: Iterable[torch.nn.Module], replicas: Replicas, what: str) -> None:
    """Raises UnsupportedError if parameters are in CPU memory, but the replicas' group has only NCCL.

    `what` is the option that requires the broadcast, for the message.
    """
    if not dist.is_initialized():
        return
    on_cpu = any(not parameter.is_cuda for chunk in chunks for parameter in chunk.parameters())
    if on_cpu and dist.get_backend(replicas.group_of(replicas.dense)) == "nccl":
        raise UnsupportedError(
            f"{what}: parameters are in CPU memory, but NCCL sends only from GPU memory: bring the model to the GPU"
        )
