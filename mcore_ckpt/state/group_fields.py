"""The fields of param groups: which fields distinguish groups, and whether a load keeps the run's or the saved value.

`FIELDS` lists the fields. The table in `docs/how_to/resume.md` has the same rows, and explains each field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Rule = Literal["schedule", "optimizer", "rate", "class", "mark", "structure"]
"""The rule of a field says whether the run's or the checkpoint's value counts after a load, and whether the field
distinguishes groups:

- "schedule": an LR scheduler reads the field. The scheduler's `Option` says whose value counts. The field distinguishes
  groups.
- "structure": like "schedule". In addition, groups that differ in the field are never counterparts, unless they have
  the same parameters.
- "rate": an LR scheduler computes the field at every step. The scheduler's `Option` says whose value counts.
- "optimizer": the checkpoint's value counts, because the moments were made with it. The field distinguishes two groups
  if both have it.
- "class": the run's value counts, because the field controls how a class of optimizer works.
- "mark": the run's value counts, because the field only marks the layout or version of the group.
"""

Option = Literal["run", "checkpoint", "equal"]
"""Which schedule counts: the run's (`override_opt_param_scheduler`) or the checkpoint's
(`use_checkpoint_opt_param_scheduler`, or a scheduler of another class than megatron's). With "equal", the two schedules
must be equal."""


@dataclass(frozen=True)
class GroupField:
    """The rule of a field, and the value that counts for a group without the field; None if there is no such value."""

    rule: Rule
    default: Any = None


# Fields that are not listed follow the rule of _OTHER. They are settings of a kind of optimizer, or of a user's own
# class.
FIELDS: dict[str, GroupField] = {
    **dict.fromkeys(("wd_mult", "lr_mult"), GroupField("structure", 1.0)),
    **dict.fromkeys(("default_config", "optimizer"), GroupField("structure")),
    # A group that lacks one of these fields has the scheduler's value.
    **dict.fromkeys(("max_lr", "min_lr", "start_wd", "end_wd"), GroupField("schedule")),
    **dict.fromkeys(("lr", "weight_decay"), GroupField("rate")),
    **dict.fromkeys(("betas", "eps", "momentum"), GroupField("optimizer")),
    # Since 0.16, `is_decoupled_lr` is False even for a group with `decoupled_lr`, so the field is only a mark. The
    # group's own `max_lr` distinguishes such a group from other groups.
    **dict.fromkeys(("is_expert_parallel", "is_decoupled_lr"), GroupField("mark", False)),
    **dict.fromkeys(("amsgrad", "bias_correction", "capturable", "decoupled_weight_decay"), GroupField("class")),
    **dict.fromkeys(("differentiable", "foreach", "fused", "maximize"), GroupField("class")),
}
_OTHER = GroupField("optimizer")
EXPERTS = "is_expert_parallel"
_MARKS = tuple(name for name, field in FIELDS.items() if field.rule == "mark")
# Fields of a param group that control how a class of optimizer works. They do not change the results of a training with
# megatron.
IMPLEMENTATION = tuple(name for name, field in FIELDS.items() if field.rule == "class")
# For a field with one of these rules, the run's value counts, and the field does not distinguish groups.
_OF_RUN: tuple[Rule, ...] = ("class", "mark")
# The prefix that NeMo puts before the names of some fields.
_PREFIX = "pre_"
_NO_FIELDS = ("params", "step")

Group = Mapping[str, Any]


def name_of(key: str) -> str:
    """Returns the name that a field has in FIELDS. NeMo spells some fields with a prefix."""
    bare = key.removeprefix(_PREFIX)
    return bare if bare in FIELDS else key


def field_of(key: str) -> GroupField:
    """Returns the rule and the default of a group's field."""
    return FIELDS.get(name_of(key), _OTHER)


def settings(group: Group) -> dict[str, Any]:
    """Returns the fields of a group that are compared with other groups, as JSON values.

    Fields with the rule "class" or "mark" are not compared. If the group lacks a field, or has None for this field, the
    result has the field's default.
    """
    found = {name: field.default for name, field in FIELDS.items() if field.default is not None and name not in _MARKS}
    for key, value in group.items():
        if key not in _NO_FIELDS and field_of(key).rule not in _OF_RUN and value is not None:
            found[name_of(key)] = _comparable(value)
    return found


def is_of_experts(group: Group) -> bool:
    """Returns True if the parameters of the group are experts, which megatron keeps apart from other parameters."""
    return marks(group)[EXPERTS]


def marks(group: Group) -> dict[str, bool]:
    """Returns the marks of a group by name. A mark that the group lacks is False."""
    return {name: bool(group.get(name, group.get(_PREFIX + name))) for name in _MARKS}


def _comparable(value: Any) -> Any:
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, torch.Tensor) or not hasattr(value, "__float__"):
        listed = isinstance(value, (list, tuple))
        return [_comparable(item) for item in value] if listed else f"a {type(value).__name__}"
    return float(value)


def are_same(one: Any, other: Any) -> bool:
    """Returns True if two settings are the same. 0 and 0.0 are the same, and a NaN equals itself."""
    return one == other or str(one) == str(other)


def differing(one: Group, other: Group, rules: tuple[Rule, ...]) -> list[str]:
    """Returns the names of the fields that follow one of `rules` and differ between the settings of two groups.

    If only one of the two groups has a field, the field counts as a difference only under the rule "schedule", because
    versions of megatron and classes of optimizers have different fields.
    """
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if field_of(name).rule in rules
        and not are_same(one.get(name), other.get(name))
        and (field_of(name).rule == "schedule" or (name in one and name in other))
    ]


def write_group(group: dict[str, Any], saved: Group, option: Option, own_fields: tuple[str, ...]) -> None:
    """Copies, from a saved group to a live group, the fields whose saved value counts."""
    for key, value in saved.items():
        field = field_of(key)
        is_of_run = field.rule in _OF_RUN or (option == "run" and field.rule != "optimizer")
        if key not in (*_NO_FIELDS, *own_fields) and not is_of_run:
            _set(group, _spelling(group, key), value)
    if option == "run":
        return
    there = set(map(name_of, saved))
    for key in [key for key in group if name_of(key) not in there and field_of(key).rule in ("structure", "schedule")]:
        _set_default(group, key)


def _spelling(group: Group, key: str) -> str:
    return next((each for each in (key, name_of(key), _PREFIX + key) if each in group), key)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    live = group.get(key)
    if isinstance(live, torch.Tensor):
        # Keep the tensor, because a captured graph reads the rate from this tensor (`optimizer_cuda_graph`, 0.19).
        live.fill_(float(value))
    elif isinstance(value, torch.Tensor) and isinstance(live, (int, float)):
        group[key] = value.item()
    else:
        group[key] = value


def _set_default(group: dict[str, Any], key: str) -> None:
    """Sets a field of a live group to the field's default, because the saved group lacks the field.

    A field of the schedule that has no default is deleted. So the scheduler's value counts, as it did at the save.
    """
    field = field_of(key)
    if field.default is not None:
        group[key] = field.default
    elif field.rule == "schedule":
        del group[key]


def replaced(live: Group, saved: Group, option: Option) -> Iterator[str]:
    """Yields descriptions of the settings in which the checkpoint overrides the run's choice."""
    rules: tuple[Rule, ...] = ("optimizer",) if option == "run" else ("optimizer", "schedule", "structure")
    for name in differing(live, saved, rules):
        if name in live:
            yield f"{name} {saved.get(name, 'of the scheduler')} (the run asked for {live[name]})"
