"""Says which parameters are in which param groups: each rank for its own, rank 0 for all.

Every rank lists its groups by what tells them apart, because ranks may have them in another order (ms-swift), and with
other members. The list travels as the names of a file's tensors do: once, and from then on as a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mcore_ckpt import json_bounds
from mcore_ckpt.sharding.name_lists import fold, join
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.param_groups import group_keys
from mcore_ckpt.state.shards import ParameterState
from mcore_ckpt.state.trainer import Trainer

# Begins the line of a group. No entry of names begins with it.
_GROUP = "\t"
# A chained optimizer's number, and the key of a group in it.
GroupId = tuple[int, str]


@dataclass(frozen=True)
class GroupList:
    """This rank's groups and their members, as it sends them to rank 0.

    Attributes:
        names: the lines: for each group one with its optimizer and key, then the entries of its members.
    """

    names: tuple[str, ...] = ()

    @cached_property
    def holds(self) -> str:
        """A digest of the lines; empty if there are none."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:32] if self.names else ""


NO_GROUPS = GroupList()


@dataclass(frozen=True, eq=False)
class GroupMembers:
    """The names of the parameters in each group on this rank, by optimizer and number of the group."""

    names: tuple[Mapping[int, Sequence[str]], ...]

    @staticmethod
    def of(by_part: Sequence[Sequence[ParameterState]]) -> GroupMembers:
        """Takes the names from the states of each chained optimizer's parameters."""
        found: list[dict[int, list[str]]] = []
        for states in by_part:
            members: dict[int, list[str]] = {}
            for state in states:
                if state.group is not None:
                    members.setdefault(state.group, []).append(state.name)
            found.append(members)
        return GroupMembers(tuple(found))

    @cached_property
    def _folded(self) -> list[dict[int, list[str]]]:
        return [{number: fold(names) for number, names in members.items()} for members in self.names]

    def listed(self, keys: Sequence[Sequence[str]]) -> GroupList:
        """Returns the list for rank 0. `keys` has the key of each group, by optimizer."""
        lines: list[str] = []
        for part, (members, of_part) in enumerate(zip(self._folded, keys, strict=True)):
            for number, entries in sorted(members.items()):
                lines += [f"{_GROUP}{part}{_GROUP}{of_part[number]}", *entries]
        return GroupList(tuple(lines))


def keys_to_save(trainer: Trainer) -> tuple[tuple[str, ...], ...]:
    """Returns the keys of each chained optimizer's groups; none if the optimizer is not saved."""
    if "optimizer" not in trainer.config.save_contents:
        return ()
    return group_keys(optimizer_parts(trainer.optimizer), trainer.group_keys)


def join_groups(lists: Iterable[Sequence[str]]) -> dict[GroupId, list[str]]:
    """Joins the lines of all ranks. Returns the entries of each group's members."""
    found: dict[GroupId, list[list[str]]] = {}
    for lines in lists:
        entries: list[str] = []
        for line in lines:
            if line.startswith(_GROUP):
                _, part, key = line.split(_GROUP)
                entries = []
                found.setdefault((int(part), key), []).append(entries)
            else:
                entries.append(line)
    return {group: join(every) for group, every in found.items()}


def add_members(
    optimizers: Sequence[dict[str, Any]], keys: Sequence[Sequence[str]], members: Mapping[GroupId, list[str]]
) -> None:
    """Writes the members beside the param groups of `common.pt`, which have these keys, in the same order.

    A group that rank 0 does not have is added with what its ranks say of it. It has no rates, which follow from the
    scheduler.
    """
    for part, (state, of_part) in enumerate(zip(optimizers, keys, strict=True)):
        others = [key for number, key in sorted(members) if number == part and key not in of_part]
        state["param_groups"] = [*state["param_groups"], *map(_fields_of, others)]
        state["members"] = [members.get((part, key), []) for key in (*of_part, *others)]


def _fields_of(key: str) -> dict[str, Any]:
    settings, marks = json_bounds.loads(key[key.index("[") :])
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return {**tuples, **marks}
