"""Lists the tensors of this rank of which other ranks have the same regions, for `replica_check` to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from weakref import ReferenceType, ref

import torch

from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.shards import LocalShard, ParameterState
from mcore_ckpt.state.trainer import Trainer

Member = tuple[str, Region, torch.Tensor]

# The bias of a router: `moe_router_enable_expert_bias`, or "quantile_balancing" of 0.19.
_SAME_BUFFERS = (".expert_bias", ".qb_beta")

# A later stage has a copy of it if embeddings are tied or there are MTP layers.
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, eq=False)
class ReplicatedTensors:
    """Tensors of this rank of which other ranks have the same regions.

    Attributes:
        label: a digest of the names and regions. Ranks with one label have the same tensors.
        names: the name of each tensor.
        tensors: a weak reference to each tensor.
        names_them: whether this rank tells rank 0 the names, which are the same on all ranks with this label.
    """

    label: str
    names: tuple[str, ...]
    tensors: tuple[ReferenceType[torch.Tensor], ...]
    names_them: bool

    @staticmethod
    def of(kind: str, members: Iterable[Member], names_them: bool) -> ReplicatedTensors:
        """Makes the list. `kind` keeps lists apart that have the same members by chance."""
        listed = sorted(members, key=lambda member: member[0])
        places = "\n".join(f"{name} {_place(region)}" for name, region, _ in listed)
        label = kind + hashlib.sha256(places.encode()).hexdigest()[:12]
        names, tensors = tuple(name for name, _, _ in listed), tuple(ref(tensor) for _, _, tensor in listed)
        return ReplicatedTensors(label, names, tensors, names_them)


def _place(region: Region) -> str:
    # All of a region, as text, would take longer than the rest of planning.
    offset = region.pieces[0].global_offset if region.pieces else ()
    return f"{region.global_shape} {region.local_shape} {offset} {region.flat}"


def may_differ(name: str, is_buffer: bool) -> bool:
    """True if replicas may have different values of a tensor. Buffers may differ, opaque tensors even in length.

    Two buffers of the router do not differ, because megatron reduces what it computes them from over all data-parallel
    ranks.
    """
    return is_buffer and not name.endswith(_SAME_BUFFERS)


def replicated_tensors(
    trainer: Trainer,
    model: Sequence[LocalShard],
    parts: Sequence[OptimizerPart],
    by_part: Sequence[Sequence[ParameterState]],
) -> tuple[ReplicatedTensors, ...]:
    """Returns the lists of this rank's tensors that other ranks have, too. Lists are empty where there are no replicas.

    The states of a DistributedOptimizer are compared between tensor-parallel ranks, and between stages, only where
    these cut a parameter at the same elements.

    Args:
        trainer: this rank's trainer.
        model: the model's tensors that are saved.
        parts: the chained optimizers.
        by_part: the states of each chained optimizer's parameters.
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
        # Of sharded optimizers, only other distributed-optimizer instances have the same regions.
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
        # Of two copies on one stage, only the first is used: megatron gives a stage with MTP layers an output layer
        # that nothing uses.
        lists.append(("w", [_member(s) for s in same if s.key.name.endswith(_EMBEDDING)][:1], first and at.pp == 0))
        lists.append(("z", _of([s for s in states if s.name.endswith(_EMBEDDING)][:1]), first and at.pp == 0))
    made = (ReplicatedTensors.of(kind, members, names_them) for kind, members, names_them in lists)
    return tuple(each for each in made if each.names)


def _member(shard: LocalShard) -> Member:
    return shard.key.name, shard.region, shard.tensor


def _states(
    parts: Sequence[OptimizerPart], by_part: Sequence[Sequence[ParameterState]], is_sharded: bool
) -> list[ParameterState]:
    """Returns the states of the optimizers that are, or are not, divided among data-parallel ranks."""
    pairs = zip(parts, by_part, strict=True)
    return [state for part, states in pairs if part.is_sharded == is_sharded for state in states]


def _of(states: Iterable[ParameterState]) -> Iterator[Member]:
    for state in states:
        own = {} if state.is_model_view else {"param": state.main}
        for kind, tensor in {**own, **state.moments}.items():
            yield f"{state.name} ({kind})", state.region, tensor
