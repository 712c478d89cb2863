"""The read contract: which tensors a checkpoint holds, where their parts are, and "read these regions".

Every kind of checkpoint has one reader: `native/`, `huggingface/`, `torch_dist/`, `verl_ranks/` and `fsdp/`. Loading,
resharding, merging, converting and comparing know nothing but this contract. `locate.py` finds, with its help, the
stored ranges that make up a wanted region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.plan import ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region, Shape


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and the global shape of a tensor. The shape includes the padding of a vocabulary."""

    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class RankPosition:
    """The rank that asks for a tensor: its layout and its coordinates."""

    topology: Topology
    coordinates: RankCoordinates


@dataclass(frozen=True)
class RegionRead:
    """A part of a model's tensor to read.

    Attributes:
        name: the tensor's name, as the reader has it.
        region: which elements. Its global shape may have fewer rows of a vocabulary than the stored tensor.
        memory: a contiguous CPU tensor of the stored dtype with as many elements as the region; it is filled.
    """

    name: str
    region: Region
    memory: torch.Tensor


Fill = Iterable[tuple[ReadRange, torch.Tensor]]
"""Ranges of stored shards, each with the contiguous tensor of the stored dtype that it goes into (CPU or GPU)."""

Read = Callable[[Sequence[tuple[ReadRange, torch.Tensor]]], int]
"""Fills tensors with ranges of stored shards and returns how many bytes were read: `CheckpointReader.read`."""


class CheckpointReader(Protocol):
    """Reads one checkpoint of one role, whatever program wrote it.

    A tensor has a name and kinds: `MODEL` is the model's own tensor; `PARAM`, `exp_avg`, ... are the optimizer's state
    (see `sharding.plan`). Names are those of Megatron's layer specs, or HuggingFace's where the checkpoint has those.
    """

    @property
    def place(self) -> Path | str:
        """The folder or URL of the checkpoint, for messages."""

    @property
    def names(self) -> Mapping[str, int]:
        """The names of all tensors, with their positions in a list that is the same on all ranks."""

    @property
    def weight_kind(self) -> str:
        """The kind that the weights have: MODEL, or PARAM where only the optimizer was saved."""

    def info(self, key: ShardKey) -> TensorInfo | None:
        """The dtype and the global shape of a tensor; None if the checkpoint does not have it.

        Raises:
            CheckpointCorruptError: the file that says so is missing or damaged.
        """

    def kinds(self, name: str, position: RankPosition | None = None) -> tuple[str, ...]:
        """The kinds of a tensor's optimizer state that are stored. `position` says whose files to ask first."""

    def parts(self, key: ShardKey, position: RankPosition | None = None) -> Iterator[Sequence[StoredShard]]:
        """Where the parts of a tensor are stored.

        Yields one set of shards after the other, each larger than the one before: first those of the ranks that should
        have what a rank in this position wants, at last all there are. A caller takes the first set that is enough, so
        that of a thousand ranks' files only a few are opened.

        Raises:
            CheckpointCorruptError: an index is missing, cut or damaged.
        """

    def tp_size(self, expert: bool) -> int:
        """The tensor-parallel size that tensors (or those of experts) were saved under; 1 where they are not cut."""

    def read(self, ranges: Fill, check: bool = True) -> int:
        """Fills tensors with ranges of stored shards, on several threads; returns how many bytes were read.

        Args:
            ranges: what to read, and into what.
            check: compare the CRC of each block before its bytes are used, where the checkpoint has CRCs.

        Raises:
            CheckpointCorruptError: a block is damaged, or a file is missing or cut. Other blocks may have been applied.
        """


def weights_of(reader: CheckpointReader) -> dict[str, TensorInfo]:
    """All weights of a checkpoint by name. Opens one index for each tensor at most.

    Raises:
        CheckpointCorruptError: an index is missing, cut or damaged.
    """
    found = ((name, reader.info(ShardKey(name, reader.weight_kind))) for name in reader.names)
    return {name: info for name, info in found if info is not None}
