"""verl's own PPO trainers, old and new, and workers with our checkpoints of actor and critic."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import verl
from packaging.version import parse
from safetensors.torch import load_file
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from mcore_ckpt.cli.main import main
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from tests.distributed.snapshot import assert_same
from tests.verl.ppo import ACTOR, OURS, PPORun, both

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
@pytest.mark.shows("verl", "save", "resume", "retention")
@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.full)])
def test_a_killed_run_goes_on(model: Path, tmp_path: Path, uninterrupted: Callable[[int], PPORun], world: int) -> None:
    root = tmp_path / "root"
    overrides = (*LAYOUTS[world], *OURS, *KEEP, "++trainer.use_v1=False")
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


@pytest.mark.shows("verl", "async", "resume")
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
    resumed = replace(killed, folder=tmp_path / "resumed", held=None, killed_at=None)
    if find_latest_ckpt_path(str(root)) == str(root / "global_step_3"):
        # The trainer of 0.6 writes the tracker whatever async_save says. The actor's commit puts it right if it comes
        # later, and otherwise the first start that finds it ahead.
        assert verl.__version__.startswith("0.6")
        first = replace(resumed, folder=tmp_path / "first")
        assert 1 in first.start(), first.log
        assert "CheckpointNotFoundError" in first.log
    assert find_latest_ckpt_path(str(root)) == str(root / "global_step_2")
    assert resumed.start() == [0] * world, resumed.log
    assert resumed.resumed_from == 2
    check_same(resumed, uninterrupted(world))
    assert list(complete(root)) == [2, 3, 4]
    # Of the last step, too: ray ends the workers as soon as the trainer returns.
    assert find_latest_ckpt_path(str(root)) == str(root / "global_step_4")


# Those for which megatron loads a state that fits any layout (test_for_trainers.py).
FUSED = (
    *both("optim.use_checkpoint_opt_param_scheduler=True"),
    *(f"++{option}" for option in both("optim.override_optimizer_config.use_precision_aware_optimizer=True")),
    *(f"++{option}" for option in both("optim.override_optimizer_config.store_param_remainders=False")),
)


@pytest.mark.shows("verl", "going back")
@pytest.mark.full
def test_a_run_goes_back_to_verls_own_manager(model: Path, tmp_path: Path) -> None:
    """Its critic, too, of which mbridge loads no weights: those are in dist_ckpt."""
    version = parse(verl.__version__)
    if version < parse("0.7.1"):
        pytest.skip("verl 0.6 and 0.7.0 load only the form of optimizer state that megatron-core 0.16 has removed")
    overrides = (*both("megatron.tensor_model_parallel_size=2"), *FUSED, "++trainer.use_v1=False")
    reference = PPORun(2, model, tmp_path / "reference", tmp_path / "none", overrides)
    assert reference.start() == [0, 0], reference.log
    ours = PPORun(2, model, tmp_path / "ours", tmp_path / "root", (*overrides, *OURS), saves=(2,), killed_at=3)
    assert -9 in ours.start(), ours.log
    layout = ("--layout", "verl" if version >= parse("0.9") else "verl-0.8")
    back = ("--format", "torch_dist", *layout, "--output_path", str(tmp_path / "theirs"), "--test")
    assert main(["convert", str(tmp_path / "root"), *back]) == 0
    theirs = PPORun(2, model, tmp_path / "resumed", tmp_path / "theirs", overrides)
    assert theirs.start() == [0, 0], theirs.log
    assert theirs.resumed_from == 2
    check_same(theirs, reference)


@pytest.mark.shows("verl", "other layout", "offload")
@pytest.mark.full
def test_another_layout_loads_the_same_weights(model: Path, tmp_path: Path) -> None:
    root, offload = tmp_path / "root", (*OFFLOADED, "++trainer.use_v1=False", *OURS)
    layout = (*offload, *both("megatron.tensor_model_parallel_size=2"))
    first = PPORun(2, model, tmp_path / "first", root, layout, saves=(2,), killed_at=3)
    assert -9 in first.start(), first.log
    # From then on it learns nothing, so what it saves is what it has loaded.
    contents = ("save_contents=[model,hf_model]", "load_contents=[model,optimizer,extra]")
    options = (*offload, *both("optim.lr=0"), *(f"{ACTOR}.checkpoint.{each}" for each in contents))
    second = PPORun(2, model, tmp_path / "second", root, options, saves=(3,))
    assert second.start() == [0, 0], second.log
    assert second.resumed_from == 2
    merged = tmp_path / "merged"
    assert main(["merge", str(root / "global_step_2" / "actor"), str(merged), "--hf_model_path", str(model)]) == 0
    wanted = load_file(merged / "model.safetensors")
    found = load_file(root / "global_step_3" / "actor" / "huggingface" / "model.safetensors")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.shows("verl", "moving over")
@pytest.mark.full
def test_a_run_of_verls_own_manager_goes_on_with_ours(model: Path, tmp_path: Path) -> None:
    # One data-parallel rank: of the others verl's own manager saves no random states.
    layout = (*both("megatron.tensor_model_parallel_size=2"),)
    reference = PPORun(2, model, tmp_path / "reference", tmp_path / "none", layout)
    assert reference.start() == [0, 0], reference.log
    root = tmp_path / "root"
    overrides = (*layout, "++trainer.use_v1=False")
    stock = PPORun(2, model, tmp_path / "stock", root, overrides, saves=(2,), killed_at=3)
    assert -9 in stock.start(), stock.log
    ours = replace(stock, folder=tmp_path / "ours", overrides=(*overrides, *OURS), saves=(4,), killed_at=None)
    assert ours.start() == [0, 0], ours.log
    assert ours.resumed_from == 2
    check_same(ours, reference)
    assert complete(root) == {4: ("actor", "critic")}
