"""A run of verl's own SFT trainer, by its own configuration, small enough for a CPU."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import verl
from hydra import compose, initialize_config_module
from megatron.core import utils
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from packaging.version import Version
from torch.utils.data import Dataset
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tracking

from mcore_ckpt.steps import commit
from tests.support.fused_adam import fused_adam
from tests.support.simulated_device import simulated_device
from tests.verl import engine_on_cpu
from tests.verl.run import Run

VOCABULARY = 132
"""What tensor parallelism can halve: mbridge pads nothing."""

SEQUENCES = 64
STEPS = 6

OURS = "checkpoint._target_=mcore_ckpt.integrations.verl.McoreCkptConfig"


class Sequences(Dataset):
    """Takes the place of verl's dataset (`data.custom_cls`): its parquet files need pandas."""

    def __init__(self, parquet_files: Any, tokenizer: Any, config: Any, max_samples: int, **of_some: Any) -> None:
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
class SFTRun(Run):
    """A run of the SFT trainer.

    Attributes:
        killed_at: all ranks are killed before they train this step.
        held_at: rank 0 gets no further in committing this step than to its rename.
        trainer: verl's, or ours.
        saves: the trainer always saves at its end; what verl's own engine takes for that is longer than all else here.
    """

    killed_at: int | None = None
    held_at: int | None = None
    trainer: type[SFTTrainer] = SFTTrainer
    saves: bool = True

    @property
    def losses(self) -> dict[int, tuple[float, float, float]]:
        """Of each step the loss, the gradient norm and the learning rate, as the trainer has logged them."""
        lines = [json.loads(line) for line in (self.folder / "losses.jsonl").read_text().splitlines()]
        fields = ("train/loss", "train/grad_norm", "train/lr")
        return {line["step"]: tuple(line["data"][field] for field in fields) for line in lines}

    def configuration(self) -> Any:
        return configuration(self.root, self.model, self.overrides)

    def train(self, config: Any) -> dict[str, Any]:
        os.environ["VERL_FILE_LOGGER_PATH"] = str(self.folder / "losses.jsonl")
        # verl 0.6 buffers what it writes until its logger is collected, which may never be.
        tracking.open = partial(open, buffering=1)
        if self.held_at is not None:
            hold_commit(f"global_step_{self.held_at}")
        with stand_in(config.optim.override_optimizer_config or {}):
            return self._train(config)

    def _train(self, config: Any) -> dict[str, Any]:
        trainer = self.trainer(config)
        # Of its own: an iterator begins by drawing a number, here from the generator that the dropout has, too. On a
        # GPU the dropout has the GPU's.
        trainer.train_dataloader.generator = torch.Generator()
        if self.killed_at is not None:
            _kill_before(trainer, self.killed_at)
        if not self.saves:
            trainer.ckpt_handler.save_checkpoint = lambda step: None
        trainer.fit()
        return {"model": trainer.engine}


@contextlib.contextmanager
def stand_in(options: Any) -> Iterator[None]:
    """What verl's switches of the optimizer need that no CPU has."""
    called: set[str] = set()
    if options.get("optimizer_cpu_offload"):
        utils.get_te_version = lambda: Version("0.0")  # None without transformer-engine, which 0.16 compares
        # What saves and loads is to see tensors as they are.
        for name in ("__init__", "step"):
            setattr(HybridDeviceOptimizer, name, _on_device(getattr(HybridDeviceOptimizer, name), called))
        yield
        assert called == {"__init__", "step"}
    elif options.get("use_precision_aware_optimizer"):
        with fused_adam():
            yield
    else:
        yield


def _on_device(method: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    def on_device(*args: Any, **kwargs: Any) -> Any:
        called.add(method.__name__)
        with simulated_device():
            return method(*args, **kwargs)

    return on_device


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
                *("data.train_batch_size=8", "data.micro_batch_size_per_gpu=2"),
                # 0.6 cannot split a batch otherwise with a tensordict as new as this one.
                f"data.use_dynamic_bsz={verl.__version__.startswith('0.6')}",
                "++data.num_workers=0",
                *("trainer.device=cpu", "trainer.logger=[file]", f"trainer.default_local_dir={root}"),
                *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2"),
                *overrides,
            ],
        )


def _kill_before(trainer: SFTTrainer, step: int) -> None:
    # The trainer of 0.6 has the engine itself in the place of a worker.
    client, first = getattr(trainer, "training_client", trainer.engine), trainer.resume_global_step + 1
    steps = iter(range(first, STEPS + 1))
    train_batch = client.train_batch

    def train_or_die(**arguments: Any) -> Any:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_batch(**arguments)

    client.train_batch = train_or_die


def hold_commit(folder: str) -> None:
    """Rank 0 gets no further in committing this folder, or what is below it, than to the rename."""
    publish = commit.publish

    def hold(staging: Path, role_dir: Path, attempt: str) -> None:
        if f"/{folder}/" in f"{role_dir}/":
            threading.Event().wait()
        publish(staging, role_dir, attempt)

    commit.publish = hold
