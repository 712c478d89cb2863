"""A run of verl's own SFT trainer, by its own configuration, small enough for a CPU."""

import json
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_on_cpu
import ranks
import torch
from hydra import compose, initialize_config_module
from snapshot import Snapshot, snapshot
from torch.utils.data import Dataset
from verl.trainer.sft_trainer import SFTTrainer

from mcore_ckpt.storage import commit

VOCABULARY = 132
"""What tensor parallelism can halve: mbridge pads nothing."""

SEQUENCES = 64
STEPS = 6

OURS = "checkpoint._target_=mcore_ckpt.integrations.verl.McoreCkptConfig"


class Sequences(Dataset):
    """Takes the place of verl's dataset (`data.custom_cls`): its parquet files need pandas."""

    def __init__(self, parquet_files: Any, tokenizer: Any, config: Any, processor: Any, max_samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(8, 16, (SEQUENCES,), generator=generator)
        self._ids = [torch.randint(3, VOCABULARY, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._ids[index]
        places = torch.arange(len(ids))
        return {"input_ids": ids, "position_ids": places, "loss_mask": (places > 2).long()}


@dataclass(frozen=True)
class Run:
    """One run of the trainer, on several ranks.

    Attributes:
        folder: what the run leaves beside its checkpoints: losses, the state of each rank, what was printed.
        root: `trainer.default_local_dir`.
        overrides: of the configuration, as on verl's command line.
        killed_at: all ranks are killed before they train this step.
        held_at: rank 0 gets no further in committing this step than to its rename.
        saves: the trainer always saves at its end; what verl's own engine takes for that is longer than all else here.
    """

    world: int
    model: Path
    folder: Path
    root: Path
    overrides: tuple[str, ...] = ()
    killed_at: int | None = None
    held_at: int | None = None
    saves: bool = True

    def start(self) -> list[int]:
        """What the ranks exited with."""
        self.folder.mkdir()
        config = configuration(self.root, self.model, self.overrides)
        return ranks.start(self.world, partial(self._work, config), self.folder / "log")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def losses(self) -> dict[int, tuple[float, float, float]]:
        """Of each step the loss, the gradient norm and the learning rate, as the trainer has logged them."""
        lines = [json.loads(line) for line in (self.folder / "losses.jsonl").read_text().splitlines()]
        fields = ("train/loss", "train/grad_norm", "train/lr")
        return {line["step"]: tuple(line["data"][field] for field in fields) for line in lines}

    @property
    def states(self) -> list[Snapshot]:
        """What each rank had at its end."""
        return [torch.load(self._state_file(rank), weights_only=False) for rank in range(self.world)]

    def _state_file(self, rank: int) -> Path:
        return self.folder / f"state_{rank}.pt"

    def _work(self, config: Any) -> None:
        engine_on_cpu.enable()
        os.environ["VERL_FILE_LOGGER_PATH"] = str(self.folder / "losses.jsonl")
        if self.held_at is not None:
            hold_commit(f"global_step_{self.held_at}")
        trainer = SFTTrainer(config)
        # Of its own: an iterator begins by drawing a number, here from the generator that the dropout has, too. On a
        # GPU the dropout has the GPU's.
        trainer.train_dataloader.generator = torch.Generator()
        if self.killed_at is not None:
            _kill_before(trainer, self.killed_at)
        if not self.saves:
            trainer.ckpt_handler.save_checkpoint = lambda step: None
        trainer.fit()
        torch.save(state(trainer.engine), self._state_file(torch.distributed.get_rank()))


def configuration(root: Path, model: Path, overrides: Sequence[str]) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "sft_trainer_engine",
            overrides=[
                *("engine=megatron", "optim=megatron", *engine_on_cpu.engine_options("engine")),
                f"model.path={model}",
                "model.use_remove_padding=False",
                *("optim.lr=1e-2", "optim.lr_warmup_steps=4", "optim.lr_decay_style=cosine"),
                *(f"data.custom_cls.path={__file__}", "data.custom_cls.name=Sequences"),
                *("data.train_batch_size=8", "data.micro_batch_size_per_gpu=2", "data.use_dynamic_bsz=False"),
                "data.num_workers=0",
                *("trainer.device=cpu", "trainer.logger=[file]", f"trainer.default_local_dir={root}"),
                *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2"),
                *overrides,
            ],
        )


def state(engine: Any) -> Snapshot:
    """All that an engine has, loaded back if it is offloaded."""
    engine.to("cuda")
    # No gather is overlapped here.
    training: Any = SimpleNamespace(
        layout=SimpleNamespace(overlap_param_gather=False),
        model=engine.module,
        optimizer=engine.optimizer,
        scheduler=engine.lr_scheduler,
    )
    return snapshot(training)


def _kill_before(trainer: SFTTrainer, step: int) -> None:
    client, first = trainer.training_client, trainer.resume_global_step + 1
    steps = iter(range(first, STEPS + 1))
    train_batch = client.train_batch

    def train_or_die(data: Any) -> Any:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_batch(data=data)

    client.train_batch = train_or_die


def hold_commit(folder: str) -> None:
    """Rank 0 gets no further in committing this folder, or what is below it, than to the rename."""
    publish = commit.publish

    def hold(staging: Path, role_dir: Path, attempt: str) -> None:
        if f"/{folder}/" in f"{role_dir}/":
            threading.Event().wait()
        publish(staging, role_dir, attempt)

    commit.publish = hold
