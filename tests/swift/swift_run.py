"""One run of an SFT pipeline of ms-swift on several ranks, by its own command line, small enough for a CPU."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from swift.megatron.pipelines.train.sft import MegatronSft as StockSft

from tests.distributed import forked_ranks
from tests.distributed.snapshot import Snapshot, poison, snapshot
from tests.swift import swift_on_cpu

STEPS = 6

_OPTIONS = {
    # What a CPU can do.
    "ddp_backend": "gloo",
    "torch_dtype": "bfloat16",
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    "dataloader_pin_memory": False,
    # So that a resumed run that lacks its random states is another run.
    "megatron_extra_kwargs": '{"hidden_dropout": 0.1}',
    # A small run.
    "model_type": "qwen3",
    "template": "qwen3",
    "dataset": "rows of swift_on_cpu",
    "lazy_tokenize": True,
    "max_length": 64,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": STEPS,
    "lr": 1e-2,
    "lr_warmup_iters": 1,
    "logging_steps": 1,
    "eval_iters": 0,
    "add_version": False,
    "check_model": False,
    "save_safetensors": False,
}


@dataclass(frozen=True)
class SwiftRun:
    """A run, and what it leaves.

    Attributes:
        model: the folder of the HuggingFace model.
        folder: what the run leaves beside its checkpoints: the state of each rank, and what was printed.
        root: `output_dir`.
        options: on ms-swift's command line, beside those of all runs here.
        pipeline: ms-swift's, or ours.
        killed_at: all ranks are killed before they train this iteration's successor.
        within: a context for the whole run of a rank.
        poisons: fills the state with NaN before it is loaded.
    """

    world: int
    model: Path
    folder: Path
    root: Path
    options: tuple[tuple[str, Any], ...] = ()
    pipeline: type[StockSft] = StockSft
    killed_at: int | None = None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    poisons: bool = False

    def start(self) -> list[int]:
        """Returns what the ranks exited with."""
        self.folder.mkdir()
        return forked_ranks.run(self.world, self._work, self.folder / "log")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def losses(self) -> dict[int, tuple[float, float, float]]:
        """By iteration: loss, gradient norm and learning rate, as ms-swift has logged them."""
        lines = [json.loads(line) for line in (self.root / "logging.jsonl").read_text().splitlines()]
        steps = {int(line["iteration"].partition("/")[0]): line for line in lines if "loss" in line}
        return {step: (line["loss"], line["grad_norm"], line["learning_rate"]) for step, line in steps.items()}

    @property
    def states(self) -> list[Snapshot]:
        """What each rank had at its end."""
        return [torch.load(self._state_file(rank), weights_only=False) for rank in range(self.world)]

    @property
    def counters(self) -> list[dict[str, Any]]:
        """ms-swift's TrainerState of each rank at its end."""
        return [
            torch.load(self._state_file(rank).with_suffix(".state"), weights_only=False) for rank in range(self.world)
        ]

    def _state_file(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.pt"

    def arguments(self) -> Sequence[str]:
        """The command line."""
        options = {**_OPTIONS, "model": self.model, "output_dir": self.root, **dict(self.options)}
        return [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]

    def _work(self, rank: int) -> None:
        swift_on_cpu.enable()
        with self.within():
            pipeline = self.pipeline(self.arguments())
            trainers = _keep_trainer(pipeline, self.killed_at, self.poisons)
            pipeline.main()
        (trainer,) = trainers
        torch.save(snapshot(_training(trainer)), self._state_file(rank))
        torch.save(vars(trainer.state), self._state_file(rank).with_suffix(".state"))


def _keep_trainer(pipeline: Any, killed_at: int | None, poisons: bool) -> list[Any]:
    """Returns a list for the trainer that the pipeline is going to make."""
    kept: list[Any] = []
    prepare = pipeline.prepare_trainer

    def prepare_trainer() -> Any:
        trainer = prepare()
        kept.append(trainer)
        _give_generator(trainer)
        if killed_at is not None:
            _kill_at(trainer, killed_at)
        return trainer

    pipeline.prepare_trainer = prepare_trainer
    if poisons:
        _poison_before_load()
    return kept


def _give_generator(trainer: Any) -> None:
    """Gives data loaders a generator of their own.

    An iterator begins by drawing a number, here from the generator that the dropout has, too. On a GPU the dropout has
    the GPU's.
    """
    create = trainer._create_dataloader

    def create_dataloader(*args: Any) -> Any:
        loader = create(*args)
        loader.generator = torch.Generator()
        return loader

    trainer._create_dataloader = create_dataloader


def _kill_at(trainer: Any, iteration: int) -> None:
    run = trainer.run_train_step

    def run_train_step(*args: Any) -> Any:
        if trainer.state.iteration == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*args)

    trainer.run_train_step = run_train_step


def _poison_before_load() -> None:
    from mcore_ckpt.integrations.swift.trainer import CheckpointTrainer

    load = CheckpointTrainer._load_checkpoint

    def load_checkpoint(trainer: Any) -> None:
        poison(_training(trainer))
        load(trainer)

    CheckpointTrainer._load_checkpoint = load_checkpoint  # type: ignore[method-assign]


def _training(trainer: Any) -> Any:
    return SimpleNamespace(
        layout=SimpleNamespace(overlap_param_gather=False),
        model=trainer.wrapped_models,
        optimizer=trainer.optimizer,
        scheduler=trainer.opt_param_scheduler,
    )
