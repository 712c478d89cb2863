"""What an export reads from: tensors by name, whatever wrote them and wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mcore_ckpt.sharding.plan import ReadRange
from mcore_ckpt.sharding.regions import Region, Shape


@dataclass(frozen=True)
class TensorInfo:
    """A global tensor: its dtype, and its shape with whatever padding its vocabulary has."""

    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class PartRead:
    """A part of a tensor that is wanted.

    Attributes:
        name: the tensor's name, as `TensorSource.tensors` has it.
        region: which elements; its global shape may have fewer rows of a vocabulary than the stored one.
        memory: a contiguous CPU tensor of the stored dtype, with as many elements as the region; filled.
    """

    name: str
    region: Region
    memory: torch.Tensor


class TensorSource(Protocol):
    """A checkpoint's model, without a model: global tensors, from which any parts can be read."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All that there are, by global name (of an FSDP checkpoint: HuggingFace names)."""
        ...

    def read(self, parts: Iterable[PartRead]) -> int:
        """Fills all memories; how many bytes were read. Raises CheckpointCorruptError. May be called from a thread."""
        ...


Read = Callable[[Sequence[tuple[ReadRange, torch.Tensor]]], int]
"""Fills tensors with ranges of stored shards; returns how many bytes were read."""
