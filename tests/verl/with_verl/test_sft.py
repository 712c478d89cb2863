"""verl's own SFT trainer, killed and started again with our checkpoints, is as one that was never stopped."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import verl
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from tests.distributed.snapshot import assert_same
from tests.verl.sft import OURS, SFTRun

ASYNC = "++checkpoint.async_save=True"
KEEP = "trainer.max_ckpt_to_keep=2"

# By the number of ranks: with offloading, and cut every way that a dense model can be. The engine of 0.6 cannot train
# with offloading: it wants back what it has not offloaded (`MegatronEngine.initialize`, `EngineTrainModeCtx`).
OFFLOADED = ("engine.param_offload=True", "engine.optimizer_offload=True")
IS_0_6 = verl.__version__.startswith("0.6")
LAYOUTS = {
    2: () if IS_0_6 else OFFLOADED,
    4: ("engine.tensor_model_parallel_size=2", "engine.pipeline_model_parallel_size=2"),
}


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], SFTRun]:
    """The run of so many ranks that was never stopped, and never saved: of verl's own engine."""
    runs: dict[int, SFTRun] = {}

    def run(world: int) -> SFTRun:
        if world not in runs:
            folder = tmp_path_factory.mktemp(f"uninterrupted{world}")
            runs[world] = SFTRun(world, model, folder / "run", folder / "root", LAYOUTS[world], saves=False)
            assert runs[world].start() == [0] * world, runs[world].log
        return runs[world]

    return run


def names_below(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if not path.name.startswith(".")}


def check_went_on(run: SFTRun, reference: SFTRun, since: int) -> None:
    """The steps after `since`, and all state at the end."""
    assert run.losses == {step: losses for step, losses in reference.losses.items() if step > since}
    for found, wanted in zip(run.states, reference.states, strict=True):
        assert_same(found, wanted)


# CI has two ranks; and, below, tensor parallelism when a run of verl's own engine goes on.
@pytest.mark.shows("verl", "save", "resume", "retention")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_killed_run_goes_on(model: Path, tmp_path: Path, uninterrupted: Callable[[int], SFTRun], world: int) -> None:
    root = tmp_path / "root"
    killed = SFTRun(world, model, tmp_path / "killed", root, (*LAYOUTS[world], OURS, KEEP), killed_at=5)
    assert -9 in killed.start(), killed.log
    assert names_below(root) == {"global_step_2", "global_step_4", "latest_checkpointed_iteration.txt"}
    resumed = replace(killed, folder=tmp_path / "resumed", killed_at=None)
    assert resumed.start() == [0] * world, resumed.log
    check_went_on(resumed, uninterrupted(world), since=4)
    # What the run before has saved counts, too.
    assert names_below(root) == {"global_step_4", "global_step_6", "latest_checkpointed_iteration.txt"}
    assert tracker.read_tracker(root) == 6


OPTIONS = "++optim.override_optimizer_config"


@pytest.mark.shows("verl", "precision-aware")
@pytest.mark.full
@pytest.mark.parametrize(
    "switches",
    [
        pytest.param(("optimizer_cpu_offload", "use_precision_aware_optimizer"), id="offloaded"),
        pytest.param(("use_precision_aware_optimizer", "store_param_remainders"), id="remainders"),
    ],
)
def test_a_killed_run_with_verls_own_switches_goes_on(model: Path, tmp_path: Path, switches: Sequence[str]) -> None:
    options = (*(f"{OPTIONS}.{switch}=True" for switch in switches), f"{OPTIONS}.optimizer_offload_fraction=0.5")
    reference = SFTRun(2, model, tmp_path / "reference", tmp_path / "none", options, saves=False)
    assert reference.start() == [0, 0], reference.log
    killed = SFTRun(2, model, tmp_path / "killed", tmp_path / "root", (*options, OURS), killed_at=5)
    assert -9 in killed.start(), killed.log
    resumed = replace(killed, folder=tmp_path / "resumed", killed_at=None)
    assert resumed.start() == [0, 0], resumed.log
    check_went_on(resumed, reference, since=4)


@pytest.mark.shows("verl", "async")
def test_a_tracker_ahead_of_its_checkpoint(model: Path, tmp_path: Path, uninterrupted: Callable[[int], SFTRun]) -> None:
    root = tmp_path / "root"
    killed = SFTRun(2, model, tmp_path / "killed", root, (*LAYOUTS[2], OURS, ASYNC), killed_at=5, held_at=4)
    assert -9 in killed.start(), killed.log
    # By the trainer, which does not know that its engine saves beside the training.
    assert tracker.read_tracker(root) == 4
    first = replace(killed, folder=tmp_path / "first", killed_at=None, held_at=None)
    assert 1 in first.start(), first.log
    assert "CheckpointNotFoundError" in first.log
    assert find_latest_ckpt_path(str(root)) == str(root / "global_step_2")
    second = replace(first, folder=tmp_path / "second")
    assert second.start() == [0, 0], second.log
    check_went_on(second, uninterrupted(2), since=2)
    assert [status.step for status in steps.complete_steps(root)] == [2, 4, 6]


@pytest.mark.full
@pytest.mark.skipif(IS_0_6, reason="our trainers are for verl 0.7 and newer")
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_was_saved_at_an_epochs_end_goes_on_with_the_next(model: Path, tmp_path: Path, world: int) -> None:
    """verl's own trainer would end at once, with exit code 0."""
    from mcore_ckpt.integrations.verl.sft_trainer import SFTTrainer

    four_an_epoch = (*LAYOUTS[2], "data.train_batch_size=16", "data.micro_batch_size_per_gpu=8")
    reference = SFTRun(world, model, tmp_path / "reference", tmp_path / "none", four_an_epoch, saves=False)
    assert reference.start() == [0] * world, reference.log
    killed = SFTRun(world, model, tmp_path / "killed", tmp_path / "root", (*four_an_epoch, OURS), 5, trainer=SFTTrainer)
    assert -9 in killed.start(), killed.log
    resumed = replace(killed, folder=tmp_path / "resumed", killed_at=None)
    assert resumed.start() == [0] * world, resumed.log
    check_went_on(resumed, reference, since=4)


@pytest.mark.shows("verl", "moving over")
@pytest.mark.full  # tests/distributed/test_verl_stock.py moves such runs, of recorded versions, in CI
def test_a_run_of_verls_own_engine_goes_on_with_ours(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    # One data-parallel rank: of the others verl's own manager saves no random states. Without dropout in 0.6, whose
    # trainer draws a number on one tensor-parallel rank alone (`torch.randint` in `fit`): from then on masks differ,
    # and with them the copies of norms, of which verl's own manager saves one.
    no_dropout = ("engine.override_transformer_config.hidden_dropout=0",) if IS_0_6 else ()
    layout = ("engine.tensor_model_parallel_size=2", *no_dropout)
    reference = SFTRun(2, model, tmp_path / "reference", tmp_path / "none", layout, saves=False)
    assert reference.start() == [0, 0], reference.log
    stock = SFTRun(2, model, tmp_path / "stock", root, (*layout, "trainer.save_freq=4"), killed_at=5)
    assert -9 in stock.start(), stock.log
    assert [*(root / "global_step_4").glob("**/huggingface/model.safetensors")]
    ours = replace(stock, folder=tmp_path / "ours", overrides=(*layout, OURS), killed_at=None)
    assert ours.start() == [0, 0], ours.log
    check_went_on(ours, reference, since=4)
    assert [status.step for status in steps.complete_steps(root)] == [6]
