"""Reads the param groups of optimizers, finds their saved counterparts, and writes the saved values back.

`group_matching.py` chooses the counterparts. `group_fields.py` decides for each field whether the saved value or the
run's value counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.sharding.name_lists import NameLists
from mcore_ckpt.state.group_fields import Group, Option, is_of_experts, write_group
from mcore_ckpt.state.group_matching import (
    LiveGroup,
    SavedGroup,
    check_equal,
    kept,
    live_groups,
    match,
    replacements,
    settings_of_moments,
)
from mcore_ckpt.state.optimizers.part import STEP, OptimizerPart
from mcore_ckpt.state.plain import to_plain

logger = logging.getLogger(__name__)

# The kind of a part without parameters.
_NO_OPTIMIZER = type(None).__name__


def read_param_groups(part: OptimizerPart) -> list[dict[str, Any]]:
    """Returns the fields of all groups, except parameters, step, and fields that only this kind of optimizer has.

    All values are plain.

    Raises UnsupportedError if a field has no plain value.
    """
    return [
        {key: to_plain(value, f"param_groups[{i}][{key!r}]") for key, value in group.items()}
        for i, group in enumerate(_fields(part))
    ]


def read_live_groups(part: OptimizerPart, keys: Sequence[str] = ()) -> list[LiveGroup]:
    """Describes the groups of a part, so that they can be told apart. Reads no tensor.

    `keys` are the groups' keys if they are known already.
    """
    found = live_groups(_fields(part))
    if len(keys) != len(found):
        return found
    return [replace(group, key=key) for group, key in zip(found, keys, strict=True)]


def group_keys(parts: Sequence[OptimizerPart], known: Sequence[Sequence[str]] = ()) -> tuple[tuple[str, ...], ...]:
    """Returns the keys that all ranks use for the groups of each part.

    Ranks keep their first keys (`known`), because a failed load may have changed the groups of some ranks. If groups
    were added to a part, its keys are read anew.
    """
    before = known if len(known) == len(parts) else [()] * len(parts)
    return tuple(
        tuple(keys) if len(keys) == len(part.param_groups) else tuple(group.key for group in read_live_groups(part))
        for part, keys in zip(parts, before, strict=True)
    )


def _fields(part: OptimizerPart) -> list[dict[str, Any]]:
    left = ("params", STEP, *part.own_fields)
    return [{key: value for key, value in group.items() if key not in left} for group in part.param_groups]


@dataclass(frozen=True)
class SavedPart:
    """The saved state of one chained optimizer without its tensors.

    Attributes:
        param_groups: for each live group, its saved counterpart, or None if the live group keeps the run's values. The
            whole sequence is None if all groups stay as they are.
        step: the number of steps. None if it is unknown.
        grad_scaler: the gradient scaler's state, or None.
        starts_anew: whether the part takes over only main parameters, because the part needs other moments than the
            checkpoint has.
        candidates: the numbers of the saved groups that may be counterparts (`SavedGroups`).
        of_moments: for each live group that keeps the run's values, the saved group whose optimizer settings count
            nevertheless, or None.
        numbers: for each live group, the number of its saved counterpart, or None.
    """

    param_groups: Sequence[Group | None] | None
    step: float | int | None
    grad_scaler: Mapping[str, Any] | None
    starts_anew: bool = False
    candidates: tuple[int, ...] = ()
    of_moments: Sequence[Group | None] = ()
    numbers: Sequence[int | None] = ()


# -- the groups of a checkpoint ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedGroups:
    """The param groups of all chained optimizers of a checkpoint, numbered together.

    Attributes:
        kinds: the kind of each group's optimizer.
        members: finds the saved groups that had a given parameter as a member; None if the checkpoint does not store
            members.
    """

    groups: tuple[SavedGroup, ...]
    kinds: tuple[str, ...]
    members: NameLists | None

    @staticmethod
    def of(optimizers: Sequence[Mapping[str, Any]]) -> SavedGroups:
        """Returns the groups of `common.pt`. Raises CheckpointCorruptError if the lists of members are malformed."""
        fields = [group for state in optimizers for group in state["param_groups"]]
        kinds = [state["kind"] for state in optimizers for _ in state["param_groups"]]
        groups = tuple(SavedGroup(number, group) for number, group in enumerate(fields))
        if not all("members" in state for state in optimizers if state["param_groups"]):
            return SavedGroups(groups, tuple(kinds), None)
        try:
            lists = [list(names) for state in optimizers for names in state.get("members", ())]
            if len(lists) != len(groups):
                raise ValueError(f"{len(lists)} lists for {len(groups)} groups")
            return SavedGroups(groups, tuple(kinds), NameLists(lists))
        except (TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"{file_names.COMMON_FILE}: members of param groups: {error}") from None

    def numbers_of(self, kind: str) -> tuple[int, ...]:
        """Returns the numbers of the groups that belong to one kind of optimizer."""
        return tuple(number for number, other in enumerate(self.kinds) if other == kind)

    def with_members(
        self, groups: Sequence[LiveGroup], members: Iterable[tuple[int, str, str]], candidates: Sequence[int]
    ) -> tuple[LiveGroup, ...]:
        """Returns the live groups, completed with what this rank knows about their members.

        Each group gets the name of one of its members, and the saved groups that had some of its members.
        `members` has, for each parameter, the place of its group in `groups`, its name in this run, and its name in the
        checkpoint. `candidates` are the saved groups that may be counterparts.
        """
        found: list[set[int]] = [set() for _ in groups]
        names = ["" for _ in groups]
        for place, name, stored in members:
            names[place] = names[place] or name
            if self.members is not None:
                found[place] |= self.members.lists_with(stored)
        return tuple(
            replace(group, found_in=frozenset(numbers.intersection(candidates)), has_members=bool(name), member=name)
            for group, numbers, name in zip(groups, found, names, strict=True)
        )


@dataclass(frozen=True)
class Schedules:
    """The choice between the run's schedule and the checkpoint's.

    `of_run` and `of_checkpoint` have the schedulers' values for fields that a group lacks.
    """

    option: Option
    of_run: Group
    of_checkpoint: Group


@dataclass(frozen=True)
class GroupChanges:
    """The messages to the user about the groups of a load.

    `kept` describes the groups that keep the run's rates, because the checkpoint has no rates for them. `replaced`
    describes the settings in which the checkpoint overrides the run's choice.
    """

    kept: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    def warn(self, where: Any) -> None:
        """Logs the messages. Only one rank calls this method."""
        if self.kept:
            logger.warning(
                "%s: has no param group for some of this run's groups, so they keep the run's rates: "
                "the param group %s",
                where,
                "; the param group ".join(self.kept),
            )
        if self.replaced:
            logger.warning(
                "%s: the checkpoint's values count for %s. The documentation on resuming, section 'Param groups', "
                "lists whose values count",
                where,
                "; ".join(self.replaced),
            )


NO_CHANGES = GroupChanges()


@dataclass(frozen=True)
class GroupMatch:
    """The counterparts of one optimizer's groups.

    Attributes:
        numbers: for each live group's key, the number of the saved group; None if the live group keeps the run's rates.
        of_moments: for the keys of live groups that keep the run's rates, the number of the saved group whose optimizer
            settings count nevertheless.
    """

    numbers: Mapping[str, int | None]
    of_moments: Mapping[str, int]
    changes: GroupChanges


def find_counterparts(
    live: Sequence[LiveGroup], saved: Sequence[SavedGroup], by_members: bool, schedules: Schedules
) -> GroupMatch:
    """Finds the counterparts of one optimizer's groups.

    Raises CheckpointMismatchError: the choice of a counterpart is open, or schedules that must be equal differ.
    """
    numbers = match(live, saved, by_members)
    by_number = {group.number: group for group in saved}
    if schedules.option == "equal":
        check_equal(live, by_number, numbers, schedules.of_run, schedules.of_checkpoint)
    of_moments = settings_of_moments(live, by_number, numbers)
    texts = replacements(live, by_number, numbers, schedules.option)
    texts += replacements(live, by_number, of_moments, "run")
    return GroupMatch(numbers, of_moments, GroupChanges(tuple(kept(live, by_number, numbers)), tuple(texts)))


def match_groups(
    part: OptimizerPart, saved: Sequence[Group], schedules: Schedules
) -> tuple[list[int | None], GroupChanges]:
    """Finds the counterparts of a part's groups among saved groups whose members are unknown (foreign checkpoints).

    Raises CheckpointMismatchError as `find_counterparts` does.
    """
    groups = [SavedGroup(number, fields) for number, fields in enumerate(saved)]
    live = [replace(group, has_members=True) for group in read_live_groups(part)]
    found = find_counterparts(live, groups, False, schedules)
    return [found.numbers[group.key] for group in live], found.changes


def in_order(keys: Iterable[str], numbers: Mapping[str, int | None], saved: Sequence[SavedGroup]) -> list[Group | None]:
    """Returns the fields of each group's counterpart; None for a group without counterpart.

    `keys` are the keys of a part's groups in the order of this rank. The result has the same order.
    """
    found = map(numbers.get, keys)
    return [None if number is None else saved[number].fields for number in found]


# -- the optimizers of a checkpoint ------------------------------------------------------------------------------------


def match_parts(
    parts: Sequence[OptimizerPart], saved: Sequence[Mapping[str, Any]], reset_moments: bool = False
) -> tuple[SavedPart, ...]:
    """Finds the saved state of each part, even if the saved optimizers were chained in another way.

    With expert parallelism, experts have their own optimizer. Without expert parallelism, experts are in the groups of
    the dense optimizer (`_get_param_groups`, 0.16.1). The counterparts of groups are found later, because the search
    needs the members on all ranks.

    `saved` has the saved parts in the form of `common.pt`. With `reset_moments`, a part of a kind that was not saved
    may start without moments.

    Raises CheckpointMismatchError: a part has no saved counterpart, or several different counterparts.
    """
    numbers = _numbers(saved)
    known = [state for state in saved if state["kind"] != _NO_OPTIMIZER]
    _check_scalers(parts, known)
    scaler = known[0]["grad_scaler"] if known else None
    found: list[SavedPart] = []
    for place, part in enumerate(parts):
        # Only parts of the same kind can take over each other's state.
        alike = [each for each in parts if each.kind_name == part.kind_name]
        same = [state for state in known if state["kind"] == part.kind_name]
        if part.inner is None:
            found.append(SavedPart((), None, scaler))
        elif not same:
            _check_may_start_anew(part, known, reset_moments)
            found.append(SavedPart(None, None, scaler, starts_anew=True))
        else:
            if len(alike) == len(same) and all(map(_is_of_the_same, alike, same)):
                same = [same[sum(each.kind_name == part.kind_name for each in parts[:place])]]
            candidates = tuple(number for state in same for number in numbers[id(state)])
            found.append(SavedPart((), _step_of(same), same[0]["grad_scaler"], candidates=candidates))
    return tuple(found)


def _numbers(saved: Sequence[Mapping[str, Any]]) -> dict[int, range]:
    """Returns the numbers of each saved part's groups (`SavedGroups`), by `id` of the part."""
    found: dict[int, range] = {}
    first = 0
    for state in saved:
        found[id(state)] = range(first, first + len(state["param_groups"]))
        first += len(state["param_groups"])
    return found


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
    """Returns True if a part and a saved part have the same kinds of groups (experts, other parameters).

    Returns True, too, if `part` has no groups.
    """
    here, there = (set(map(is_of_experts, groups)) for groups in (part.param_groups, saved["param_groups"]))
    return not here or here == there


def _check_scalers(parts: Sequence[OptimizerPart], saved: Sequence[Mapping[str, Any]]) -> None:
    for part in (part for part in parts if part.inner is not None):
        has_scaler = getattr(part.megatron, "grad_scaler", None) is not None
        if any(has_scaler != (state["grad_scaler"] is not None) for state in saved):
            wanted, found = ("a grad scaler", "none") if has_scaler else ("no grad scaler", "one")
            raise CheckpointMismatchError(f"optimizer: wanted {wanted}, found {found} in the checkpoint")


def _step_of(saved: Sequence[Mapping[str, Any]]) -> float | int | None:
    steps = {state["step"] for state in saved if state["step"] is not None}
    if len(steps) > 1:
        raise CheckpointMismatchError(
            f"the checkpoint's optimizers have done different numbers of steps, {sorted(steps)}, but this run "
            "has one optimizer for all their parameters: load the checkpoint with expert parallelism, as it was saved"
        )
    return steps.pop() if steps else None


def write_param_groups(part: OptimizerPart, saved: Sequence[Group | None], option: Option) -> list[dict[str, Any]]:
    """Sets the fields of each group from the saved group at the same position.

    Returns the groups whose rates the LR scheduler has to set, because the checkpoint has no rates for them.
    """
    for group, values in zip(part.param_groups, saved, strict=True):
        if values is not None:
            write_group(group, values, option, part.own_fields)
    pairs = zip(part.param_groups, saved, strict=True)
    return [group for group, values in pairs if values is None or "lr" not in values]
