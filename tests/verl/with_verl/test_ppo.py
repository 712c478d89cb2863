"""verl's own PPO trainers, old and new, and workers with our checkpoints of actor and critic."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ppo import OURS, PPORun, both
from snapshot import assert_same
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker

ASYNC = both("checkpoint.async_save=True")
KEEP = ("trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=2")

OFFLOADED = (*both("megatron.param_offload=True"), *both("megatron.optimizer_offload=True"))

# By the number of ranks: with offloading, and cut every way that a dense model can be.
LAYOUTS = {
    1: OFFLOADED,
    2: OFFLOADED,
    4: (*both("megatron.tensor_model_parallel_size=2"), *both("megatron.pipeline_model_parallel_size=2")),
}


def complete(root: Path) -> dict[int, tuple[str, ...]]:
    """The steps that can be loaded, and of which roles."""
    return {status.step: tuple(sorted(status.committed)) for status in steps.complete_steps(root)}


def check_same(run: PPORun, reference: PPORun) -> None:
    for found, wanted in zip(run.states, reference.states, strict=True):
        assert_same(found, wanted)


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], PPORun]:
    """The run of so many ranks that was never stopped, and never saved: of verl's own engines."""

    @functools.cache
    def run(world: int) -> PPORun:
        folder = tmp_path_factory.mktemp(f"uninterrupted{world}")
        run = PPORun(world, model, folder / "run", folder / "none", LAYOUTS[world])
        assert run.start() == [0] * world, run.log
        return run

    return run


# In CI there is one rank: what several have to do together is the same as in SFT (test_sft.py).
@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.full)])
def test_a_killed_run_goes_on(model: Path, tmp_path: Path, uninterrupted: Callable[[int], PPORun], world: int) -> None:
    root = tmp_path / "root"
    overrides = (*LAYOUTS[world], *OURS, *KEEP, "trainer.use_v1=False")
    killed = PPORun(world, model, tmp_path / "killed", root, overrides, saves=(1, 2, 4), killed_at=3)
    assert -9 in killed.start(), killed.log
    assert complete(root) == {1: ("actor", "critic"), 2: ("actor", "critic")}
    resumed = replace(killed, folder=tmp_path / "resumed", killed_at=None)
    assert resumed.start() == [0] * world, resumed.log
    assert resumed.resumed_from == 2
    check_same(resumed, uninterrupted(world))
    # What the run before has saved counts, too; what the trainer had beside it is gone with it.
    assert {path.name for path in root.glob("global*")} == {"global_step_2", "global_step_4"}
    assert complete(root) == {2: ("actor", "critic"), 4: ("actor", "critic")}
    assert tracker.read_tracker(root) == 4


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_tracker_waits_for_both_models(
    model: Path, tmp_path: Path, uninterrupted: Callable[[int], PPORun], world: int
) -> None:
    root = tmp_path / "root"
    overrides = (*LAYOUTS[world], *OURS, *ASYNC)
    held = {"held": "global_step_3/critic", "killed_at": 4}
    killed = PPORun(world, model, tmp_path / "killed", root, overrides, saves=(2, 3, 4), **held)
    assert -9 in killed.start(), killed.log
    assert complete(root) == {2: ("actor", "critic")}
    # The trainer was through with the step's save, and has written its own part.
    assert (root / "global_step_3" / "data.pt").exists()
    assert (root / "global_step_3" / "actor" / "manifest.json").exists()
    assert find_latest_ckpt_path(str(root)) == str(root / "global_step_2")
    resumed = replace(killed, folder=tmp_path / "resumed", held=None, killed_at=None)
    assert resumed.start() == [0] * world, resumed.log
    assert resumed.resumed_from == 2
    check_same(resumed, uninterrupted(world))
    assert list(complete(root)) == [2, 3, 4]
    # Of the last step, too: ray ends the workers as soon as the trainer returns.
    assert find_latest_ckpt_path(str(root)) == str(root / "global_step_4")
