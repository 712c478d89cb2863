"""verl's checkpoint manager, in its words, without verl: resumes, trackers, retention, and what dies on the way."""

from pathlib import Path

import pytest
from agreement import everywhere
from layouts import LAYOUTS
from snapshot import assert_same, poison, snapshot
from training import build, parallel, train
from verl_words import (
    step_folder,
    tracked,
    verl_manager,
)

DP2 = LAYOUTS["dp2-bf16"]


# -- resuming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "flat", "async_save"),
    [
        pytest.param("dp2-bf16", False, True, marks=pytest.mark.world(2)),
        pytest.param("pp2-vpp2", True, False, marks=pytest.mark.world(2)),
        pytest.param("tp2-pp2", False, False, marks=pytest.mark.world(4)),
        pytest.param("ep2-dp4", True, True, marks=pytest.mark.world(4)),
    ],
)
def test_a_resumed_training_is_the_same_bit_for_bit(
    layout: str, flat: bool, async_save: bool, shared_path: Path
) -> None:
    folder = step_folder(shared_path, 2) if flat else step_folder(shared_path, 2) / "actor"
    with parallel(LAYOUTS[layout]):
        training = build(LAYOUTS[layout], seed=1)
        train(training, 0, 2)
        manager = verl_manager(training, async_save=async_save)
        at_save = snapshot(training)
        with everywhere():
            assert manager.save_checkpoint(str(folder), None, 2, None) is None
        through = train(training, 2, 4)
        manager.close()
        after = snapshot(training)
    with parallel(LAYOUTS[layout]):
        training = build(LAYOUTS[layout], seed=2)
        poison(training)
        manager = verl_manager(training)
        manager.load_checkpoint(str(folder))
        manager.close()
        loaded = snapshot(training)
        resumed = train(training, 2, 4)
        found = snapshot(training)
        with everywhere():
            assert_same(loaded, at_save)
            assert resumed == through
            assert_same(found, after)
            assert tracked(shared_path) == "2"
            assert (folder / "manifest.json").exists()
