"""Tensors that several ranks load alike: each read by one of them, and broadcast to the others in large batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import tuning
from mcore_ckpt.load.fill import TensorFill
from mcore_ckpt.ranks.topology import Replicas


@dataclass(frozen=True, eq=False)
class Batch:
    """Tensors of one dtype that the ranks `replicas` have alike; world rank `reader` reads them."""

    fills: tuple[TensorFill, ...]
    replicas: tuple[int, ...]
    reader: int


def batches(fills: Iterable[TensorFill]) -> list[Batch]:
    """What is replicated, in batches of some BROADCAST_BYTES. The same on all replicas; they read in turn."""
    members: dict[tuple[tuple[int, ...], torch.dtype], list[TensorFill]] = {}
    for fill in fills:
        if len(fill.replicas) > 1:
            members.setdefault((fill.replicas, fill.target().dtype), []).append(fill)
    found: list[Batch] = []
    for (replicas, _), alike in members.items():
        for number, batch in enumerate(_cut(alike)):
            found.append(Batch(tuple(batch), replicas, replicas[number % len(replicas)]))
    return found


def _cut(fills: Sequence[TensorFill]) -> Iterator[list[TensorFill]]:
    batch: list[TensorFill] = []
    nbytes = 0
    for fill in fills:
        size = fill.target().nbytes
        # Alone, a large tensor is sent from where it is; with others it would be copied.
        if batch and nbytes + size > tuning.BROADCAST_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(fill)
        nbytes += size
    if batch:
        yield batch


def to_read(fills: Iterable[TensorFill], shared: Iterable[Batch], rank: int) -> list[TensorFill]:
    """What this rank reads itself."""
    own = [fill for fill in fills if len(fill.replicas) <= 1]
    return own + [fill for batch in shared if batch.reader == rank for fill in batch.fills]


def broadcast(shared: Iterable[Batch], replicas: Replicas) -> None:
    """Brings every rank what others have read. Collective over each batch's replicas, in the same order on all."""
    import torch.distributed as dist

    for batch in shared:
        targets = [fill.target() for fill in batch.fills]
        group = _group(batch.replicas, replicas)
        with torch.no_grad():
            if len(targets) == 1 and targets[0].is_contiguous():
                dist.broadcast(targets[0], batch.reader, group)
                continue
            flat = torch.cat([target.detach().reshape(-1) for target in targets])
            dist.broadcast(flat, batch.reader, group)
            for target, part in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
                target.copy_(part.view(target.shape))


def refuse_broadcast(chunks: Iterable[torch.nn.Module], replicas: Replicas, what: str) -> None:
    """Raises UnsupportedError if tensors are where their group's backend cannot send from: offloaded from the GPU.

    `what` is the option that asks for it, for the message.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    on_cpu = any(not parameter.is_cuda for chunk in chunks for parameter in chunk.parameters())
    if on_cpu and dist.get_backend(_group(replicas.dense, replicas)) == "nccl":
        raise UnsupportedError(
            f"{what} cannot send parameters that are in CPU memory: bring the model to the GPU first"
        )


def _group(ranks: tuple[int, ...], replicas: Replicas) -> Any:
    from megatron.core import parallel_state as ps

    if ranks == replicas.dense:
        return ps.get_data_parallel_group(with_context_parallel=True)
    return ps.get_expert_data_parallel_group()
