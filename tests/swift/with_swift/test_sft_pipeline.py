"""ms-swift's own SFT pipeline and trainer, saved with this package, killed, and resumed: as if never interrupted."""

import os
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from swift.megatron.pipelines.train.pretrain import MegatronPretrain as StockPretrain
from swift.megatron.pipelines.train.rlhf import MegatronRLHF as StockRLHF
from swift.megatron.pipelines.train.sft import MegatronSft as StockSft
from swift.megatron.trainers import base

from mcore_ckpt import pin
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import InvalidArgumentError, UnsupportedError
from mcore_ckpt.integrations.swift import TRAINERS, MegatronTrainer, pipelines
from mcore_ckpt.integrations.swift.options import refuse_unsupported
from mcore_ckpt.integrations.swift.trainer import LOADING, ROLE, SAVING, CheckpointTrainer
from mcore_ckpt.steps import complete_steps, read_tracker
from tests.distributed import forked_ranks
from tests.distributed.snapshot import assert_same
from tests.support.checkpoints import make
from tests.support.commits import branch_in
from tests.support.fused_adam import fused_adam
from tests.swift import swift_on_cpu
from tests.swift.swift_run import STEPS, SwiftRun

TP2 = {"tensor_model_parallel_size": 2}
LORA = {"tuner_type": "lora"}
# Without transformer-engine's FusedAdam, Megatron loads no state of its distributed optimizer that it has saved.
NOT_DISTRIBUTED = {"use_distributed_optimizer": False}


def killed(
    model: Path,
    folder: Path,
    world: int = 1,
    *,
    pipeline: type[StockSft] = pipelines.MegatronSft,
    within: Any = nullcontext,
    **options: Any,
) -> SwiftRun:
    """A run that saves steps 2 and 4, and is killed before it trains step 6."""
    options = {"save_steps": 2, **options}
    run = SwiftRun(world, model, folder / "killed", folder / "root", tuple(options.items()), pipeline, 5, within)
    assert -9 in run.start(), run.log
    return run


def resumed(run: SwiftRun, **options: Any) -> SwiftRun:
    """The same command line again, with what it resumes from."""
    options = {**dict(run.options), "finetune": False, **options}
    again = replace(run, folder=run.folder.with_name("resumed"), options=tuple(options.items()), killed_at=None)
    again.folder.parent.mkdir(exist_ok=True)
    assert again.start() == [0] * again.world, again.log
    return again


def command(folder: Path, *words: object) -> None:
    """Runs mcore-ckpt in another process: it makes threads, and ranks are forked from this one."""

    def run(rank: int) -> None:
        assert main([*map(str, words)]) == 0

    assert forked_ranks.run(1, run, folder / "command.log") == [0], (folder / "command.log").read_text()


def check_went_on(run: SwiftRun, reference: SwiftRun) -> None:
    """At its end the run has what an uninterrupted one has, and its losses are the same ones."""
    for found, wanted in zip(run.states, reference.states, strict=True):
        assert_same(found, wanted)
    assert run.losses == reference.losses
    assert len(run.losses) == STEPS
    assert {state["consumed_train_samples"] for state in run.counters} == {4 * STEPS}


def saved(run: SwiftRun) -> list[int]:
    return [status.step for status in complete_steps(run.root)]


@pytest.mark.shows("ms-swift", "save", "resume")
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_killed_run_goes_on(model: Path, tmp_path: Path, uninterrupted: Any, world: int) -> None:
    """With ms-swift's safetensors beside ours. On two ranks, each has its part of the distributed optimizer."""
    run = killed(model, tmp_path, world, save_safetensors=True)
    step = run.root / "checkpoint-4"
    assert {"args.json", "model.safetensors", "config.json", ROLE} <= set(os.listdir(step))
    assert not (step / "iter_0000004").exists()
    again = resumed(replace(run, poisons=True), mcore_model=step)
    check_went_on(again, uninterrupted(world))
    assert saved(again) == [2, 4, 6]
    assert read_tracker(run.root) == 6
    assert os.readlink(run.root / "last-checkpoint") == "checkpoint-6"
    assert branch_in(run.root / "checkpoint-6" / ROLE) == ((1, 3),)


@pytest.mark.shows("ms-swift", "save", "resume", "async")
@pytest.mark.full
def test_an_async_run_on_two_ranks_goes_on(model: Path, tmp_path: Path, uninterrupted: Any) -> None:
    """From the newest step that is complete, which `--mcore_model <output_dir>` finds."""
    run = killed(model, tmp_path, 2, async_save=True, **TP2)
    assert 2 in saved(run)
    again = resumed(replace(run, poisons=True), mcore_model=run.root)
    check_went_on(again, uninterrupted(2, **TP2))
    assert saved(again)[-1] == 6
    assert os.readlink(run.root / "last-checkpoint") == "checkpoint-6"


@pytest.mark.shows("ms-swift", "LoRA")
def test_lora_saves_the_adapters_alone(model: Path, tmp_path: Path, uninterrupted: Any) -> None:
    run = killed(model, tmp_path, **LORA)
    step = run.root / "checkpoint-4"
    (stored,) = (step / ROLE / "model").glob("*/*.pt")
    names = [name for name in torch.load(stored, weights_only=True) if not name.endswith("_extra_state")]
    assert len(names) == 2 * 4 * 4, "A and B of four linear layers in each of four"
    assert all(".adapter." in name for name in names), names
    again = resumed(run, mcore_adapter=step)
    check_went_on(again, uninterrupted(**LORA))


@pytest.mark.shows("ms-swift", "retention", "parts")
@pytest.mark.full
def test_the_best_checkpoint_stays_after_a_restart(model: Path, tmp_path: Path) -> None:
    """ms-swift counts by the time of folders, and forgets at a restart which checkpoint was the best."""
    run = killed(model, tmp_path, save_steps=1, save_total_limit=2, eval_iters=1)
    assert len(saved(run)) == 2
    merged = run.root / "checkpoint-5-merged"  # as merge_lora makes it
    merged.mkdir()
    again = resumed(run, mcore_model=run.root)
    (state,) = again.counters
    best = state["best_global_step"]
    assert best < 5, "the killed run has to have had the best one"
    assert saved(again) == [best, 6]
    assert state["best_model_checkpoint"] == str(run.root / f"checkpoint-{best}")
    assert not merged.exists()


@pytest.mark.shows("ms-swift", "retention")
@pytest.mark.full
def test_the_step_just_saved_stays_after_a_rollback(model: Path, tmp_path: Path) -> None:
    run = killed(model, tmp_path, save_steps=1)
    again = resumed(run, mcore_model=run.root / "checkpoint-2", train_iters=3, save_total_limit=2)
    assert saved(again) == [2, 3]
    assert os.readlink(run.root / "last-checkpoint") == "checkpoint-3"


@pytest.mark.parametrize(
    ("current", "best", "left"),
    [
        (140, None, [120, 140]),
        (140, 60, [60, 140]),
        (140, 120, [120, 140]),
        (140, 7, [120, 140]),  # the best one is gone
        (80, None, [80, 120, 140]),
        (80, 60, [60, 80, 140]),
        (80, 80, [80, 140]),
    ],
)
def test_what_stays_is_the_newest_the_best_and_the_current_one(
    tmp_path: Path, current: int, best: int | None, left: list[int]
) -> None:
    for step in (60, 80, 120, 140):
        make(tmp_path / f"checkpoint-{step}" / ROLE, step)
        (tmp_path / f"checkpoint-{step}-merged").mkdir()
    trainer: Any = CheckpointTrainer()
    trainer.args = SimpleNamespace(save_total_limit=2)
    trainer.state = SimpleNamespace(iteration=current, best_global_step=best)
    trainer._rotate_checkpoints(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(
        name for step in left for name in (f"checkpoint-{step}", f"checkpoint-{step}-merged")
    )


@pytest.mark.shows("ms-swift", "moving over")
@pytest.mark.full
def test_a_run_of_ms_swifts_own_goes_on_with_ours(model: Path, tmp_path: Path, uninterrupted: Any) -> None:
    stock = killed(model, tmp_path, pipeline=StockSft)
    again = resumed(
        replace(stock, pipeline=pipelines.MegatronSft, poisons=True), mcore_model=stock.root / "checkpoint-4"
    )
    check_went_on(again, uninterrupted())
    assert saved(again) == [6]


@pytest.mark.shows("ms-swift", "moving over")
@pytest.mark.full
def test_adapters_that_ms_swift_saved_go_on_with_ours(model: Path, tmp_path: Path, uninterrupted: Any) -> None:
    stock = killed(model, tmp_path, pipeline=StockSft, **LORA)
    again = resumed(replace(stock, pipeline=pipelines.MegatronSft), mcore_adapter=stock.root / "checkpoint-4")
    check_went_on(again, uninterrupted(**LORA))


@pytest.mark.shows("ms-swift", "going back")
def test_a_run_goes_back_to_ms_swifts_own(model: Path, tmp_path: Path, uninterrupted: Any) -> None:
    run = killed(model, tmp_path, **NOT_DISTRIBUTED)
    back = tmp_path / "back"
    command(tmp_path, "convert", run.root, "--format", "torch_dist", "--output_path", back, "--test")
    again = resumed(replace(run, pipeline=StockSft), mcore_model=back)
    check_went_on(again, uninterrupted(**NOT_DISTRIBUTED))
    assert not saved(again)[2:], "its own pipeline does not save steps of ours"


@pytest.mark.shows("ms-swift", "other layout")
@pytest.mark.full
def test_another_layout_loads_what_megatron_makes_of_it(model: Path, tmp_path: Path) -> None:
    """Ours reads what two tensor-parallel ranks have saved; Megatron's loader reads the same step, converted."""
    run = killed(model, tmp_path, 2, **NOT_DISTRIBUTED, **TP2)
    back = tmp_path / "back"
    command(tmp_path, "convert", run.root, "--format", "torch_dist", "--output_path", back)
    only_loads = {"tensor_model_parallel_size": 1, "train_iters": 4}
    one = replace(run, world=1, root=tmp_path / "elsewhere")
    ours = resumed(replace(one, poisons=True), mcore_model=run.root / "checkpoint-4", **only_loads)
    theirs = resumed(
        replace(one, folder=tmp_path / "theirs" / "killed", pipeline=StockSft), mcore_model=back, **only_loads
    )
    (found,), (wanted,) = ours.states, theirs.states
    # Neither has random states of this layout.
    assert_same(*({name: value for name, value in each.items() if "generator" not in name} for each in (found, wanted)))
    assert ours.counters[0]["consumed_train_samples"] == 16


@pytest.mark.shows("ms-swift", "other layout")
@pytest.mark.full
def test_a_run_goes_on_under_another_layout(model: Path, tmp_path: Path) -> None:
    run = killed(model, tmp_path, 2, **TP2)
    again = resumed(run, mcore_model=run.root / "checkpoint-4", tensor_model_parallel_size=1)
    assert sorted(again.losses) == [*range(1, STEPS + 1)]
    assert saved(again) == [2, 4, 6]


@pytest.mark.full
@pytest.mark.parametrize("tuner", [{}, LORA], ids=["all weights", "lora"])
def test_a_preference_run_goes_on(model: Path, tmp_path: Path, tuner: dict[str, str]) -> None:
    """The DPO trainer, whose reference stays that of the beginning."""
    options = {"rlhf_type": "dpo", **tuner}
    whole = SwiftRun(1, model, tmp_path / "whole", tmp_path / "none", tuple(options.items()), StockRLHF)
    assert whole.start() == [0], whole.log
    run = killed(model, tmp_path, pipeline=pipelines.MegatronRLHF, **options)
    check_went_on(resumed(run, **{"mcore_adapter" if tuner else "mcore_model": run.root / "checkpoint-4"}), whole)


@pytest.mark.full
def test_a_pretraining_goes_on(model: Path, tmp_path: Path) -> None:
    whole = SwiftRun(1, model, tmp_path / "whole", tmp_path / "none", pipeline=StockPretrain)
    assert whole.start() == [0], whole.log
    run = killed(model, tmp_path, pipeline=pipelines.MegatronPretrain)
    check_went_on(resumed(run, mcore_model=run.root), whole)


@pytest.mark.full
@pytest.mark.parametrize("tuner", [{}, LORA], ids=["all weights", "lora"])
def test_merged_weights_are_those_that_ms_swift_writes(model: Path, tmp_path: Path, tuner: dict[str, str]) -> None:
    """mcore-bridge's export of the same step, tensor by tensor: ms-swift's own trainers can start from either."""
    run = killed(model, tmp_path, save_safetensors=True, **tuner)
    step = run.root / "checkpoint-4"
    only = ("--adapters", "only") if tuner else ()
    command(tmp_path, "merge", "--local_dir", step / ROLE, "--target_dir", tmp_path / "merged", *only)
    theirs = load_file(step / ("adapter_model.safetensors" if tuner else "model.safetensors"))
    (file,) = (tmp_path / "merged").rglob("*.safetensors")
    assert_same(load_file(file), theirs)


@pytest.mark.full
def test_pipeline_stages_go_on(model: Path, tmp_path: Path, uninterrupted: Any) -> None:
    layout = {"pipeline_model_parallel_size": 2}
    run = killed(model, tmp_path, 2, **layout)
    check_went_on(resumed(replace(run, poisons=True), mcore_model=run.root), uninterrupted(2, **layout))


@pytest.mark.shows("ms-swift", "precision-aware")
@pytest.mark.full
def test_a_precision_aware_optimizer_goes_on(model: Path, tmp_path: Path) -> None:
    """With transformer-engine's FusedAdam stood in for (fused_adam.py): moments in 16 bits."""
    check_switches(model, tmp_path, fused_adam, use_precision_aware_optimizer=True, exp_avg_dtype="bf16")


@pytest.mark.shows("ms-swift", "offload")
@pytest.mark.full
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_an_offloaded_optimizer_goes_on(model: Path, tmp_path: Path, fraction: float) -> None:
    """With the real HybridDeviceOptimizer, on a simulated device."""
    options = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    check_switches(model, tmp_path, swift_on_cpu.offloading, **options)


def check_switches(model: Path, folder: Path, within: Any, **options: Any) -> None:
    reference = SwiftRun(1, model, folder / "reference", folder / "none", tuple(options.items()), within=within)
    reference = replace(reference, pipeline=pipelines.MegatronSft)
    assert reference.start() == [0], reference.log
    run = killed(model, folder, within=within, **options)
    check_went_on(resumed(replace(run, poisons=True), mcore_model=run.root), reference)


@pytest.mark.full
def test_weights_that_are_safetensors_alone_keep_their_place(model: Path, tmp_path: Path) -> None:
    """With `save_safetensors` and `no_save_optim`, ms-swift keeps iteration and counters beside the safetensors."""
    run = killed(model, tmp_path, save_safetensors=True, no_save_optim=True)
    step = run.root / "checkpoint-4"
    assert not (step / ROLE / "model").exists()
    (state,) = resumed(run, model=step).counters
    assert (state["iteration"], state["consumed_train_samples"]) == (STEPS, 4 * STEPS)


@pytest.mark.full
def test_merged_weights_keep_their_place(model: Path, tmp_path: Path) -> None:
    """ms-swift reads it from `iter_{N}/common.pt`, which it would have copied beside the merged weights."""
    run = killed(model, tmp_path, save_safetensors=True, **LORA)
    merged = run.root / "checkpoint-4-merged"
    assert not (merged / ROLE).exists()
    (state,) = resumed(run, model=f"{merged}/").counters
    assert (state["iteration"], state["consumed_train_samples"]) == (STEPS, 4 * STEPS)
    assert branch_in(run.root / "checkpoint-6" / ROLE) == ((1, 3),)


def test_merged_weights_without_their_checkpoint_say_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    trainer = MegatronTrainer.__new__(MegatronTrainer)
    trainer.args = SimpleNamespace(tuner_type="full", adapters=[], model=str(tmp_path))
    assert trainer._load_iteration() == 4
    assert "put the folder next to the checkpoint from which it was made" in caplog.text


@pytest.mark.full
def test_finetune_begins_anew_with_the_saved_weights(model: Path, tmp_path: Path) -> None:
    """`finetune` is ms-swift's default: weights alone, iteration 0."""
    run = killed(model, tmp_path)
    again = resumed(replace(run, root=tmp_path / "anew"), mcore_model=run.root / "checkpoint-4", finetune=True)
    assert sorted(again.losses) == [*range(1, STEPS + 1)]
    assert again.losses[1] != run.losses[1]


@pytest.mark.full
def test_pinned_checkpoints_stay(model: Path, tmp_path: Path) -> None:
    run = killed(model, tmp_path, save_total_limit=2)
    pin(run.root, 2)
    assert saved(resumed(run, mcore_model=run.root)) == [2, 4, 6]


def test_our_command_takes_the_place_of_ms_swifts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (("save_steps", 3), ("mcore_ckpt", '{"timeout_s": 60}'))
    run = SwiftRun(1, model, tmp_path / "run", tmp_path / "root", options)

    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command: started.append(command) or SimpleNamespace(returncode=0))
    monkeypatch.setattr(sys, "argv", ["swift", "sft", *run.arguments()])
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    runpy.run_module("mcore_ckpt.integrations.swift", run_name="__main__", alter_sys=True)
    ((python, *torchrun, script), arguments) = started[0][:6], started[0][6:]
    assert (python, torchrun) == (sys.executable, ["-m", "torch.distributed.run", "--nproc_per_node", "1"])

    def work(rank: int) -> None:
        swift_on_cpu.enable()
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")

    assert forked_ranks.run(1, work, tmp_path / "log") == [0], (tmp_path / "log").read_text()
    assert saved(run) == [3, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mcore_model": "{root}/checkpoint-4", **LORA},
            "loads only weights that are trained. Use HuggingFace weights: set --model to this folder",
        ),
        ({"mcore_model": "{root}/checkpoint-3"}, "there is no checkpoint"),
        ({"mcore_ckpt": '{"max_to_keep": 3}'}, "--mcore_ckpt has 'max_to_keep', which the framework decides"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    model: Path, tmp_path: Path, steps: SwiftRun, options: dict[str, str], message: str
) -> None:
    (steps.root / "checkpoint-3").mkdir(exist_ok=True)
    given = {name: str(value).replace("{root}", str(steps.root)) for name, value in options.items()}
    run = replace(steps, folder=tmp_path / "refused", options=tuple(given.items()), killed_at=None)
    assert run.start() == [1]
    assert message in run.log


def test_the_places_that_are_replaced_are_all_that_there_are() -> None:
    """So a trainer that no test can run (GRPO and GKD need vLLM) differs from SFT's by its base class alone."""
    own = ("save_checkpoint", "_load_checkpoint", "_rotate_checkpoints", "_load_iteration", "finalize_training")
    folder = Path(base.__file__).parent
    sources = {f"swift.megatron.trainers.{path.stem}": path.read_text() for path in folder.glob("*.py")}
    for name, modules in (("save_mcore_checkpoint", SAVING), ("load_mcore_checkpoint", LOADING)):
        assert {module for module, text in sources.items() if f"{name}(" in text} == set(modules)
    defined = {(module, name) for module, text in sources.items() for name in own if f"def {name}(" in text}
    assert defined == {*((SAVING[0], name) for name in own), (LOADING[1], "_load_checkpoint")}
    assert {name for text in sources.values() for name in re.findall(r"^class (Megatron\w*Trainer)\(", text, re.M)} == {
        *TRAINERS,
        "MegatronRLHFTrainer",
    }
    for ours, theirs in (
        (CheckpointTrainer._save, base.save_mcore_checkpoint),
        (CheckpointTrainer._load, base.load_mcore_checkpoint),
    ):
        assert [*signature(ours).parameters][1:] == [*signature(theirs).parameters]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_megatron_fsdp": True, "tuner_type": "full"}, "--use_megatron_fsdp true is not supported"),
        ({"use_ray": True, "tuner_type": "full"}, "--use_ray true"),
        ({"tuner_type": "lora_llm", "save_safetensors": False}, "would save only the base model"),
    ],
)
def test_kinds_of_training_that_are_not_supported_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        refuse_unsupported(SimpleNamespace(**options))


@pytest.mark.parametrize("given", ['{"timeot_s": 60}', "{timeout_s: 60}", "60"])
def test_wrong_options_of_ours_are_refused_before_anything_is_made(model: Path, given: str) -> None:
    """Not by the first save: a fresh run may train for hours until then."""
    for arguments in (pipelines.SftArguments, pipelines.PretrainArguments, pipelines.RLHFArguments):
        with pytest.raises(InvalidArgumentError, match="--mcore_ckpt"):
            arguments(model=str(model), mcore_ckpt=given)
    trainer: Any = CheckpointTrainer()  # of somebody's own pipeline
    trainer.args = SimpleNamespace(tuner_type="full", mcore_ckpt=given)
    with pytest.raises(InvalidArgumentError, match="--mcore_ckpt"):
        trainer._load_checkpoint()


@pytest.fixture(scope="session")
def steps(model: Path, tmp_path_factory: pytest.TempPathFactory) -> SwiftRun:
    return killed(model, tmp_path_factory.mktemp("steps"))
