"""The state of Megatron-Energon's loader as a data position, with stand-ins for its classes.

With version 7.4.1 itself, real loaders have gone on with the same samples on the same ranks, and four loaders with one
worker each on two ranks with two workers.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest

from mcore_ckpt import ShardedPosition
from mcore_ckpt.checkpoint.plain_files import pickle_plain
from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.integrations import energon
from mcore_ckpt.sharding.data_position import of_record
from mcore_ckpt.state.typed_values import from_stored, to_stored
from tests.support.energon_states import energon_classes, state_of_rank


@pytest.fixture(autouse=True)
def classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Energon's classes, by name."""
    return energon_classes(monkeypatch)


@dataclass
class Loader:
    """As much of a SavableDataLoader as is used."""

    num_workers: int
    state: Any = None

    def save_state_rank(self) -> Any:
        return self.state

    def restore_state_rank(self, state: Any) -> None:
        self.state = state


def loader_of(classes: dict[str, Any], rank: int, workers: int) -> Loader:
    return Loader(workers, state_of_rank(classes, rank, workers))


def stored(loader: Loader) -> dict[str, Any]:
    """The position as it is on disk."""
    written = to_stored({"data": energon.position_of(loader)}, "extra_state")
    pickle_plain(written)  # refuses classes
    record: dict[str, Any] = from_stored(written)["data"]
    return record


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_ranks_get_their_own_back(workers: int, classes: dict[str, Any]) -> None:
    loader, fresh = loader_of(classes, 1, workers), Loader(workers)
    energon.restore(fresh, of_record(stored(loader), "data", 1, 2))
    assert repr(fresh.state) == repr(loader.state)
    assert isinstance(fresh.state, classes["SavableDataLoaderState"])


def test_workers_are_divided_among_other_ranks(classes: dict[str, Any]) -> None:
    loaders = [loader_of(classes, rank, 1) for rank in range(4)]
    records = [stored(loader) for loader in loaders]
    own = {**records[1], "ranks": [record["state"] for record in records]}
    fresh = Loader(2)
    energon.restore(fresh, of_record(own, "data", 1, 2))
    assert repr(fresh.state.worker_states) == repr([loaders[rank].state.worker_states[0] for rank in (2, 3)])
    with pytest.raises(CheckpointMismatchError, match="states of 2 workers for this rank, but the loader has 1"):
        energon.restore(Loader(1), of_record(own, "data", 1, 2))


def test_a_loader_that_has_not_begun() -> None:
    fresh = Loader(2, state="untouched")
    energon.restore(fresh, of_record(stored(Loader(2)), "data", 0, 1))
    assert fresh.state is None


def test_classes_that_are_not_known(classes: dict[str, Any]) -> None:
    loader = loader_of(classes, 0, 1)
    newer = make_dataclass("NewState", ["x"])
    newer.__module__ = "megatron.energon.savable_loader"
    loader.state.worker_states = [newer(1)]
    with pytest.raises(UnsupportedError, match=r"megatron\.energon\.savable_loader\.NewState"):
        stored(loader)
    position = ShardedPosition.of_energon([{"energon.class": "os.system"}], 0, 2)
    with pytest.raises(CheckpointMismatchError, match="which this version of mcore_ckpt does not know"):
        energon.restore(Loader(1), of_record(position.record, "data", 0, 1))
