"""torchdata's own StatefulDataLoader as a data position: exactly, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from mcore_ckpt import ShardedPosition
from mcore_ckpt.checkpoint.plain_files import pickle_plain
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.sharding.data_position import of_record
from mcore_ckpt.state.typed_values import from_stored, to_stored


def loader_of(workers: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    return StatefulDataLoader(range(20), batch_size=2, shuffle=True, num_workers=workers, generator=generator)


def stored(loader: Any) -> dict[str, Any]:
    """The position as it is on disk."""
    written = to_stored({"data": ShardedPosition.of_dataloader(loader.state_dict())}, "extra_state")
    pickle_plain(written)  # refuses classes
    record: dict[str, Any] = from_stored(written)["data"]
    return record


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_exactly_or_not_at_all(workers: int) -> None:
    loader = loader_of(workers)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    within = of_record(stored(loader), "data", 0, 1)
    rest = [batch.tolist() for batch in batches]
    ended = stored(loader)

    fresh = loader_of(workers)
    fresh.load_state_dict(within.for_rank(workers=workers))
    assert [batch.tolist() for batch in fresh] == rest
    with pytest.raises(CheckpointMismatchError, match=f"saved with {workers} workers, and is wanted for 3"):
        within.for_rank(workers=3)
    assert of_record(ended, "data", 0, 1).for_rank(workers=3) is None
    assert of_record({**ended, "ranks": [ended["state"]] * 2}, "data", 0, 3).for_rank() is None
