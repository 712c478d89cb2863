"""As test_transfer_queue.py, with verl's own worker, engine and manager."""

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt.cli.main import main
from tests.verl.async_engine_run import AsyncEngineRun
from tests.verl.async_run import BATCH, CALLBACK, PROMPTS
from tests.verl.ppo import OURS

pytestmark = pytest.mark.full

LAST = 3


def killed_before_the_queue(tmp_path: Path, model: Path, run: AsyncEngineRun) -> AsyncEngineRun:
    killed = replace(run, model=model, killed_at="queue", watched=LAST)
    assert killed.start() == -9, killed.log
    assert not (killed.root / f"global_step_{LAST}/transfer_queue").exists()
    return replace(killed, folder=tmp_path / "resumed", killed_at=None)


@pytest.mark.shows("verl", "resume", "parts")
def test_prompts_in_flight_survive_a_kill(model: Path, tmp_path: Path) -> None:
    run = AsyncEngineRun(tmp_path / "run", tmp_path / "root", overrides=(OURS[0],))
    resumed = killed_before_the_queue(tmp_path, model, run)
    assert resumed.start() == 0, resumed.log
    assert resumed.resumed_from == LAST - 1
    assert resumed.counts == [1] * PROMPTS


def test_verls_own_manager_loses_them(model: Path, tmp_path: Path) -> None:
    """By then it has deleted the weights of the step before, and the step that has weights has no queue."""
    run = AsyncEngineRun(tmp_path / "run", tmp_path / "root", callback=None)
    resumed = killed_before_the_queue(tmp_path, model, run)
    assert resumed.start() == 1
    assert not (resumed.root / f"global_step_{LAST - 1}/actor").exists()
    by_path = replace(
        resumed,
        folder=tmp_path / "by_path",
        resume=("resume_path", str(resumed.root / f"global_step_{LAST}")),
    )
    assert by_path.start() == 0, by_path.log
    lost = slice(LAST * BATCH, LAST * BATCH + 2 * BATCH)
    assert by_path.counts[lost] == [0] * (2 * BATCH)
    assert by_path.counts[: lost.start] + by_path.counts[lost.stop :] == [1] * (PROMPTS - 2 * BATCH)


@pytest.mark.shows("verl", "moving over", "going back", "parts")
def test_a_run_moves_over_and_back(model: Path, tmp_path: Path) -> None:
    stock = AsyncEngineRun(tmp_path / "stock", tmp_path / "root", model=model, callback=None, stops_at=2)
    assert stock.start() == 0, stock.log
    ours = replace(stock, folder=tmp_path / "ours", overrides=(OURS[0],), callback=CALLBACK, stops_at=4)
    assert ours.start() == 0, ours.log
    assert ours.resumed_from == 2
    assert ours.reissued == list(range(2 * BATCH, 4 * BATCH))
    back = ("--format", "torch_dist", "--layout", "verl", "--output_path", str(tmp_path / "theirs"))
    assert main(["convert", str(ours.root), *back]) == 0
    theirs = replace(stock, folder=tmp_path / "back", root=tmp_path / "theirs", stops_at=8)
    assert theirs.start() == 0, theirs.log
    assert theirs.resumed_from == 4
    assert theirs.reissued == list(range(4 * BATCH, 6 * BATCH))
    assert theirs.counts == [1] * PROMPTS
