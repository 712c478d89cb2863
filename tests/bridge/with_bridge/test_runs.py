"""Bridge's own training, killed and started again with our checkpoints, is as one that was never stopped."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megatron.bridge.training import setup
from megatron.core.rerun_state_machine import RerunDataIterator

from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from tests.bridge.bridge_run import ITERATIONS, LEFT, BridgeRun
from tests.bridge.resuming_bridge import TRACKER, check_went_on, copied, killed, names_below, resumed
from tests.support.commits import branch_in

ASYNC = {"checkpoint.async_save": True}
KEEP = {"checkpoint.most_recent_k": 2}
PIPELINE_PARALLEL = {**LEFT, "model.tensor_model_parallel_size": 1, "model.pipeline_model_parallel_size": 2}
DATA_PARALLEL = {**LEFT, "model.tensor_model_parallel_size": 1}

Uninterrupted = Callable[..., BridgeRun]


@pytest.mark.shows("Megatron-Bridge", "save", "resume", "retention")
def test_a_killed_run_goes_on(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    run = killed(tmp_path, 2, KEEP)
    assert names_below(run.root) == {"global_steps_2", "global_steps_4", TRACKER}
    again = resumed(run)
    check_went_on(again, uninterrupted(2), since=4)
    # What the run before has saved counts, too.
    assert names_below(run.root) == {"global_steps_4", "global_steps_6", TRACKER}
    assert tracker.read_tracker(run.root) == ITERATIONS
    assert (run.saved, again.saved) == ([(2, 2), (4, 4)], [(6, 6)])
    assert branch_in(run.root / "global_steps_6" / "actor") == ((1, 3),)


class Stream:
    """Stands in for Energon's loader, which has a position: Bridge saves and restores it."""

    def __init__(self, batches: Iterator[Any], log: Path) -> None:
        self._batches, self._log, self._position = batches, log, 0

    def __next__(self) -> Any:
        self._position += 1
        return next(self._batches)

    def save_state(self) -> dict[str, int]:
        return {"position": self._position}

    def restore_state(self, state: dict[str, int]) -> None:
        self._position = state["position"]
        with self._log.open("a") as file:
            file.write(f"{self._position}\n")


def with_streams(log: Path) -> None:
    setup_data_iterators = setup.setup_data_iterators

    def with_stream(**words: Any) -> tuple[RerunDataIterator, Any, Any]:
        train, *others = setup_data_iterators(**words)
        return RerunDataIterator(Stream(train.iterable, log)), *others

    setup.setup_data_iterators = with_stream


@pytest.mark.shows("Megatron-Bridge", "save", "resume", "async", "parts")
def test_an_asynchronous_run_goes_on(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    run = killed(tmp_path, 2, ASYNC, held_at=4, prepare=partial(with_streams, tmp_path / "positions"))
    # Its save of iteration 4 was under way, and callbacks were told of the one before.
    assert [status.step for status in steps.complete_steps(run.root)] == [2]
    assert [newest for _, newest in run.saved] == [2]
    # A crash between the first commit and the tracker leaves none, and Bridge would begin anew without a word.
    (run.root / TRACKER).unlink()
    again = resumed(run)
    check_went_on(again, uninterrupted(2), since=2)
    assert [status.step for status in steps.complete_steps(run.root)] == [2, 4, 6]
    assert [newest for _, newest in again.saved] == [4, 6]
    # Two micro-batches of each of two iterations, on both ranks.
    assert (tmp_path / "positions").read_text() == "4\n4\n"


@pytest.mark.shows("Megatron-Bridge", "other layout")
@pytest.mark.full
@pytest.mark.parametrize("after", [PIPELINE_PARALLEL, DATA_PARALLEL])
def test_another_layout_loads_what_bridges_own_manager_loads(
    tmp_path: Path, left_by_bridge: BridgeRun, after: Mapping[str, Any]
) -> None:
    run = killed(tmp_path, 2, LEFT)
    assert run.losses == left_by_bridge.losses
    again = resumed(run, options=after)
    wanted = copied(left_by_bridge, tmp_path / "theirs", options=after).check()
    check_went_on(again, wanted, since=4, leave_out="generator.")


@pytest.mark.shows("Megatron-Bridge", "moving over")
@pytest.mark.full
def test_a_run_moves_over_and_goes_on_with_its_own(
    tmp_path: Path, left_by_bridge: BridgeRun, uninterrupted: Uninterrupted
) -> None:
    each = {**LEFT, "checkpoint.save_interval": 1}
    over = copied(left_by_bridge, tmp_path / "over", ours=True, options=each, killed_at=ITERATIONS)
    assert -9 in over.start(), over.log
    assert over.losses.keys() == {5}
    assert names_below(over.root) == {"iter_0000004", "latest_train_state.pt", "global_steps_5", TRACKER}
    # Bridge's own is the older one now.
    check_went_on(resumed(over), uninterrupted(2, LEFT), since=5)


@pytest.mark.full
def test_bridges_own_manager_never_takes_ours(tmp_path: Path) -> None:
    run = killed(tmp_path, 1, {})
    stock = replace(run, folder=tmp_path / "stock", ours=False, killed_at=None)
    assert stock.start() == [1], stock.log
    assert not (stock.folder / "losses.jsonl").exists()
