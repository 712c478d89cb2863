"""Describes what this rank trains, for the readers of other programs' checkpoints (`formats/foreign_state.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.foreign_state import (
    BucketRange,
    LivePart,
    LiveTraining,
    MegatronShard,
    ModelTensor,
    OwnedRange,
    Writers,
)
from mcore_ckpt.load.fresh_adapters import choice_of
from mcore_ckpt.ranks.rounds import Record, decide
from mcore_ckpt.state.model import model_shards, sharded_state_dict, unwrap
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.quantized import is_quantized
from mcore_ckpt.state.trainer import Trainer


@dataclass(frozen=True, eq=False)
class OwnedParameter(OwnedRange):
    """An owned range, and the optimizer's objects for it (see `state.optimizers.part.MainParameter`)."""

    part: OptimizerPart
    key: torch.Tensor
    main: torch.Tensor


def find_writers(trainer: Trainer) -> Writers:
    """Finds the ranks that write this rank's state under the present layout. All ranks must call this function."""
    at = trainer.coordinates
    own = {"place": list(at.place), "model": [at.tp, at.pp, at.ep]}

    def combine(records: Sequence[Record]) -> Record:
        model = sorted({tuple(record["model"]) for record in records})
        return {"places": [record["place"] for record in records], "model": [list(ranks) for ranks in model]}

    ranks = decide(trainer.agreement, "finding the places of all ranks", lambda: own, combine)
    dense, experts = (ranks["places"][group[0]] for group in (trainer.replicas.dense, trainer.replicas.experts))
    return Writers(tuple(dense), tuple(experts), frozenset((tp, pp, ep) for tp, pp, ep in ranks["model"]))


def describe_training(trainer: Trainer, path: Path, writers: Writers | None) -> LiveTraining:
    """Describes the model and the optimizer that this rank loads into. `path` is the checkpoint, for messages."""

    def chosen(tensors: Sequence[ModelTensor], stored: Collection[str]) -> list[ModelTensor]:
        is_taken = choice_of(trainer, path, (tensor.name for tensor in tensors), stored)
        return [tensor for tensor in tensors if is_taken(tensor.name, _is_frozen(tensor.live))]

    modules = [unwrap(chunk) for chunk in trainer.chunks]
    return LiveTraining(
        contents=trainer.config.load_contents,
        position=RankPosition(trainer.topology, trainer.coordinates),
        writers=writers,
        layers=trainer.layers,
        parts=_live_parts(trainer) if "optimizer" in trainer.config.load_contents else (),
        assumed_step=trainer.config.assume_optimizer_step,
        state_dicts=lambda: [module.state_dict(keep_vars=True) for module in modules],
        sharded=lambda flags: [tensor for module in modules for tensor in _sharded_tensors(module, flags)],
        chosen=chosen,
    )


# -- model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A live tensor, with megatron's ShardedTensor or ShardedTensorFactory; implements `ModelTensor`."""

    name: str
    live: torch.Tensor
    sharded: Any

    @property
    def key(self) -> str:
        key: str = self.sharded.key
        return key

    @property
    def is_quantized(self) -> bool:
        return is_quantized(self.live)

    def keys(self, key: str) -> list[str]:
        found: list[str] = []
        if not isinstance(self.sharded, ShardedTensorFactory):
            return [key]
        # The parts of a mixer's tensors have their own keys. The factory gets a tensor without memory, because it must
        # not read the bytes of a quantized weight, not even to cut the weight into parts.
        unread = torch.empty(self.sharded.data.shape, device="meta")
        dict_list_map_outplace(lambda part: found.append(part.key), self._build(key, unread))
        return found

    def fill(self, key: str, memory: torch.Tensor, read: Callable[[MegatronShard], torch.Tensor]) -> torch.Tensor:
        if not isinstance(self.sharded, ShardedTensorFactory):
            return read(replace(self.sharded, key=key, data=memory, dtype=memory.dtype))
        # A factory may copy parts of `memory`. Only the factory's merge_fn can put these copies together again.
        merged: torch.Tensor = self.sharded.merge_fn(dict_list_map_outplace(read, self._build(key, memory)))
        return merged

    def _build(self, key: str, data: torch.Tensor) -> Any:
        return replace(self.sharded, key=key, data=data).build()


def _sharded_tensors(module: torch.nn.Module, flags: Mapping[str, bool]) -> Iterator[ModelTensor]:
    sharded = sharded_state_dict(module, **flags)
    for name, live in module.state_dict(keep_vars=True).items():
        # Skip transformer-engine's _extra_state, which is a pickle. Only delayed scaling needs this state, and after a
        # load delayed scaling begins with a new history.
        if live is None or name.endswith("_extra_state"):
            continue
        entry = sharded.get(name)
        if entry is None or entry.data is not live:
            raise UnsupportedError(
                f"tensor {name}: the model's sharded_state_dict has no entry for it (metadata {dict(flags)}), so its "
                "region is unknown: give the tensor's module a sharded_state_dict that lists the tensor"
            )
        yield _Tensor(name, live, entry)


def _is_frozen(live: torch.Tensor) -> bool:
    return isinstance(live, torch.nn.Parameter) and not live.requires_grad


# -- optimizer ---------------------------------------------------------------------------------------------


def _live_parts(trainer: Trainer) -> list[LivePart]:
    names = {id(shard.tensor): shard.key.name for shard in model_shards(trainer.chunks)}
    return [_live_part(part, names) for part in optimizer_parts(trainer.optimizer)]


def _live_part(part: OptimizerPart, names: Mapping[int, str]) -> LivePart:
    kind, is_empty = part.kind, part.inner is None
    assert kind is not None or is_empty, "an optimizer with parameters has a kind"
    is_cut = part.is_distributed and not is_empty
    mains = list(part.mains())

    def bucket_ranges() -> list[BucketRange]:
        buckets = dict(_bucket_ranges(part.megatron)) if is_cut else {}
        return [buckets[id(each.parameter)] for each in mains]

    return LivePart(
        class_name=type(part.megatron).__name__,
        kind_name="" if is_empty else part.kind_name,
        moments=() if kind is None else kind.moments,
        has_step=kind is None or kind.has_step,
        is_empty=is_empty,
        is_distributed=part.is_distributed,
        group_index=part.megatron.data_parallel_group_idx if is_cut else None,
        param_groups=part.param_groups,
        ranges=[
            OwnedParameter(
                names[id(each.parameter)],
                each.parameter,
                *each.flat,
                bool(part.bound_shapes(each.main)),
                part,
                each.key,
                each.main,
            )
            for each in mains
        ],
        bucket_ranges=bucket_ranges,
    )


def _bucket_ranges(optimizer: Any) -> Iterator[tuple[int, BucketRange]]:
    """Yields the place of each owned range, with the `id` of the model parameter.

    An element of a parameter has the same place under any data-parallel size.
    """
    group = optimizer.data_parallel_group
    for number, by_dtype in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[number]
        for dtype, maps in by_dtype.items():
            before = 0
            for place, (bucket, ranges) in enumerate(zip(buffer.buckets, maps, strict=True)):
                numel = bucket.numel_unpadded
                own = group.rank() * (bucket.grad_data.numel() // group.size())
                for parameter, where in ranges["param_map"].items():
                    start = own + where["gbuf_local"].start
                    found = BucketRange(number, dtype, place, start, numel, before, buffer.numel_unpadded)
                    yield id(parameter), found
                before += numel
