"""Reads the param groups of optimizers, matches saved groups with live ones, and writes them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.state.optimizers.part import IMPLEMENTATION, STEP, OptimizerPart
from mcore_ckpt.state.plain import to_plain

# The fields of a param group that keep their present values if megatron's scheduler is set to override the saved ones.
_RATES = ("lr", "max_lr", "min_lr", "weight_decay")


def read_param_groups(part: OptimizerPart) -> list[dict[str, Any]]:
    """Returns the fields of all groups, except parameters, step and what only this kind of optimizer has.

    All values are plain.

    Raises UnsupportedError if a field has no plain value.
    """
    return [
        {
            key: to_plain(value, f"param_groups[{i}][{key!r}]")
            for key, value in group.items()
            if key not in ("params", STEP, *part.own_fields)
        }
        for i, group in enumerate(part.param_groups)
    ]


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
        starts_anew: whether the part takes over main parameters alone, because it needs other moments than the saved.
    """

    param_groups: Sequence[Mapping[str, Any]] | None
    step: float | int | None
    grad_scaler: Mapping[str, Any] | None
    starts_anew: bool = False


def match_parts(
    parts: Sequence[OptimizerPart], saved: Sequence[Mapping[str, Any]], reset_moments: bool = False
) -> tuple[SavedPart, ...]:
    """Finds the saved state of each part, even if the saved optimizers were chained in another way.

    With expert parallelism, experts have an optimizer of their own. Without expert parallelism, they are in the groups
    of the dense optimizer (`_get_param_groups`, 0.16.1).

    Args:
        parts: the parts of the live optimizer.
        saved: the saved parts, as `common.pt` has them.
        reset_moments: whether a part of a kind that was not saved may start without moments.

    Raises:
        CheckpointMismatchError: a part has no saved counterpart, or several different counterparts.
    """
    saved = [state for state in saved if state["kind"] != _NO_OPTIMIZER]
    _check_scalers(parts, saved)
    scaler = saved[0]["grad_scaler"] if saved else None
    found: list[SavedPart] = []
    for number, part in enumerate(parts):
        # Only parts of one kind can have each other's state.
        alike = [each for each in parts if each.kind_name == part.kind_name]
        same = [state for state in saved if state["kind"] == part.kind_name]
        if part.inner is None:
            found.append(SavedPart((), None, scaler))
        elif not same:
            _check_may_start_anew(part, saved, reset_moments)
            found.append(SavedPart(None, None, scaler, starts_anew=True))
        elif len(alike) == len(same) and all(map(_is_of_the_same, alike, same)):
            place = sum(each.kind_name == part.kind_name for each in parts[:number])
            found.append(_match_part(part, [same[place]]))
        else:
            found.append(_match_part(part, same))
    return tuple(found)


def _check_may_start_anew(part: OptimizerPart, saved: Sequence[Mapping[str, Any]], reset_moments: bool) -> None:
    kinds = sorted({state["kind"] for state in saved})
    if not kinds:
        raise CheckpointMismatchError(
            f"optimizer: wanted the state of {part.kind_name}, found no state: leave 'optimizer' out of load_contents"
        )
    if not reset_moments:
        raise CheckpointMismatchError(
            f"optimizer: wanted the state of {part.kind_name}, found that of {' and '.join(kinds)}: set "
            "reset_moments=True to take over the main parameters alone, and to start with new moments"
        )


def _is_of_the_same(part: OptimizerPart, saved: Mapping[str, Any]) -> bool:
    """Returns True if both have the same kinds of groups (experts, other parameters), or if `part` has no groups."""
    here, there = (
        {_identity(group)["is_expert_parallel"] for group in groups}
        for groups in (part.param_groups, saved["param_groups"])
    )
    return not here or here == there


def _check_scalers(parts: Sequence[OptimizerPart], saved: Sequence[Mapping[str, Any]]) -> None:
    for part in (part for part in parts if part.inner is not None):
        has_scaler = getattr(part.megatron, "grad_scaler", None) is not None
        if any(has_scaler != (state["grad_scaler"] is not None) for state in saved):
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

    If `keep_rates` is True, learning rates and weight decay stay as they are. So does what says how the optimizer
    works, because the one that was saved may have been of another class.
    """
    left = (*_EXPERTS, *IMPLEMENTATION, *part.own_fields, *(_RATES if keep_rates else ()))
    for group, values in zip(part.param_groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key not in left})
