"""Converts random states that megatron's trainer or verl stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError


def random_states_of(stored: Any, dp: int, where: str) -> dict[str, Any]:
    """Returns the random states of one data-parallel rank, in the form in which `state.rng.read_rng` returns them.

    Args:
        stored: the states, or a list of them. The list has one entry, unless `data_parallel_random_init` gave each
            data-parallel rank its own seed.

    Raises:
        CheckpointMismatchError: one of the states is missing.
        CheckpointCorruptError: one of the states does not have the form that a generator returns.
    """
    state = stored
    if isinstance(stored, (list, tuple)):
        number = dp if len(stored) > 1 else 0
        state = stored[number] if number < len(stored) else None
    wanted = ("random_rng_state", "np_rng_state", "torch_rng_state", "rng_tracker_states")
    missing = [name for name in wanted if not isinstance(state, Mapping) or name not in state]
    if missing:
        raise CheckpointMismatchError(
            f"{where}: has no {', '.join(missing)}: leave 'extra' out of load_contents to start with fresh ones"
        )
    try:
        return _plain(state)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointCorruptError(
            f"{where}: the random states are damaged ({error}): leave 'extra' out of load_contents to start with fresh "
            "ones"
        ) from None


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    name, keys, position, has_gauss, cached = state["np_rng_state"]
    return {
        "python": state["random_rng_state"],
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": state["torch_rng_state"],
        "device": state.get("cuda_rng_state"),
        "megatron": dict(state["rng_tracker_states"]),
    }
