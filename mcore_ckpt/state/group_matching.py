"""Finds the saved counterpart of each live param group, by the names of its members or else by its settings.

The module never guesses. Megatron sorts groups by their settings (`_get_param_groups`, 0.16 to 0.19), so a group's
place in the list means nothing. Groups with the same parameters are counterparts, even if their settings differ. If
groups were divided or merged, or no names are stored, settings decide. If settings leave the choice open, no
counterpart is chosen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.state.group_fields import (
    Group,
    Option,
    Rule,
    are_same,
    differing,
    field_of,
    is_of_experts,
    marks,
    replaced,
    settings,
)

_SCHEDULE: tuple[Rule, ...] = ("structure", "schedule")
_ALL: tuple[Rule, ...] = (*_SCHEDULE, "optimizer")
_ALL_AND_RATES: tuple[Rule, ...] = (*_ALL, "rate")


@dataclass(frozen=True)
class LiveGroup:
    """A param group of the run.

    Attributes:
        key: the key that all ranks use for the group.
        settings: the group's settings (`group_fields.settings`).
        is_of_experts: whether the group's parameters are experts, which megatron keeps in separate groups.
        found_in: the numbers of the saved groups that have some of the group's members.
        has_members: whether the group has members on any rank. A group without members has no effect.
        member: the name of one of the group's members; empty if no member is known.
    """

    key: str
    settings: Group
    is_of_experts: bool
    found_in: frozenset[int] = frozenset()
    has_members: bool = False
    member: str = ""

    def describe(self) -> str:
        """Describes the group by one of its members and by the fields that a user can set."""
        whose = f"of {self.member}" if self.member else "without known members"
        return f"{whose} ({_shown(self.settings)})"


@dataclass(frozen=True)
class SavedGroup:
    """A param group of the checkpoint: its number among all groups, and its fields, as they are stored."""

    number: int
    fields: Group

    @cached_property
    def settings(self) -> dict[str, Any]:
        return settings(self.fields)

    @property
    def is_of_experts(self) -> bool:
        return is_of_experts(self.fields)


def _shown(known: Group) -> str:
    shown = [name for name in sorted(known) if field_of(name).rule in _SCHEDULE]
    return (
        ", ".join(f"{name} {known[name]}" for name in shown if known[name] != field_of(name).default) or "no own values"
    )


def live_groups(groups: Iterable[Group]) -> list[LiveGroup]:
    """Describes live groups without their members.

    All ranks give a group the same key, although the ranks may list the groups in different orders (ms-swift).
    """
    found: list[LiveGroup] = []
    seen: Counter[str] = Counter()
    for group in groups:
        text = group_key(group)
        found.append(LiveGroup(f"{seen[text]}{text}", settings(group), is_of_experts(group)))
        seen[text] += 1
    return found


def group_key(group: Group) -> str:
    """Returns a text that differs between groups with different settings, and does not change from step to step."""
    known = {name: value for name, value in settings(group).items() if field_of(name).rule != "rate"}
    return json.dumps([known, marks(group)], sort_keys=True)


def match(live: Sequence[LiveGroup], saved: Sequence[SavedGroup], by_members: bool) -> dict[str, int | None]:
    """Returns, by key of the live group, the number of its counterpart; None for a group that is new in the run.

    Args:
        live: the run's groups of one optimizer, from all ranks.
        saved: the groups of the checkpoint that may be counterparts.
        by_members: whether the checkpoint stores which parameters were in its groups.

    Raises CheckpointMismatchError: the checkpoint does not store members, and the settings leave the choice open.
    """
    claims = Counter(number for group in live for number in group.found_in)
    found: dict[str, int | None] = {}
    rest: list[LiveGroup] = []
    for group in live:
        if len(group.found_in) == 1 and claims[min(group.found_in)] == 1:
            found[group.key] = min(group.found_in)
        else:
            rest.append(group)
    if by_members:
        choices = _by_settings([group for group in rest if group.has_members], saved, within_members=True)
        # A group without members on any rank has no effect, so it must not compete with other groups for a counterpart.
        for group in (group for group in rest if not group.has_members):
            choices |= _by_settings([group], saved, within_members=False)
        return found | {key: choice.number for key, choice in choices.items()}
    choices = _by_settings(rest, saved, within_members=False)
    _refuse_open(rest, saved, choices)
    return found | {key: choice.number for key, choice in choices.items()}


@dataclass(frozen=True)
class _Choice:
    """The saved group that is chosen for a live group.

    Attributes:
        number: the number of the saved group; None if no group is chosen.
        is_exact: whether both groups have the same schedule. Their optimizer settings may differ, because the
            checkpoint's optimizer settings always count.
        open: the saved groups between which the settings cannot decide; empty if a group is chosen.
    """

    number: int | None = None
    is_exact: bool = False
    open: tuple[SavedGroup, ...] = ()


def _by_settings(live: Sequence[LiveGroup], saved: Sequence[SavedGroup], within_members: bool) -> dict[str, _Choice]:
    first = {
        group.key: _choose(group, [each for each in saved if not within_members or each.number in group.found_in])
        for group in live
    }
    by_number = {each.number: each for each in saved}
    return {group.key: _without_rivals(group, first, live, by_number) for group in live}


def _choose(group: LiveGroup, candidates: Sequence[SavedGroup]) -> _Choice:
    alike = [each for each in candidates if not differing(group.settings, each.settings, ("structure",))]
    exact = [each for each in alike if not differing(group.settings, each.settings, _ALL)]
    left = exact or alike
    if not _all_equal(left):
        # Compare all fields in which the candidates differ, even their rates at the save.
        rules = [name for name in _names_differing(left) if field_of(name).rule in _ALL_AND_RATES]
        same = [
            each for each in left if not {*rules}.intersection(differing(group.settings, each.settings, _ALL_AND_RATES))
        ]
        left_by_kind = [each for each in exact if each.is_of_experts == group.is_of_experts]
        narrowed = same or left_by_kind
        if not narrowed or not _all_equal(narrowed):
            return _Choice(open=tuple(left))
        left = narrowed
    if not left:
        return _Choice()
    # Prefer a saved group of the live group's kind (experts or other parameters). The other kind is possible too,
    # because without expert parallelism megatron keeps experts in the groups of other parameters.
    chosen = min(left, key=lambda each: (each.is_of_experts != group.is_of_experts, each.number))
    return _Choice(chosen.number, not differing(group.settings, chosen.settings, _SCHEDULE))


def _without_rivals(
    group: LiveGroup, choices: Mapping[str, _Choice], live: Sequence[LiveGroup], saved: Mapping[int, SavedGroup]
) -> _Choice:
    """Returns the choice of a group.

    The choice has no number if another live group has an equal or better claim to the saved group.
    """
    own = choices[group.key]
    if own.number is None or own.is_exact:
        return own
    mine = saved[own.number]
    rivals = [
        choices[each.key]
        for each in live
        if (number := choices[each.key].number) is not None
        and _all_equal([saved[number], mine])
        and differing(each.settings, group.settings, _ALL)
    ]
    if not rivals:
        return own
    return _Choice() if any(rival.is_exact for rival in rivals) else _Choice(open=(mine,))


def _refuse_open(live: Sequence[LiveGroup], saved: Sequence[SavedGroup], choices: Mapping[str, _Choice]) -> None:
    taken = [each for each in saved if each.number in {choice.number for choice in choices.values()}]
    unclaimed = tuple(each for each in saved if not any(_all_equal([each, other]) for other in taken))
    for group in live:
        choice = choices[group.key]
        # A group is new only if all saved groups are counterparts of other groups.
        if choice.number is None and (unclaimed or not saved):
            raise CheckpointMismatchError(_unmatched(group, saved, choice.open))


def _unmatched(group: LiveGroup, saved: Sequence[SavedGroup], left: Sequence[SavedGroup]) -> str:
    names = _names_differing(left)
    return (
        f"the param group {group.describe()} has {len(left)} counterparts among the {len(saved)} saved groups "
        f"({'; '.join(_shown(each.settings) for each in saved)})"
        f"{f', which differ in {names}' if names else ''}: use the weight-decay and learning-rate groups of the run "
        "that saved the checkpoint (it does not say which parameters were in which group; new checkpoints do)"
    )


def settings_of_moments(
    live: Sequence[LiveGroup], saved: Mapping[int, SavedGroup], found: Mapping[str, int | None]
) -> dict[str, int]:
    """Returns the saved groups whose optimizer settings count for live groups that have no counterpart.

    The result has the number of the saved group, by key of the live group. The moments of the live group's members were
    made with the settings of this saved group. A live group is left out if its members come from saved groups with
    different optimizer settings.
    """
    return {
        group.key: min(group.found_in)
        for group in live
        if found[group.key] is None and group.found_in and not _names_differing(_origins(group, saved), ("optimizer",))
    }


def _origins(group: LiveGroup, saved: Mapping[int, SavedGroup]) -> list[SavedGroup]:
    return [saved[number] for number in sorted(group.found_in)]


def _all_equal(groups: Sequence[SavedGroup]) -> bool:
    return not _names_differing(groups)


def _names_differing(groups: Sequence[SavedGroup], rules: tuple[Rule, ...] = _ALL_AND_RATES) -> list[str]:
    every = {name for each in groups for name in each.settings if field_of(name).rule in rules}
    first = groups[0].settings if groups else {}
    return sorted(
        name for name in every if not all(are_same(first.get(name), each.settings.get(name)) for each in groups)
    )


# -- messages for the user, and checks for equality -------------------------------------------------------------------


def check_equal(
    live: Sequence[LiveGroup],
    saved: Mapping[int, SavedGroup],
    found: Mapping[str, int | None],
    of_run: Group,
    of_checkpoint: Group,
) -> None:
    """Refuses groups whose schedule has changed, as megatron's scheduler does (`_check_and_set`, 0.16).

    `of_run` and `of_checkpoint` have the two schedulers' values. These values count for groups that lack a field.
    """
    for group, other in _pairs(live, saved, found):
        one, two = {**of_run, **group.settings}, {**of_checkpoint, **other.settings}
        for name in differing(one, two, _SCHEDULE):
            if one.get(name) != one.get(name):  # NaN: the run has chosen no value
                continue
            raise CheckpointMismatchError(
                f"the param group {group.describe()}: {name}: wanted {one.get(name)}, found {two.get(name)}: use the "
                "same schedule, or set use_checkpoint_opt_param_scheduler or override_opt_param_scheduler"
            )


def replacements(
    live: Sequence[LiveGroup], saved: Mapping[int, SavedGroup], found: Mapping[str, int | None], option: Option
) -> list[str]:
    """Describes, for each group, the settings in which the checkpoint overrides the run's choice."""
    pairs = (
        (group, list(replaced(group.settings, other.settings, option))) for group, other in _pairs(live, saved, found)
    )
    return [f"the param group {group.describe()}: {', '.join(texts)}" for group, texts in pairs if texts]


def kept(live: Sequence[LiveGroup], saved: Mapping[int, SavedGroup], found: Mapping[str, int | None]) -> list[str]:
    """Describes the groups that have members and keep the run's rates, and tells why."""
    left = (group for group in live if group.has_members and found[group.key] is None)
    return [f"{group.describe()}{_why_kept(group, _origins(group, saved))}" for group in left]


def _why_kept(group: LiveGroup, origins: Sequence[SavedGroup]) -> str:
    if not origins:
        return ""
    names = {name for each in origins for name in differing(group.settings, each.settings, _SCHEDULE)}
    differ = f" with another {', '.join(sorted(names))}" if names else " that its settings do not tell apart"
    return f", whose parameters were in {len(origins)} group{'s' * (len(origins) > 1)}{differ}"


def _pairs(
    live: Sequence[LiveGroup], saved: Mapping[int, SavedGroup], found: Mapping[str, int | None]
) -> Iterator[tuple[LiveGroup, SavedGroup]]:
    for group in live:
        number = found.get(group.key)
        if number is not None:
            yield group, saved[number]


def joined(by_rank: Iterable[Sequence[LiveGroup]]) -> list[LiveGroup]:
    """Joins the ranks' descriptions of the same groups, which have different members on each rank."""
    found: dict[str, LiveGroup] = {}
    for group in (group for groups in by_rank for group in groups):
        known = found.setdefault(group.key, group)
        found[group.key] = replace(
            known,
            found_in=known.found_in | group.found_in,
            has_members=known.has_members or group.has_members,
            member=min(filter(None, (known.member, group.member)), default=""),
        )
    return list(found.values())
