"""Turns optimizers into named shards, and writes saved state back.

Names and regions come from the model. For each parameter, the optimizer adds the flat range that this rank owns. A new
class of optimizer is refused until `state/unsupported.py` admits it. `optimizers/` describes where each kind of
optimizer keeps its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.sharding.plan import PARAM
from mcore_ckpt.state.optimizers.chain import layer_wise_nodes, optimizer_parts
from mcore_ckpt.state.optimizers.part import STEP, MainParameter, OptimizerPart
from mcore_ckpt.state.plain import to_plain
from mcore_ckpt.state.shards import LocalShard, ParameterState


def read_optimizer(optimizer: Any, model: Sequence[LocalShard], first_instance: bool) -> list[list[ParameterState]]:
    """Returns this rank's parameter states as live tensors, one list per chained optimizer.

    Nothing is copied or communicated. `model` has the model's shards, for names and regions. `first_instance` tells
    whether this rank belongs to distributed-optimizer instance 0, the instance that writes.

    Raises UnsupportedError: a parameter is not in the model, or state cannot be saved.
    """
    by_parameter = {id(shard.tensor): shard for shard in model}
    result = []
    for part in optimizer_parts(optimizer):
        states = []
        groups = part.group_numbers()
        for each in part.mains():
            shard = by_parameter.get(id(each.parameter))
            if shard is None:
                raise UnsupportedError(
                    f"the optimizer holds a parameter of shape {list(each.parameter.shape)} that is not in the model"
                )
            states.append(_parameter_state(part, shard, each, first_instance, groups.get(id(each.key))))
        result.append(states)
    return result


def _parameter_state(
    part: OptimizerPart, shard: LocalShard, each: MainParameter, first_instance: bool, group: int | None
) -> ParameterState:
    state = _state(part, shard, each)
    bound = part.bound_shapes(each.main)
    moments = {kind: value for kind, value in state.items() if kind not in bound}
    for kind, value in moments.items():
        if value.numel() != each.main.numel():
            raise UnsupportedError(
                f"optimizer state {kind!r} of {shard.key.name} is a tensor of {value.numel()} elements, not a tensor "
                f"of the parameter's {each.main.numel()} elements"
            )
    return ParameterState(
        name=shard.key.name,
        region=shard.region.with_flat(*each.flat),
        key=each.key,
        main=each.main,
        is_model_view=each.is_model_view,
        expert=shard.expert,
        replica=shard.replica or not first_instance,
        group=group,
        moments=moments,
        bound={kind: value for kind, value in state.items() if kind in bound},
        scales={kind: scale for kind in (PARAM, *moments) if (scale := part.scale_of(each.key, kind)) is not None},
        upper=each.upper,
    )


def _state(part: OptimizerPart, shard: LocalShard, each: MainParameter) -> dict[str, torch.Tensor]:
    """Returns the tensors of a parameter's state by kind, without its step."""
    state = {kind: value for kind, value in part.state_of(each.key).items() if kind != STEP and value is not None}
    for kind, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(
                f"optimizer state {kind!r} of {shard.key.name} is a {type(value).__name__}, not a tensor "
                f"of the parameter's {each.main.numel()} elements"
            )
    return state


def read_grad_scaler(part: OptimizerPart) -> dict[str, Any] | None:
    """Returns the gradient scaler's state as plain values, or None if there is no gradient scaler."""
    scaler = getattr(part.megatron, "grad_scaler", None)
    return None if scaler is None else to_plain(scaler.state_dict(), "grad_scaler")


def write_grad_scaler(part: OptimizerPart, saved: Mapping[str, Any] | None) -> None:
    """Sets the gradient scaler to a saved state. Does nothing if there is no scaler or no saved state."""
    scaler = getattr(part.megatron, "grad_scaler", None)
    if scaler is not None and saved is not None:
        scaler.load_state_dict(dict(saved))


def refresh(optimizer: Any) -> None:
    """Updates everything that follows from loaded main parameters and state, except the model."""
    for part in optimizer_parts(optimizer):
        if part.inner is not None:
            part.refresh()


def changes_model(optimizer: Any) -> bool:
    """Returns True if loading main parameters changes the model on this rank, but not on its replicas."""
    return any(part.changes_model for part in optimizer_parts(optimizer))


def gather_from_owners(optimizer: Any) -> None:
    """Sends the parameters that each rank owns in a layer-wise optimizer to the other ranks.

    Leaves out optimizers whose parameters are sent by the buffers of DistributedDataParallel. All ranks must call this
    function.
    """
    for node in layer_wise_nodes(optimizer):
        if not getattr(node, "use_buffer_param_sync", False):
            node.allgather_params()


def copy_main_to_model(optimizer: Any) -> None:
    """Casts this rank's ranges of the main parameters into the model, as `step()` does after the update."""
    for part in optimizer_parts(optimizer):
        part.copy_to_model()


def follow_model(optimizer: Any) -> None:
    """Sets the main parameters from the model, which has been loaded without the optimizer."""
    for part in optimizer_parts(optimizer):
        part.follow_model()
