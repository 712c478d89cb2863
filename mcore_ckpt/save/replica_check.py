"""Compares replicated tensors between ranks, because replicas may have drifted apart.

At each save, every rank computes the CRCs of small parts of a few replicated tensors, and sends the CRCs with its
report. Rank 0 compares the CRCs of all ranks. Each save chooses other tensors. With `verify_replicas`, the CRCs cover
all replicated tensors completely.

A list of tensors is compared between the ranks that have a list of the same names and regions. So no process group is
needed. Optimizer states are not compared between two pipeline stages if a DistributedOptimizer cuts the states at
different elements on each stage. The save's id chooses the tensors and the bytes. The CRCs take some 100 bytes of each
rank's report. If replicas have drifted apart, the next save nearly always finds this: a lost reduction or broadcast
changes all tensors, so a few samples are enough.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from weakref import ReferenceType, ref

import msgspec
import torch

from mcore_ckpt.io import _native
from mcore_ckpt.io.device_waits import wait_before_reading
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.offloaded import HostCopies, in_host_memory
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.shards import LocalShard, ParameterState
from mcore_ckpt.state.trainer import Trainer

logger = logging.getLogger(__name__)

Member = tuple[str, Region, torch.Tensor]

# How many tensors of each list are compared at a save, and how many bytes of each tensor. A rank then reads at most
# 256 KiB for each list, in some 0.1 ms.
_TENSORS, _BYTES = 4, 64 << 10

# If all bytes are compared, a tensor on a GPU is copied to the host in pieces of at most this many bytes.
_PIECE_BYTES = 64 << 20

# The name of a router's bias ends with one of these texts: `expert_bias` for `moe_router_enable_expert_bias`, `qb_beta`
# for megatron's "quantile_balancing" (0.19). The bias is a buffer, but is equal on all replicas, so `may_differ` is
# False for it.
_SAME_BUFFERS = (".expert_bias", ".qb_beta")

# A later stage has a copy of this tensor if embeddings are tied or there are MTP layers.
_EMBEDDING = "embedding.word_embeddings.weight"


class ReplicaReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The report of a rank to rank 0 on its replicated tensors at one save.

    Attributes:
        crcs: the CRCs of the chosen tensors of each list, by the list's label; None for a tensor that could not be
            read.
        names: the names of these tensors, if this rank has to send them.
        mended: the tensors whose bytes differ between two writers of one file: (the tensor's name, the ranks of the two
            writers).
    """

    crcs: dict[str, tuple[int | None, ...]] = {}
    names: dict[str, tuple[str, ...]] = {}
    mended: tuple[tuple[str, int, int], ...] = ()


# -- lists, on every rank -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ReplicatedTensors:
    """Tensors of this rank that other ranks hold with the same regions.

    Attributes:
        label: a digest of the names and regions. Ranks with the same label have the same tensors.
        names_them: whether this rank tells rank 0 the names, which are the same on all ranks with this label.
    """

    label: str
    names: tuple[str, ...]
    tensors: tuple[ReferenceType[torch.Tensor], ...]
    names_them: bool

    @staticmethod
    def of(kind: str, members: Iterable[Member], names_them: bool) -> ReplicatedTensors:
        """Makes the list. `kind` distinguishes lists that have the same members by chance."""
        listed = sorted(members, key=lambda member: member[0])
        places = "\n".join(f"{name} {_place(region)}" for name, region, _ in listed)
        label = kind + hashlib.sha256(places.encode()).hexdigest()[:12]
        names, tensors = tuple(name for name, _, _ in listed), tuple(ref(tensor) for _, _, tensor in listed)
        return ReplicatedTensors(label, names, tensors, names_them)


def _place(region: Region) -> str:
    # Use only these fields, because turning the whole region into text would take longer than the rest of planning.
    offset = region.pieces[0].global_offset if region.pieces else ()
    return f"{region.global_shape} {region.local_shape} {offset} {region.flat}"


def may_differ(name: str, is_buffer: bool) -> bool:
    """True if replicas may have different values of a tensor.

    Buffers may differ, and opaque tensors may differ even in length. But the router's `expert_bias` and `qb_beta` are
    each equal on all replicas, because megatron computes them from values that it reduces over all data-parallel ranks.
    """
    return is_buffer and not name.endswith(_SAME_BUFFERS)


def replicated_tensors(
    trainer: Trainer,
    model: Sequence[LocalShard],
    parts: Sequence[OptimizerPart],
    by_part: Sequence[Sequence[ParameterState]],
) -> tuple[ReplicatedTensors, ...]:
    """Returns the lists of this rank's tensors that other ranks have, too. Empty lists are left out.

    The states of a DistributedOptimizer are compared between tensor-parallel ranks, or between stages, only if these
    ranks or stages cut a parameter at the same elements. `by_part` has the states of each chained optimizer (`parts`).
    """
    replicas, at, topology = trainer.replicas, trainer.coordinates, trainer.topology
    first, first_of_experts = (trainer.agreement.rank == ranks[0] for ranks in (replicas.dense, replicas.experts))
    same = [shard for shard in model if not may_differ(shard.key.name, shard.is_buffer) and not shard.is_quantized]
    apart = topology.experts_apart
    dense = [s for s in same if not s.replica and not (apart and s.expert)]
    experts = [s for s in same if not s.replica and apart and s.expert]
    states = [state for of_part in by_part for state in of_part]
    everywhere = _states(parts, by_part, is_sharded=False)
    lists: list[tuple[str, Iterable[Member], bool]] = []
    if len(replicas.dense) > 1:
        lists.append(("d", map(_member, dense), first))
        lists.append(("o", _of(s for s in everywhere if not (apart and s.expert)), first))
        # Only other distributed-optimizer instances have the same regions of sharded optimizers.
        instances = _states(parts, by_part, is_sharded=True)
        lists.append(("i", _of(instances), first and trainer.first_instance))
    if len(replicas.experts) > 1:
        lists.append(("e", map(_member, experts), first_of_experts))
        lists.append(("x", _of(s for s in everywhere if apart and s.expert), first_of_experts))
    if topology.tp > 1:
        whole = [s for s in dense if not s.expert and s.region.numel == prod(s.region.global_shape)]
        names = {shard.key.name for shard in whole}
        lists.append(("t", map(_member, whole), first and at.tp == 0))
        lists.append(("y", _of(s for s in states if s.name in names and not s.replica), first and at.tp == 0))
    if topology.pp > 1:
        # With tied embeddings, megatron gives a later stage with MTP layers an output layer whose weight nothing uses.
        # This weight appears as a second copy of the embedding, so only the first copy counts.
        lists.append(("w", [_member(s) for s in same if s.key.name.endswith(_EMBEDDING)][:1], first and at.pp == 0))
        lists.append(("z", _of([s for s in states if s.name.endswith(_EMBEDDING)][:1]), first and at.pp == 0))
    made = (ReplicatedTensors.of(kind, members, names_them) for kind, members, names_them in lists)
    return tuple(each for each in made if each.names)


def _member(shard: LocalShard) -> Member:
    return shard.key.name, shard.region, shard.tensor


def _states(
    parts: Sequence[OptimizerPart], by_part: Sequence[Sequence[ParameterState]], is_sharded: bool
) -> list[ParameterState]:
    """Returns the states of those optimizers whose `is_sharded` has the given value.

    A sharded optimizer is divided among data-parallel ranks.
    """
    pairs = zip(parts, by_part, strict=True)
    return [state for part, states in pairs if part.is_sharded == is_sharded for state in states]


def _of(states: Iterable[ParameterState]) -> Iterator[Member]:
    for state in states:
        own = {} if state.is_model_view else {"param": state.main}
        for kind, tensor in {**own, **state.moments}.items():
            yield f"{state.name} ({kind})", state.region, tensor


# -- samples, on every rank ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sampled:
    """Parts of the tensors in one list, or the CRCs of these parts. The parts may still be on their way to the host.

    None stands for a tensor that cannot be read.
    """

    of: ReplicatedTensors
    numbers: tuple[int, ...]
    parts: tuple[torch.Tensor | int | None, ...]


@dataclass(frozen=True, eq=False)
class ReplicaSamples:
    """The samples of this rank's replicated tensors at one save."""

    samples: tuple[_Sampled, ...] = ()

    def report(self, has_arrived: bool, mended: Iterable[tuple[str, int, int]]) -> ReplicaReport:
        """Returns the CRCs, and the names of the tensors if this rank has to send them.

        Parts that are copied from a GPU count only if the copies have arrived.
        """
        told = (sampled for sampled in self.samples if sampled.of.names_them)
        return ReplicaReport(
            {each.of.label: tuple(_crc_if(part, has_arrived) for part in each.parts) for each in self.samples},
            {each.of.label: tuple(each.of.names[number] for number in each.numbers) for each in told},
            tuple(mended),
        )


def take_samples(
    lists: Sequence[ReplicatedTensors], attempt: str, everything: bool, copies: HostCopies
) -> ReplicaSamples:
    """Reads small parts of a few tensors of each list: the same parts on all ranks, and other parts at each save.

    The save's id (`attempt`) determines the parts. With `everything`, this function reads all bytes of all tensors, and
    returns only when they are read. Offloaded tensors are read from `copies`.
    """
    return ReplicaSamples(tuple(_sample(each, attempt, everything, copies) for each in lists))


def _sample(listed: ReplicatedTensors, attempt: str, everything: bool, copies: HostCopies) -> _Sampled:
    # Use a separate generator, because the trainer's generator must not change.
    chosen = random.Random(attempt + listed.label)
    total = len(listed.tensors)
    first = chosen.randrange(total)
    numbers = tuple((first + n) % total for n in range(total if everything else min(_TENSORS, total)))
    parts: list[torch.Tensor | int | None] = []
    for number in numbers:
        at, tensor = chosen.random(), listed.tensors[number]()
        found = None if tensor is None else in_host_memory([tensor.detach()], copies)[0]
        if found is None or not found.untyped_storage().nbytes():
            parts.append(None)
        elif everything:
            wait_before_reading(found)
            parts.append(_crc_of_all(found.contiguous()))
        elif not found.is_contiguous():
            parts.append(None)  # reading a part would take a copy of the whole tensor
        else:
            part = _part_at(found.view(-1), at)
            parts.append(part.to("cpu", non_blocking=True) if part.is_cuda else _crc(part))
    return _Sampled(listed, numbers, tuple(parts))


def _crc_if(part: torch.Tensor | int | None, has_arrived: bool) -> int | None:
    if isinstance(part, torch.Tensor):
        return _crc(part) if has_arrived else None
    return part


def _part_at(flat: torch.Tensor, at: float) -> torch.Tensor:
    length = min(flat.numel(), _BYTES // flat.itemsize)
    start = int(at * (flat.numel() - length + 1))
    return flat[start : start + length]


def _crc_of_all(tensor: torch.Tensor) -> int:
    crc = 0
    for part in tensor.view(-1).split(_PIECE_BYTES // tensor.itemsize):
        crc = _crc(part.cpu(), crc)
    return crc


def _crc(part: torch.Tensor, seed: int = 0) -> int:
    return _native.crc32(part.data_ptr(), part.nbytes, seed) if part.nbytes else seed


# -- on rank 0 ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DifferentReplicas:
    """A tensor whose bytes differ between replicas, and the ranks that hold each version, the largest group first."""

    tensor: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        groups = " and ".join(f"rank{'s' if len(g) > 1 else ''} {_shown(g)}" for g in self.ranks)
        return f"tensor {self.tensor}: {groups} have different bytes, although they are replicas"


def _shown(ranks: Sequence[int]) -> str:
    most = 8
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more


def compare_replicas(reports: Sequence[ReplicaReport]) -> tuple[DifferentReplicas, ...]:
    """Compares the reports of all ranks, which are in the order of the ranks."""
    by_label: dict[str, dict[int, Sequence[int | None]]] = {}
    names: dict[str, Sequence[str]] = {}
    for rank, report in enumerate(reports):
        names.update(report.names)
        for label, crcs in report.crcs.items():
            by_label.setdefault(label, {})[rank] = crcs
    found = {
        different.tensor: different
        for label, by_rank in by_label.items()
        if len(by_rank) > 1
        for different in _differences(by_rank, names.get(label, ()))
    }
    for tensor, one, other in chain.from_iterable(report.mended for report in reports):
        found.setdefault(tensor, DifferentReplicas(tensor, ((min(one, other),), (max(one, other),))))
    return tuple(found.values())


def _differences(by_rank: Mapping[int, Sequence[int | None]], names: Sequence[str]) -> Iterator[DifferentReplicas]:
    # Nearly always all CRCs are equal. Handle this case fast, because there may be thousands of ranks.
    if len(set(by_rank.values())) == 1:
        return
    for number, every in enumerate(zip(*by_rank.values(), strict=True)):
        versions: dict[int, list[int]] = {}
        for rank, crc in zip(by_rank, every, strict=True):
            if crc is not None:
                versions.setdefault(crc, []).append(rank)
        if len(versions) > 1:
            groups = sorted(map(tuple, versions.values()), key=lambda ranks: (-len(ranks), ranks))
            yield DifferentReplicas(names[number] if number < len(names) else f"number {number}", tuple(groups))


@dataclass(frozen=True, eq=False)
class ReplicaWarnings:
    """Warns once of each tensor, and of at most `most` tensors, because drifted replicas differ in all tensors."""

    most: int = 8
    _told: set[str] = field(default_factory=set)

    def tell(self, found: Iterable[DifferentReplicas]) -> None:
        """Warns of the tensors that no earlier call has warned of."""
        for different in found:
            if different.tensor in self._told or len(self._told) >= self.most:
                continue
            self._told.add(different.tensor)
            last = "; the reports of the saves name further tensors" if len(self._told) == self.most else ""
            logger.warning(
                "%s. Find out what has changed a replica. A load makes all replicas of this tensor equal, unless the "
                "checkpoint has a separate copy for each tensor-parallel rank, or does not have the tensor "
                "(skip_frozen)%s",
                different,
                last,
            )
