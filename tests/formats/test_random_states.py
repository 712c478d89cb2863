"""Random states in the form of megatron's trainer: whose are taken, and what is refused by the name of the file."""

from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.random_states import random_states_of
from mcore_ckpt.state.rng import check_rng

STATES: dict[str, Any] = {
    "random_rng_state": (3, (1, 2), None),
    "np_rng_state": np.random.RandomState(1).get_state(),
    "torch_rng_state": torch.get_rng_state(),
    "rng_tracker_states": {"model-parallel-rng": torch.zeros(4, dtype=torch.uint8)},
}


def test_each_data_parallel_rank_takes_its_own() -> None:
    other = {**STATES, "random_rng_state": (3, (9,), None)}
    assert random_states_of([STATES], 1, "file")["python"] == (3, (1, 2), None)
    assert random_states_of([STATES, other], 1, "file")["python"] == (3, (9,), None)
    check_rng(random_states_of(STATES, 0, "file"), "file")


def test_more_data_parallel_ranks_than_were_saved() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"^file: has no random_rng_state.*leave 'extra' out"):
        random_states_of([STATES, STATES], 2, "file")


@pytest.mark.parametrize("state", [torch.zeros(4, dtype=torch.uint8), torch.get_rng_state().to(torch.int64)])
def test_a_state_that_torch_would_refuse(state: torch.Tensor) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"^file: the .*torch"):
        check_rng(random_states_of({**STATES, "torch_rng_state": state}, 0, "file"), "file")


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("stored", [None, 3, "text", (1, 2)])
def test_what_is_missing_or_damaged(name: str, stored: Any) -> None:
    lacking = {key: value for key, value in STATES.items() if key != name}
    with pytest.raises(CheckpointMismatchError, match=rf"^file: has no {name}: "):
        random_states_of([lacking], 0, "file")
    with pytest.raises(CheckpointCorruptError, match=r"^file: the "):
        check_rng(random_states_of([{**STATES, name: stored}], 0, "file"), "file")


@pytest.mark.parametrize("stored", [[], None, {}, 3])
def test_no_states_at_all(stored: Any) -> None:
    with pytest.raises(CheckpointMismatchError, match="random_rng_state, np_rng_state"):
        random_states_of(stored, 0, "file")
