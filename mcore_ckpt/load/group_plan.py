"""Finds the saved counterparts of the run's param groups, on all ranks together.

Each rank knows only some of a group's members: the parameters whose state the rank owns. So every rank reports in which
saved groups these parameters were, and rank 0 decides for all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mcore_ckpt import json_bounds
from mcore_ckpt.formats.locate import Locator
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.sharding.plan import PARAM, ShardKey
from mcore_ckpt.state.group_matching import LiveGroup, joined
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.param_groups import (
    SavedGroups,
    SavedPart,
    Schedules,
    find_counterparts,
    in_order,
    read_live_groups,
)
from mcore_ckpt.state.shards import ParameterState


@dataclass(frozen=True)
class PartGroups:
    """The param groups of one chained optimizer, as far as this rank knows them.

    `candidates` has the numbers of the saved groups that may be counterparts of the run's groups.
    """

    live: tuple[LiveGroup, ...]
    candidates: tuple[int, ...]

    @property
    def keys(self) -> list[str]:
        return [group.key for group in self.live]

    def to_record(self) -> Record:
        # Settings are sent as text, because records are strict JSON, and a rate may be infinite or NaN.
        changed = ({"settings": json.dumps(group.settings), "found_in": sorted(group.found_in)} for group in self.live)
        groups = [{**asdict(group), **fields} for group, fields in zip(self.live, changed, strict=True)]
        return {"groups": groups, "candidates": list(self.candidates)}

    @staticmethod
    def from_record(record: Record) -> PartGroups:
        groups = (
            LiveGroup(
                **{**each, "settings": json_bounds.loads(each["settings"]), "found_in": frozenset(each["found_in"])}
            )
            for each in record["groups"]
        )
        return PartGroups(tuple(groups), tuple(record["candidates"]))


@dataclass(frozen=True)
class GroupPlan:
    """The param groups of one load. `parts` has None for a chained optimizer whose groups stay as they are."""

    saved: SavedGroups
    schedules: Schedules
    parts: tuple[PartGroups | None, ...]

    def to_record(self) -> Record:
        return {"parts": [None if part is None else part.to_record() for part in self.parts]}

    def decide(self, records: Sequence[Record]) -> Record:
        """Finds the counterparts of all groups from the ranks' records. Only rank 0 calls this method, for all ranks.

        Raises CheckpointMismatchError: a counterpart is not clear, or schedules that must be equal differ.
        """
        outcome: Record = {"numbers": [], "of_moments": [], "kept": [], "replaced": []}
        for of_part in zip(*(record["parts"] for record in records), strict=True):
            known = [PartGroups.from_record(each) for each in of_part if each is not None]
            live = joined(each.live for each in known)
            candidates = {number for each in known for number in each.candidates}
            groups = [group for group in self.saved.groups if group.number in candidates]
            found = find_counterparts(live, groups, self.saved.members is not None, self.schedules)
            outcome["numbers"].append(dict(found.numbers))
            outcome["of_moments"].append(dict(found.of_moments))
            outcome["kept"] += found.changes.kept
            outcome["replaced"] += found.changes.replaced
        return outcome

    def complete(self, saved: Sequence[SavedPart], outcome: Record) -> tuple[SavedPart, ...]:
        """Returns `saved`, the state of each chained optimizer, with the counterparts that rank 0 has found."""
        return tuple(
            state if of_part is None else self._completed(state, of_part.keys, numbers, of_moments)
            for state, of_part, numbers, of_moments in zip(
                saved, self.parts, outcome["numbers"], outcome["of_moments"], strict=True
            )
        )

    def _completed(
        self, state: SavedPart, keys: Sequence[str], numbers: Mapping[str, int | None], of_moments: Mapping[str, int]
    ) -> SavedPart:
        groups = self.saved.groups
        return replace(
            state,
            param_groups=in_order(keys, numbers, groups),
            of_moments=in_order(keys, of_moments, groups),
            numbers=[numbers[key] for key in keys],
        )


def plan_groups(
    optimizers: Sequence[Mapping[str, Any]],
    parts: Sequence[OptimizerPart],
    keys: Sequence[Sequence[str]],
    by_part: Sequence[Sequence[ParameterState]],
    saved: Sequence[SavedPart],
    locator: Locator,
    schedules: Schedules,
) -> GroupPlan:
    """Returns the plan of the param groups, with the saved groups that this rank's parameters were in.

    `optimizers` are the saved optimizers in the form of `common.pt`. `parts` are the chained optimizers of the run. For
    each of them, `keys` has the keys of its groups, `by_part` its parameters on this rank, and `saved` its saved state.
    `locator` finds the names that parameters have in the checkpoint.
    """
    groups = SavedGroups.of(optimizers)
    found: list[PartGroups | None] = []
    for part, of_part, states, state in zip(parts, keys, by_part, saved, strict=True):
        if part.inner is None or state.starts_anew:
            found.append(None)
            continue
        candidates = groups.numbers_of(part.kind_name) if groups.members is not None else state.candidates
        names = ((s.group, s.name, _stored_name(locator, s.name)) for s in states)
        members = [(place, name, stored) for place, name, stored in names if place is not None]
        found.append(PartGroups(groups.with_members(read_live_groups(part, of_part), members, candidates), candidates))
    return GroupPlan(groups, schedules, tuple(found))


def _stored_name(locator: Locator, name: str) -> str:
    key = locator.stored_key(ShardKey(name, PARAM))
    return name if key is None else key.name
