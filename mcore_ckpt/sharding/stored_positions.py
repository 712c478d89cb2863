"""Finds data positions in `extra_state`, live or stored.

Compares the positions of replicas, and collects the positions of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore_ckpt.errors import CheckpointMismatchError, CommitError
from mcore_ckpt.sharding.data_position import MARK, ShardedPosition

Keys = tuple[Any, ...]


def is_record(value: Any) -> bool:
    """True for a stored position."""
    return isinstance(value, Mapping) and MARK in value


def positions_in(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yields each position, live or stored, in nested dicts, with the keys that lead to it."""
    if isinstance(value, ShardedPosition) or is_record(value):
        yield keys, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from positions_in(item, (*keys, key))


def name_of(keys: Sequence[Any]) -> str:
    """Returns the name of a position in messages."""
    return "extra_state" + "".join(f"[{key!r}]" for key in keys)


def digests_of(extra: Any) -> dict[str, str]:
    """Returns, by name, a digest of each live position in `extra_state`, for `check_replicas`."""
    return {name_of(keys): found.compared for keys, found in positions_in(extra) if isinstance(found, ShardedPosition)}


def check_replicas(digests: Sequence[Mapping[str, str]], dp: Sequence[int]) -> None:
    """Checks that ranks of the same data-parallel place do not have different positions.

    Args:
        digests: what `digests_of` has returned on each rank.
        dp: the data-parallel place of each rank.

    Raises CommitError, which names the position and two ranks.
    """
    first: dict[tuple[str, int], int] = {}
    for rank, found in enumerate(digests):
        for name, digest in found.items():
            other = first.setdefault((name, dp[rank]), rank)
            if digests[other][name] != digest:
                raise CommitError(
                    f"{name}: ranks {other} and {rank} are the same data-parallel rank, {dp[rank]}, but have different "
                    "data positions: give all ranks of one data-parallel place the same position"
                )


def states_at(keys: Keys, by_rank: Sequence[Mapping[str, Any] | None]) -> tuple[Any, ...]:
    """Returns the states of one stored position on all data-parallel ranks.

    Args:
        keys: the keys that lead to the position in `extra_state`.
        by_rank: the `extra_state` of each data-parallel rank; None if the rank has none.

    Raises CheckpointMismatchError if a rank has no position at these keys, or a position of another kind.
    """
    records = [_at(keys, extra) for extra in by_rank]
    kinds = [record and record["kind"] for record in records]
    for rank, kind in enumerate(kinds):
        if kind is None or kind != kinds[0]:
            raise CheckpointMismatchError(
                f"{name_of(keys)}: saved data-parallel rank {rank} has no such data position, so the positions cannot "
                "be divided anew: load the step with the saved number of data-parallel ranks"
            )
    return tuple(record["state"] for record in records)


def replaced_at(extra: Mapping[str, Any], keys: Keys, value: Any) -> dict[str, Any]:
    """Returns a copy of nested dicts with another value at the place that `keys` lead to."""
    first, *rest = keys
    return {**extra, first: replaced_at(extra[first], tuple(rest), value) if rest else value}


def _at(keys: Keys, extra: Any) -> Any:
    for key in keys:
        extra = extra.get(key) if isinstance(extra, Mapping) else None
    return extra if is_record(extra) else None
