"""AReaL's training loop around real engines: MegatronEngine's own methods, megatron-core models on CPU.

What makes the batches, rolls out and evaluates is left out; in which order a trainer makes, loads and saves what it has
is that of PPOTrainer (1.0.4).
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from areal.api import FinetuneSpec, StepInfo
from areal.api.cli_args import EvaluatorConfig, MegatronEngineConfig, OptimizerConfig, RecoverConfig, SaverConfig
from areal.engine import megatron_engine
from areal.utils import recover as stock_recover
from areal.utils import saver as stock_saver
from areal.utils.evaluator import Evaluator

from mcore_ckpt import CheckpointConfig
from mcore_ckpt.integrations.areal import CheckpointedEngine, CheckpointedTrainer
from tests.distributed.snapshot import poison, snapshot
from tests.distributed.training import DTYPES, Layout, Training, build, train
from tests.support.fused_adam import fused_adam

STEPS_PER_EPOCH = 4
EPOCHS = 2
TIMEOUT_S = 40.0

# Else it asks for groups of gloo, which has threads.
megatron_engine.get_megatron_optimizer = partial(megatron_engine.get_megatron_optimizer, use_gloo_process_groups=False)

NAMES = {"experiment_name": "exp", "trial_name": "trial"}


def ft_spec() -> FinetuneSpec:
    return FinetuneSpec(total_train_epochs=EPOCHS, dataset_size=2 * STEPS_PER_EPOCH, train_batch_size=2)


class BareEngine(megatron_engine.MegatronEngine):
    """A MegatronEngine whose model is handed over: `initialize` wants a GPU, a tokenizer and HuggingFace weights.

    `save`, `load`, `destroy` and `_create_optimizer` are AReaL's.
    """

    def __init__(self, layout: Layout, seed: int, async_save: bool = False, hf_config: Any = None) -> None:
        optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps_proportion=0.25)
        ddp = SimpleNamespace(use_distributed_optimizer=layout.distributed_optimizer)
        exp_avg, exp_avg_sq = (str(DTYPES[name]).removeprefix("torch.") for name in layout.moment_dtypes)
        megatron = MegatronEngineConfig(
            ddp=ddp,
            async_save=async_save,
            use_precision_aware_optimizer=layout.precision_aware,
            exp_avg_dtype=exp_avg,
            exp_avg_sq_dtype=exp_avg_sq,
        )
        super().__init__(
            SimpleNamespace(
                dtype={"fp32": "float32", "bf16": "bfloat16"}[layout.precision],
                optimizer=optimizer,
                megatron=megatron,
                enable_tree_training=False,
                use_lora=layout.frozen is not None,
                is_critic=False,
            )
        )
        self.logger = logging.getLogger("BareEngine")
        self.layout = layout
        self.hf_config, self.tokenizer = hf_config, None
        self.process_group_initialized = True
        self.model = build(layout, seed).model
        self.dtype = DTYPES[layout.precision]
        with fused_adam() if layout.precision_aware else contextlib.nullcontext():
            self._create_optimizer(ft_spec())

    @property
    def training(self) -> Training:
        return Training(self.layout, self.model, self.optimizer, self.lr_scheduler)

    def set_version(self, version: int) -> None:
        self.version = version


class Engine(CheckpointedEngine, BareEngine):
    """With our checkpointer, as MegatronPPOActor is."""

    checkpoint_config = CheckpointConfig(timeout_s=TIMEOUT_S)


class Data:
    """A data loader with a position, and a generator that shuffles; as StatefulDataLoader, it knows where it is."""

    def __init__(self) -> None:
        self.position = 0
        self.generator = torch.Generator().manual_seed(5)
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def next(self) -> int:
        self.position += 1
        self.drawn.append(int(torch.randint(1000, (), generator=self.generator)))
        return self.drawn[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.get_state(), "drawn": list(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.drawn = state["position"], list(state["drawn"])
        self.generator.set_state(state["generator"])


class Stats:
    """The part of StatsLogger that is saved."""

    def __init__(self) -> None:
        self.last = -1

    def state_dict(self) -> dict[str, Any]:
        return {"last_commit_step": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last_commit_step"]


class StockTrainer:
    """What PPOTrainer does with its engines, Saver and RecoverHandler, in its order."""

    def __init__(self, engines: dict[str, Any], root: Path, saver: dict[str, Any], recover: dict[str, Any]) -> None:
        self.actor, self.critic = engines["default"], engines.get("critic")
        self.train_dataloader = Data()
        spec = ft_spec()
        config = {**NAMES, "fileroot": str(root)}
        self.evaluator = Evaluator(EvaluatorConfig(**config, freq_steps=3), spec)
        self.saver = stock_saver.Saver(SaverConfig(**config, **saver), spec)
        self.recover_handler = stock_recover.RecoverHandler(RecoverConfig(**config, **recover), spec)
        self.stats_logger = Stats()
        self.recover_info = self.recover_handler.load(
            self.actor, self.saver, self.evaluator, self.stats_logger, self.train_dataloader
        )

    @property
    def start_step(self) -> int:
        return self.recover_info.last_step_info.next().global_step if self.recover_info is not None else 0

    def train(self, last_step: int) -> None:
        """Up to and without `last_step`."""
        for step in range(self.start_step, last_step):
            self.train_step(step)

    def train_step(self, step: int, save: bool = True) -> None:
        self.train_dataloader.next()
        self.saver.maybe_wait_for_staging()
        for engine in self.engines.values():
            train(engine.training, step, step + 1)
        if save:
            self.save(step)

    def save(self, step: int) -> None:
        epoch, epoch_step = divmod(step, STEPS_PER_EPOCH)
        for name, engine in self.engines.items():
            self.saver.save(engine, epoch, epoch_step, step, name=name)
        self.recover_handler.dump(
            self.engines,
            StepInfo(epoch=epoch, epoch_step=epoch_step, global_step=step, steps_per_epoch=STEPS_PER_EPOCH),
            self.saver,
            self.evaluator,
            self.stats_logger,
            self.train_dataloader,
        )
        self.evaluator.evaluate(lambda: None, epoch, epoch_step, step)
        self.stats_logger.last = step

    @property
    def engines(self) -> dict[str, Any]:
        return {"default": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def state(self) -> dict[str, Any]:
        """All that a recovered training must have as the one that never stopped had it.

        Not the evaluator's counts: AReaL saves them before it evaluates, so that a recovered one is behind by a step.
        """
        found: dict[str, Any] = {}
        for name, engine in self.engines.items():
            found |= {f"{name}.{key}": value for key, value in snapshot(engine.training).items()}
        data = self.train_dataloader.state_dict()
        found |= {"data.position": data["position"], "data.generator": data["generator"], "data.drawn": data["drawn"]}
        return found

    def poison(self) -> None:
        for engine in self.engines.values():
            poison(engine.training)

    def close(self) -> None:
        self.saver.finalize()
        for engine in self.engines.values():
            if engine.checkpointer is not None:
                engine.checkpointer.close()


class Trainer(CheckpointedTrainer, StockTrainer):
    """As a user of PPOTrainer switches over."""
