"""Converts the state of a Megatron-Energon loader (7.4) to a data position, and restores a loader from a position.

The state is stored as plain values with the names of Energon's classes. No pickle is made or read.

Example:
    >>> from mcore_ckpt.integrations import energon
    >>> manager.save(100, extra_state={"data": energon.position_of(loader)})  # doctest: +SKIP
    >>> energon.restore(loader, manager.load().extra_state["data"])  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from mcore_ckpt import ShardedPosition
from mcore_ckpt.errors import CheckpointMismatchError

# The key under which a stored value names its class, and the modules of all classes that a worker's state contains.
_CLASS = "energon.class"
_LOADER, _LOADER_STATE = "megatron.energon.savable_loader", "SavableDataLoaderState"
_MODULES = {
    "SavableDatasetCheckpoint": _LOADER,
    "SavableDatasetState": _LOADER,
    "SystemRngState": "megatron.energon.rng",
    "FlexState": "megatron.energon.state",
    "SliceState": "megatron.energon.flavors.webdataset.sample_loader",
}


def position_of(loader: Any) -> ShardedPosition:
    """Returns the position of a savable loader (`get_savable_loader`) on this rank.

    If the position contains a value that `extra_state` cannot hold, `save` raises an error that names the value.
    """
    state = loader.save_state_rank()
    return ShardedPosition.of_energon([], 0, None) if state is None else position_of_state(state)


def is_state(value: Any) -> bool:
    """True if a value is a state that `save_state_rank` has returned for a loader that has begun."""
    return (type(value).__module__, type(value).__name__) == (_LOADER, _LOADER_STATE)


def position_of_state(state: Any) -> ShardedPosition:
    """Returns the position in a state that `save_state_rank` returned. The state must not be None."""
    # The state of a worker process is a SavableDatasetCheckpoint. Without workers, the only state is the FlexState of
    # the trainer's process.
    has_workers = [type(worker).__name__ for worker in state.worker_states] != ["FlexState"]
    workers = [_plain(worker) for worker in state.worker_states]
    return ShardedPosition.of_energon(workers, state.next_worker_id, state.micro_batch_size, has_workers)


def state_of(position: ShardedPosition, rank: int | None = None, size: int | None = None) -> Any:
    """Returns what `restore_state_rank` takes: Energon's object, or None if the saved loader had not begun.

    Args:
        position, rank, size: as in `restore`.

    Raises CheckpointMismatchError: the saved states of workers cannot be divided among `size` ranks.
    """
    return _state(position.for_rank(rank, size))


def restore(loader: Any, position: ShardedPosition, rank: int | None = None, size: int | None = None) -> None:
    """Restores a loader that has not begun.

    The loader's dataset must be made with the same parameters as the dataset of the saved loader.

    Args:
        loader: the loader.
        position: the position, from the `extra_state` that `load` returns.
        rank, size: this rank's number in the data-parallel group, and the group's size. None: the numbers that `load`
            used.

    Raises:
        CheckpointMismatchError: the saved states of workers cannot be divided among `size` ranks, or the loader's
            number of workers is not the number of states for this rank.
    """
    state = position.for_rank(rank, size)
    wanted = len(state["workers"]) if state["has_workers"] else 0
    if state["workers"] and loader.num_workers != wanted:
        raise CheckpointMismatchError(
            f"{position.name} (energon): has the states of {wanted} workers for this rank, but the loader has "
            f"{loader.num_workers} workers: make the loader's WorkerConfig with {wanted} workers"
        )
    loader.restore_state_rank(_state(state))


def _state(divided: Mapping[str, Any]) -> Any:
    if not divided["workers"]:
        return None
    return getattr(import_module(_LOADER), _LOADER_STATE)(
        worker_states=[_object(worker) for worker in divided["workers"]],
        next_worker_id=divided["next_worker"],
        micro_batch_size=divided["micro_batch_size"],
    )


def _plain(value: Any) -> Any:
    kind = type(value)
    if _MODULES.get(kind.__name__) == kind.__module__:
        if isinstance(value, dict):
            return {_CLASS: kind.__name__, "items": {key: _plain(item) for key, item in value.items()}}
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_CLASS: kind.__name__, **fields}
    if kind is dict:
        return {key: _plain(item) for key, item in value.items()}
    return kind(map(_plain, value)) if kind in (list, tuple) else value


def _object(value: Any) -> Any:
    kind = type(value)
    if kind is dict and _CLASS in value:
        name = value[_CLASS]
        if name not in _MODULES:
            raise CheckpointMismatchError(
                f"the saved state of an Energon loader has a {name}, which this version of mcore_ckpt does not know: "
                "use the version that saved it, or a newer one"
            )
        cls = getattr(import_module(_MODULES[name]), name)
        if "items" in value:
            return cls({key: _object(item) for key, item in value["items"].items()})
        return cls(**{key: _object(item) for key, item in value.items() if key != _CLASS})
    if kind is dict:
        return {key: _object(item) for key, item in value.items()}
    return kind(map(_object, value)) if kind in (list, tuple) else value
