"""Gives each rank the data positions of all saved ranks, if the data-parallel size differs from the saved one.

A rank reads the `extra_state` only of the saved ranks that had the rank's own pipeline, tensor and context place. In a
step that `mcore-ckpt reshard` has written, each rank's file has all positions, so the rank reads no other file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.sharding.data_position import ShardedPosition, of_record
from mcore_ckpt.sharding.stored_positions import name_of, positions_in, replaced_at, states_at

Place = tuple[int, int, int, int]
Extra = Mapping[str, Any]


def with_positions(
    extra: dict[str, Any], place: Place, saved: Topology, dp: int, size: int, read: Callable[[Place], Extra | None]
) -> dict[str, Any]:
    """Returns a rank's `extra_state` with `ShardedPosition`s in place of the stored positions.

    Args:
        extra: the `extra_state` that the rank loads.
        place: the saved place (pp, tp, cp, dp) that `extra` is from.
        saved: the saved layout.
        dp, size: the loading rank's data-parallel place, and the data-parallel size of the load.
        read: returns the `extra_state` of another saved place; None if no `extra_state` was saved there.

    Raises:
        CheckpointMismatchError: a saved data-parallel rank lacks a position that `extra` has.
        CheckpointCorruptError: a position is of an unknown kind, or a file is missing or damaged.
    """
    positions = {keys: _opened(record, keys, dp, size) for keys, record in positions_in(extra)}
    if saved.dp != size and any(position.states is None for position in positions.values()):
        by_rank = [extra if rank == place[3] else read((*place[:3], rank)) for rank in range(saved.dp)]
        positions = {
            keys: position if position.states is not None else replace(position, states=states_at(keys, by_rank))
            for keys, position in positions.items()
        }
    for keys, position in positions.items():
        extra = replaced_at(extra, keys, position)
    return extra


def _opened(record: Mapping[str, Any], keys: Sequence[Any], dp: int, size: int) -> ShardedPosition:
    try:
        return of_record(record, name_of(keys), dp, size)
    except ValueError as error:
        raise CheckpointCorruptError(str(error)) from None
