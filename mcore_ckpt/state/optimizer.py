"""Turns optimizers into named shards, and writes saved state back.

Names and regions come from the model. The optimizer adds the flat range of each parameter that this rank owns. A new
class of optimizer is refused until `state/unsupported.py` admits it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.state.plain import to_plain
from mcore_ckpt.state.shards import LocalShard, ParameterState

STEP = "step"
# The fields of a param group that keep their present values if megatron's scheduler is set to override the saved ones.
_RATES = ("lr", "max_lr", "min_lr", "weight_decay")


@dataclass(frozen=True)
class OptimizerPart:
    """A chained optimizer: megatron's object, and the torch-like optimizer in it (None if it has no parameters)."""

    megatron: Any
    inner: Any

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [] if self.inner is None else self.inner.param_groups

    @property
    def is_sharded(self) -> bool:
        """True for a DistributedOptimizer. Its state is divided among data-parallel ranks, and not replicated."""
        return hasattr(self.megatron, "gbuf_ranges")

    @property
    def steps_in_groups(self) -> bool:
        """True if the step is in the param groups (transformer-engine's FusedAdam), not in `state` (torch's Adam)."""
        return any(cls.__name__ == "FusedAdam" for cls in type(self.inner).__mro__)


def optimizer_parts(optimizer: Any) -> list[OptimizerPart]:
    """Returns the chained optimizers in megatron's order: dense parameters first, then experts."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [OptimizerPart(part, getattr(part, "optimizer", None)) for part in chained]


def read_optimizer(optimizer: Any, model: Sequence[LocalShard], first_instance: bool) -> list[list[ParameterState]]:
    """Returns this rank's parameter states as live tensors, one list per chained optimizer.

    Nothing is copied or communicated.

    Args:
        optimizer: megatron's optimizer.
        model: the model's shards, for names and regions.
        first_instance: whether this rank belongs to distributed-optimizer instance 0, the instance that writes.

    Raises:
        UnsupportedError: the optimizer has a parameter that is not in the model, or state that cannot be saved.
    """
    by_parameter = {id(shard.tensor): shard for shard in model}
    result = []
    for part in optimizer_parts(optimizer):
        states = []
        for parameter, main, flat, is_view in main_params(part):
            shard = by_parameter.get(id(parameter))
            if shard is None:
                raise UnsupportedError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not in the model"
                )
            states.append(_parameter_state(part, shard, main, flat, is_view, first_instance))
        result.append(states)
    return result


def main_params(part: OptimizerPart) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[int, int], bool]]:
    """Yields (model parameter, main parameter, flat range, whether main is a view of the model's memory).

    The function reads the groups in which megatron pairs model parameters with main parameters. Megatron's own
    `_get_main_param_and_optimizer_states` (0.16.1) finds a main parameter by its position in buffer order, although the
    groups list fp32 parameters first. If a group has parameters of two dtypes, that method mixes up main parameters.
    """
    owner = part.megatron
    if part.inner is None:
        return
    if part.is_sharded:
        pairs = [
            (owner.model_float16_groups, owner.shard_fp32_from_float16_groups, False),
            (owner.model_fp32_groups, owner.shard_fp32_groups, True),
        ]
        for model_groups, main_groups, is_view in pairs:
            for parameter, main in _zip_groups(model_groups, main_groups):
                owned = owner._get_model_param_range_map(parameter)["param"]
                yield parameter, main, (owned.start, owned.end), is_view
    elif hasattr(owner, "float16_groups"):
        for parameter, main in _zip_groups(owner.float16_groups, owner.fp32_from_float16_groups):
            yield parameter, main, (0, parameter.numel()), False
        for parameter in (p for group in owner.fp32_from_fp32_groups for p in group):
            yield parameter, parameter, (0, parameter.numel()), True
    else:
        for parameter in (p for group in part.param_groups for p in group["params"]):
            yield parameter, parameter, (0, parameter.numel()), True


def _zip_groups(first: Any, second: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for a, b in zip(first, second, strict=True):
        yield from zip(a, b, strict=True)


def _parameter_state(
    part: OptimizerPart,
    shard: LocalShard,
    main: torch.Tensor,
    flat: tuple[int, int],
    is_view: bool,
    first_instance: bool,
) -> ParameterState:
    return ParameterState(
        name=shard.key.name,
        region=shard.region.with_flat(*flat),
        main=main,
        is_model_view=is_view,
        expert=shard.expert,
        replica=shard.replica or not first_instance,
        moments=_moments(part, shard, main),
    )


def _moments(part: OptimizerPart, shard: LocalShard, main: torch.Tensor) -> dict[str, torch.Tensor]:
    # `state` is a defaultdict, so indexing it for a parameter without state would create an entry.
    state = part.inner.state.get(main, {})
    moments = {}
    for kind, value in state.items():
        if kind == STEP or value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.numel() != main.numel():
            raise UnsupportedError(
                f"optimizer state {kind!r} of {shard.key.name} is {_describe(value)}, not a tensor "
                f"of the parameter's {main.numel()} elements"
            )
        moments[kind] = value
    return moments


def _describe(value: Any) -> str:
    return f"a tensor of {value.numel()} elements" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def read_step(part: OptimizerPart) -> float | int | None:
    """Returns the number of steps that this part has done on this rank, or None if it has done none here.

    Raises:
        UnsupportedError: parameters have done different numbers of steps, which a single number cannot restore.
    """
    if part.inner is None:
        return None
    if part.steps_in_groups:
        steps = {group[STEP] for group in part.param_groups if group["params"] and STEP in group}
    else:
        steps = _numbers([state[STEP] for state in part.inner.state.values() if STEP in state])
    if len(steps) > 1:
        raise UnsupportedError(
            f"parameters of {type(part.inner).__name__} have done different numbers of steps: {sorted(steps)}"
        )
    return steps.pop() if steps else None


def _numbers(steps: Sequence[Any]) -> set[float | int]:
    # Otherwise a TorchFunctionMode, such as that of a profiler, would be called for each of thousands of tensors.
    with torch._C.DisableTorchFunction():
        tensors = [step for step in steps if isinstance(step, torch.Tensor)]
        numbers = {step for step in steps if not isinstance(step, torch.Tensor)}
        on_device = [step for step in tensors if not step.is_cpu]
        numbers.update(map(torch.Tensor.item, (step for step in tensors if step.is_cpu)))
        # All these steps are transferred together, because each transfer waits for the device.
        return numbers.union(torch.stack(on_device).tolist() if on_device else ())


def read_param_groups(part: OptimizerPart) -> list[dict[str, Any]]:
    """Returns the fields of all groups, except parameters and step, as plain values.

    Raises UnsupportedError if a field has no plain value.
    """
    return [
        {
            key: to_plain(value, f"param_groups[{i}][{key!r}]")
            for key, value in group.items()
            if key not in ("params", STEP)
        }
        for i, group in enumerate(part.param_groups)
    ]


def read_grad_scaler(part: OptimizerPart) -> dict[str, Any] | None:
    """Returns the gradient scaler's state as plain values, or None if there is no gradient scaler."""
    scaler = getattr(part.megatron, "grad_scaler", None)
    return None if scaler is None else to_plain(scaler.state_dict(), "grad_scaler")


def kind_of(part: OptimizerPart) -> str:
    """Returns the kind of state that the optimizer keeps. All variants of Adam keep the same kind."""
    name = type(part.inner).__name__
    return "Adam" if name in ("Adam", "AdamW", "FusedAdam") else name


# The kind of a part without parameters.
_NO_OPTIMIZER = type(None).__name__


@dataclass(frozen=True)
class SavedPart:
    """The saved state of one chained optimizer without its tensors.

    Attributes:
        param_groups: the saved param groups, in the order of the live optimizer's groups (see `match_groups`). None if
            the live groups stay as they are.
        step: the number of steps. None if it is unknown.
        grad_scaler: the gradient scaler's state, or None.
    """

    param_groups: Sequence[Mapping[str, Any]] | None
    step: float | int | None
    grad_scaler: Mapping[str, Any] | None


def match_parts(parts: Sequence[OptimizerPart], saved: Sequence[Mapping[str, Any]]) -> tuple[SavedPart, ...]:
    """Finds the saved state of each part, even if the saved optimizers were chained in another way.

    With expert parallelism, experts have an optimizer of their own. Without expert parallelism, they are in the groups
    of the dense optimizer (`_get_param_groups`, 0.16.1).

    Raises:
        CheckpointMismatchError: a part has no saved counterpart, or several different counterparts.
    """
    for part in parts:
        _check_kind(part, saved)
    if len(parts) == len(saved) and all(map(_is_of_the_same, parts, saved)):
        return tuple(_match_part(part, [state]) for part, state in zip(parts, saved, strict=True))
    return tuple(_match_part(part, saved) for part in parts)


def _is_of_the_same(part: OptimizerPart, saved: Mapping[str, Any]) -> bool:
    """Returns True if both have the same kinds of groups (experts, other parameters), or if `part` has no groups."""
    here, there = (
        {_identity(group)["is_expert_parallel"] for group in groups}
        for groups in (part.param_groups, saved["param_groups"])
    )
    return not here or here == there


def _check_kind(part: OptimizerPart, saved: Sequence[Mapping[str, Any]]) -> None:
    if part.inner is None:
        return
    has_scaler = getattr(part.megatron, "grad_scaler", None) is not None
    for state in saved:
        if state["kind"] == _NO_OPTIMIZER:
            continue
        if state["kind"] != kind_of(part):
            raise CheckpointMismatchError(
                f"optimizer: wanted the state of {kind_of(part)}, found that of {state['kind']}"
            )
        if has_scaler != (state["grad_scaler"] is not None):
            wanted, found = ("a grad scaler", "none") if has_scaler else ("no grad scaler", "one")
            raise CheckpointMismatchError(f"optimizer: wanted {wanted}, found {found} in the checkpoint")


def _match_part(part: OptimizerPart, saved: Sequence[Mapping[str, Any]]) -> SavedPart:
    groups = match_groups(part, [group for state in saved for group in state["param_groups"]])
    steps = {state["step"] for state in saved if state["step"] is not None}
    if len(steps) > 1:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizers have done different numbers of steps, {sorted(steps)}, but share one "
            "optimizer here: load the checkpoint with expert parallelism, as it was saved"
        )
    return SavedPart(tuple(groups), steps.pop() if steps else None, saved[0]["grad_scaler"])


def match_groups(part: OptimizerPart, saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Finds the saved counterpart of each group of `part`.

    If the identities of all groups agree in order, groups are matched by position, in the same way as in
    `_filter_and_reorder_param_groups` (0.16.1). Otherwise groups are matched only by multipliers, because the layout
    decides which groups hold experts. If several saved groups with different settings remain, the user's overrides are
    compared, and finally whether the group holds experts.

    Raises:
        CheckpointMismatchError: a group has no saved counterpart, or several different counterparts.
    """
    groups = part.param_groups
    if len(groups) == len(saved) and all(_identity(a) == _identity(b) for a, b in zip(groups, saved, strict=True)):
        return list(saved)
    return [_counterpart(part, number, saved) for number in range(len(groups))]


def _counterpart(part: OptimizerPart, number: int, saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    group = part.param_groups[number]
    same = [candidate for candidate in saved if _multipliers(candidate) == _multipliers(group)]
    for alike in (_overrides, _identity):
        if not _are_alike(same):
            same = [candidate for candidate in same if alike(candidate) == alike(group)] or same
    if not same or not _are_alike(same):
        differing = {key for candidate in same for key in candidate if candidate[key] != same[0].get(key)}
        raise CheckpointMismatchError(
            f"param group {number} ({_identity(group)}) of {type(part.inner).__name__} has {len(same)} counterparts "
            f"among the {len(saved)} saved groups ({[_identity(g) for g in saved]})"
            f"{f', which differ in {sorted(differing)}' if differing else ''}: use the same weight-decay and "
            "learning-rate groups"
        )
    return min(same, key=lambda candidate: _identity(candidate) != _identity(group))


_EXPERTS = ("is_expert_parallel", "pre_is_expert_parallel")
# The fields that megatron's ParamGroupOverride (0.16.1) can set for some parameters, in addition to the multipliers.
_OVERRIDES = ("max_lr", "min_lr", "start_wd", "end_wd", "default_config")


def _are_alike(groups: Sequence[Mapping[str, Any]]) -> bool:
    settings = [{key: value for key, value in group.items() if key not in _EXPERTS} for group in groups]
    return all(each == settings[0] for each in settings)


def _multipliers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _identity(group).items() if key not in _EXPERTS}


def _overrides(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group.get(key) for key in _OVERRIDES}


def _identity(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of megatron's `param_group_identifier_keys`. NeMo prefixes some of them with `pre_`."""
    keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    return {key: group.get(key, group.get(f"pre_{key}")) for key in keys}


def write_param_groups(part: OptimizerPart, saved: Sequence[Mapping[str, Any]], keep_rates: bool) -> None:
    """Sets the fields of each group from the saved group at the same position (see `match_groups`).

    If `keep_rates` is True, learning rates and weight decay stay as they are.
    """
    left = (*_EXPERTS, *(_RATES if keep_rates else ()))
    for group, values in zip(part.param_groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key not in left})


def write_step(part: OptimizerPart, step: float | int | None) -> None:
    """Sets the step of every param group, or of every parameter that has state, on this rank.

    Each parameter gets a tensor of its own. `DistributedOptimizer.load_state_dict` (0.16.1) shares one tensor among all
    parameters, so that Adam increments the shared step once per parameter.
    """
    if part.inner is None:
        return
    if part.steps_in_groups:
        for group in part.param_groups:
            group.pop(STEP, None)
            if step is not None:
                group[STEP] = int(step)
        return
    if step is None:
        return
    on_device = {id(p) for g in part.param_groups if g.get("capturable") or g.get("fused") for p in g["params"]}
    for parameter, state in part.inner.state.items():
        device = parameter.device if id(parameter) in on_device else torch.device("cpu")
        state[STEP] = torch.tensor(float(step), dtype=torch.float32, device=device)


def write_grad_scaler(part: OptimizerPart, saved: Mapping[str, Any] | None) -> None:
    """Sets the gradient scaler to a saved state. Does nothing if there is no scaler or no saved state."""
    scaler = getattr(part.megatron, "grad_scaler", None)
    if scaler is not None and saved is not None:
        scaler.load_state_dict(dict(saved))


def moment_tensor(part: OptimizerPart, state: ParameterState, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor to load a moment into: the present moment, or a new tensor of the main parameter's shape."""
    there = part.inner.state[state.main].get(kind)
    if there is None:
        there = torch.empty_like(state.main, dtype=dtype, requires_grad=False)
        part.inner.state[state.main][kind] = there
    return there


def forget_state(part: OptimizerPart, state: ParameterState) -> None:
    """Removes the state of a parameter that had done no step when it was saved."""
    part.inner.state.pop(state.main, None)


def copy_main_to_model(optimizer: Any) -> None:
    """Casts this rank's ranges of the main parameters into the model, in the same way as `step()` after the update."""
    for part in optimizer_parts(optimizer):
        if part.inner is not None and hasattr(part.megatron, "_copy_main_params_to_model_params"):
            part.megatron._copy_main_params_to_model_params()
