"""Defines the read contract: a reader lists a checkpoint's tensors, says where their shards are, and reads ranges.

Every kind of checkpoint has one reader: `native/`, `huggingface/`, `torch_dist/`, `verl_ranks/` and `fsdp/`. Loading,
resharding, merging, converting and comparing use only this contract. `locate.py` uses it to find the stored ranges
that make up a wanted region.
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
    """The dtype and the global shape of a tensor. The shape includes the rows that pad a vocabulary."""

    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class RankPosition:
    """The rank that asks for a tensor: its layout and its coordinates."""

    topology: Topology
    coordinates: RankCoordinates


@dataclass(frozen=True)
class RegionRead:
    """A region of a model's tensor to read into memory.

    Attributes:
        name: the tensor's name in the reader's `names`.
        region: the elements to read. Its global shape may have fewer vocabulary rows than the stored tensor.
        memory: a contiguous CPU tensor of the stored dtype with as many elements as the region; the read fills it.
    """

    name: str
    region: Region
    memory: torch.Tensor


Fill = Iterable[tuple[ReadRange, torch.Tensor]]
"""Ranges of stored shards, each with the contiguous tensor of the stored dtype (CPU or GPU) that it fills."""

Read = Callable[[Sequence[tuple[ReadRange, torch.Tensor]]], int]
"""The type of `CheckpointReader.read`: fills tensors with ranges of stored shards, returns the number of bytes read."""


class CheckpointReader(Protocol):
    """Reads one checkpoint of one role, whatever program wrote it.

    A tensor has a name and one or several kinds: `MODEL` is the model's tensor; `PARAM`, `exp_avg`, ... are the
    optimizer's state (see `sharding.plan`). Names are those of Megatron's layer specs, or HuggingFace's if the
    checkpoint stores HuggingFace tensors.
    """

    @property
    def place(self) -> Path | str:
        """The folder or URL of the checkpoint, for messages."""

    @property
    def names(self) -> Mapping[str, int]:
        """The names of all tensors, with their positions in a list that is equal on all ranks."""

    @property
    def weight_kind(self) -> str:
        """The kind of the weights: MODEL, or PARAM if only the optimizer was saved."""

    def info(self, key: ShardKey) -> TensorInfo | None:
        """The dtype and the global shape of a tensor; None if the checkpoint does not have it.

        Raises:
            CheckpointCorruptError: the file that describes the tensor is missing or damaged.
        """

    def kinds(self, name: str, position: RankPosition | None = None) -> tuple[str, ...]:
        """The stored kinds of a tensor's optimizer state; the files near `position` are opened first."""

    def parts(self, key: ShardKey, position: RankPosition | None = None) -> Iterator[Sequence[StoredShard]]:
        """Yields sets of the tensor's stored shards, each set larger than the one before.

        The first set comes from the files of the ranks nearest to `position`, the last one from all files. A caller
        takes the first set that covers its region, so it opens only a few of a thousand ranks' files.

        Raises:
            CheckpointCorruptError: an index is missing, cut or damaged.
        """

    def tp_size(self, expert: bool) -> int:
        """The tensor-parallel size that (experts') tensors were saved under; 1 if they are not cut."""

    def read(self, ranges: Fill, check: bool = True) -> int:
        """Fills tensors with ranges of stored shards, on several threads, and returns the number of bytes read.

        Args:
            ranges: the ranges to read, each with the tensor that it fills.
            check: compare the CRC of each block before its bytes are used, if the checkpoint has CRCs.

        Raises:
            CheckpointCorruptError: a block is damaged, or a file is missing or cut. Other blocks may have been applied.
        """


def weights_of(reader: CheckpointReader) -> dict[str, TensorInfo]:
    """Lists all weights of a checkpoint by name. It opens at most one index per tensor.

    Raises:
        CheckpointCorruptError: an index is missing, cut or damaged.
    """
    found = ((name, reader.info(ShardKey(name, reader.weight_kind))) for name in reader.names)
    return {name: info for name, info in found if info is not None}
