"""Random generators: read, stored, restored, and the same numbers come."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from mcore_ckpt.checkpoint.plain_files import pickle_plain
from mcore_ckpt.state.rng import read_rng, seed_of, write_rng, write_seed


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> megatron_random.CudaRNGStatesTracker:
    """Megatron's tracker. Its `add` needs a GPU, its states are only tensors or generators."""
    fresh = megatron_random.CudaRNGStatesTracker()
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", fresh)
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    return fresh


def stored(state: dict[str, Any]) -> dict[str, Any]:
    return torch.load(io.BytesIO(pickle_plain(state)), weights_only=True)


def draw() -> list[Any]:
    # An odd number of gaussians, so that Python's and NumPy's second of a pair is kept for later.
    return [random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(), torch.rand(3).tolist()]


@pytest.mark.parametrize("before", [0, 1, 700])
def test_all_generators_go_on_where_they_were(before: int, tracker: megatron_random.CudaRNGStatesTracker) -> None:
    random.seed(before)
    np.random.seed(before)
    torch.manual_seed(before)
    for _ in range(before):
        draw()
    state = stored(read_rng())
    expected = [draw() for _ in range(3)]
    for _ in range(2):
        write_rng(state)
        assert [draw() for _ in range(3)] == expected


def test_reading_draws_nothing_and_is_a_copy(tracker: megatron_random.CudaRNGStatesTracker) -> None:
    tracker.set_states({"model-parallel-rng": torch.arange(16, dtype=torch.uint8)})
    torch.manual_seed(1)
    first, second = torch.rand(2).tolist(), None
    torch.manual_seed(1)
    state = read_rng()
    second = torch.rand(2).tolist()
    assert first == second
    tracker.states_["model-parallel-rng"].zero_()
    assert state["megatron"]["model-parallel-rng"].tolist() == list(range(16))


def test_the_tracker_gets_its_tensors_back(tracker: megatron_random.CudaRNGStatesTracker) -> None:
    tracker.set_states({name: torch.full((16,), i, dtype=torch.uint8) for i, name in enumerate(("model", "expert"))})
    state = stored(read_rng())
    tracker.set_states({name: torch.zeros(16, dtype=torch.uint8) for name in ("expert", "model")})
    write_rng(state)
    assert {name: value.tolist() for name, value in tracker.get_states().items()} == {
        "model": [0] * 16,
        "expert": [1] * 16,
    }
    tracker.states_["expert"].zero_()
    assert state["megatron"]["expert"].tolist() == [1] * 16, "the tracker works on the loaded state itself"


def test_generators_of_a_graph_safe_tracker_stay_the_same_objects(
    tracker: megatron_random.CudaRNGStatesTracker,
) -> None:
    generator = torch.Generator().manual_seed(5)
    tracker.set_states({"model-parallel-rng": generator})
    state = stored(read_rng())
    expected = torch.rand(4, generator=generator)
    write_rng(state)
    assert tracker.get_states()["model-parallel-rng"] is generator
    assert torch.rand(4, generator=generator).equal(expected)


def test_what_the_state_lacks_stays_as_it_is(tracker: megatron_random.CudaRNGStatesTracker) -> None:
    """Such as a state from a process without NumPy, or one whose tracker had not been seeded."""
    state = stored(read_rng() | {"numpy": None, "device": None})
    assert state["megatron"] == {}
    tracker.set_states({"model-parallel-rng": torch.arange(16, dtype=torch.uint8)})
    np.random.seed(3)
    expected = np.random.rand(2).tolist()
    np.random.seed(3)
    write_rng(state)
    assert np.random.rand(2).tolist() == expected
    assert list(tracker.get_states()) == ["model-parallel-rng"], "a fork would now fail"


@pytest.mark.parametrize("seed", [0, 1234, 2**63 - 1])
def test_the_seed_comes_back_however_much_was_drawn(seed: int, tracker: megatron_random.CudaRNGStatesTracker) -> None:
    torch.manual_seed(seed)
    torch.rand(1000), torch.randn(3)
    assert seed_of(stored(read_rng()), "file") == seed
    assert seed_of({"seed": 7}, "file") == 7


def test_generators_start_anew_apart_by_step_and_stage_and_alike_otherwise(
    tracker: megatron_random.CudaRNGStatesTracker,
) -> None:
    def drawn(seed: int, step: int, pp: int) -> str:
        write_seed(seed, step, pp)
        return str(draw())

    assert drawn(1234, 10, 0) == drawn(1234, 10, 0)
    assert len({drawn(*which) for which in ((1234, 10, 0), (1234, 10, 1), (1234, 11, 0), (1235, 10, 0))}) == 4
    write_seed(1234, 10, 1)
    first = torch.initial_seed()
    write_seed(1234, 10, 0)
    assert first - torch.initial_seed() == 100, "as megatron's trainer puts stages apart"
    assert torch.initial_seed() + 100 * 1000 < 2**32, "NumPy takes no more"


def test_the_tracker_is_seeded_only_where_it_was(
    tracker: megatron_random.CudaRNGStatesTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(megatron_random, "model_parallel_cuda_manual_seed", seeds.append)
    write_seed(1234, 10, 2)
    assert seeds == []
    tracker.set_states({"model-parallel-rng": torch.arange(16, dtype=torch.uint8)})
    write_seed(1234, 10, 2)
    assert seeds == [torch.initial_seed()]
