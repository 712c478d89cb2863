"""One run of Megatron-Bridge's `pretrain()` on several ranks: a tiny GPT, Bridge's mock data and configuration."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.transformer.enums import AttnBackend
from modelopt.torch.opt import ModeloptStateManager

from mcore_ckpt.steps import commit
from tests.bridge import bridge_on_cpu
from tests.distributed import forked_ranks
from tests.distributed.snapshot import Snapshot, poison, snapshot
from tests.support.fused_adam import fused_adam
from tests.support.simulated_device import simulated_device
from tests.support.walk import block, section

ITERATIONS = 6
SEQUENCE = 16
# No dropout, because generators fit one layout only; and the form of Bridge's own that loads under any layout.
LEFT = {
    "model.tensor_model_parallel_size": 2,
    "model.hidden_dropout": 0.0,
    "checkpoint.dist_ckpt_optim_fully_reshardable": True,
    "checkpoint.save_interval": 4,
}
OURS = "mcore_ckpt.integrations.bridge.McoreCheckpointManager"
# The lines that a start script has, as the document prints them.
LINES = block(section("integrations.md", "Megatron-Bridge"), "python", "custom_manager_class")


def _is_converted(model: torch.nn.Module) -> bool:
    return any(hasattr(module, "_modelopt_state") for module in model.modules())


# The class is a stand-in of bridge_on_cpu. As in the real one (0.19), a module that was converted has a state.
ModeloptStateManager.is_converted = staticmethod(_is_converted)


@dataclass(frozen=True)
class BridgeRun:
    """A run, and what it leaves.

    Attributes:
        folder: what the run leaves beside its checkpoints: losses, the state of each rank, what was printed.
        root: `checkpoint.save` and `checkpoint.load`; None for a run without.
        options: values of Bridge's configuration by their path, such as "checkpoint.async_save".
        ours: whether `checkpoint.custom_manager_class` is our manager.
        killed_at: all ranks are killed before they train this iteration.
        held_at: rank 0 gets no further in committing this step than to its rename.
        adapters: makes `cfg.peft`.
        prepare: is called on each rank before the training.
    """

    world: int
    folder: Path
    root: Path | None
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = True
    killed_at: int | None = None
    held_at: int | None = None
    adapters: Callable[[], Any] | None = None
    prepare: Callable[[], None] | None = None

    def start(self) -> list[int]:
        """What the ranks exited with."""
        self.folder.mkdir()
        return forked_ranks.run(self.world, self._work, self.folder / "log")

    def check(self) -> BridgeRun:
        """Runs to the end."""
        assert self.start() == [0] * self.world, self.log
        return self

    @property
    def log(self) -> str:
        """The end of what all ranks have printed."""
        return (self.folder / "log").read_text()[-6000:]

    @property
    def losses(self) -> dict[int, tuple[float, float]]:
        """Of each iteration the loss and the gradient norm, from the last rank."""
        lines = (self.folder / "losses.jsonl").read_text().splitlines()
        return {line["step"]: (line["loss"], line["norm"]) for line in map(json.loads, lines)}

    @property
    def saved(self) -> list[tuple[int, int]]:
        """Of each `on_checkpoint_save` that rank 0 was told of: the iteration it was in, and the newest on disk."""
        path = self.folder / "saved.jsonl"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def states(self) -> list[Snapshot]:
        """What each rank had at its end."""
        return [torch.load(self._state_file(rank), weights_only=False) for rank in range(self.world)]

    def _state_file(self, rank: int) -> Path:
        return self.folder / f"state_{rank}.pt"

    def _work(self, rank: int) -> None:
        bridge_on_cpu.enable()
        config = configuration(self.root, self.options)
        if self.ours:
            exec(LINES, {"config": config})
            _poison_before_loads()
        config.peft = self.adapters() if self.adapters else None
        if self.held_at is not None:
            _hold_commit(f"global_steps_{self.held_at}")
        if self.prepare is not None:
            self.prepare()
        with _stand_in(self.options):
            pretrain(config, forward_step, callbacks=[_Recorder(self, rank)])


class _Recorder(Callback):
    """Writes down what a run does, and kills its rank."""

    def __init__(self, run: BridgeRun, rank: int) -> None:
        self._run, self._rank = run, rank

    def on_train_step_start(self, context: CallbackContext) -> None:
        if context.state.train_state.step + 1 == self._run.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_step_end(self, context: CallbackContext) -> None:
        if self._rank == self._run.world - 1:  # of the last pipeline stage
            loss = float(context.loss_dict["lm loss"])
            line = {"step": context.state.train_state.step + 1, "loss": loss, "norm": float(context.grad_norm)}
            with (self._run.folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def on_train_end(self, context: CallbackContext) -> None:
        state = snapshot(training_of(context.model, context.optimizer, context.scheduler))
        train_state = {f"train_state.{name}": value for name, value in vars(context.state.train_state).items()}
        torch.save({**state, **train_state}, self._run._state_file(self._rank))

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        if self._rank == 0:
            tracker = Path(context.state.cfg.checkpoint.save) / "latest_checkpointed_iteration.txt"
            with (self._run.folder / "saved.jsonl").open("a") as file:
                file.write(json.dumps((context.state.train_state.step, int(tracker.read_text()))) + "\n")


def training_of(model: Any, optimizer: Any, scheduler: Any) -> Any:
    return SimpleNamespace(
        layout=SimpleNamespace(overlap_param_gather=False), model=model, optimizer=optimizer, scheduler=scheduler
    )


def configuration(root: Path | None, options: Mapping[str, Any]) -> ConfigContainer:
    """Bridge's configuration, small enough for a CPU."""
    folder = None if root is None else str(root)
    dtypes = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    # Kernels for CUDA alone.
    fusions = ("gradient_accumulation", "bias_activation", "bias_dropout", "masked_softmax", "cross_entropy_loss")
    found = ConfigContainer(
        model=GPTModelProvider(
            num_layers=4,
            hidden_size=32,
            ffn_hidden_size=64,
            num_attention_heads=4,
            seq_length=SEQUENCE,
            position_embedding_type="rope",
            hidden_dropout=0.1,  # so that a resumed run that lacks its random states is another run
            attention_dropout=0.0,
            transformer_layer_spec=local_layer_spec,
            attention_backend=AttnBackend.local,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            make_vocab_size_divisible_by=16,
            **{f"{name}_fusion": False for name in fusions},
            **dtypes,
        ),
        train=TrainingConfig(train_iters=ITERATIONS, global_batch_size=8, micro_batch_size=2),
        validation=ValidationConfig(eval_interval=100, eval_iters=0),
        optimizer=OptimizerConfig(optimizer="adam", bf16=True, use_distributed_optimizer=True, lr=1e-2, min_lr=1e-4),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            lr_decay_iters=2 * ITERATIONS,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False),
        dataset=MockGPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=SEQUENCE,
            num_workers=0,
            dataloader_type="single",
        ),
        logger=LoggerConfig(log_interval=1, logging_level=logging.WARNING),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=131),
        checkpoint=CheckpointConfig(save=folder, load=folder, save_interval=2),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(distributed_backend="gloo"),
    )
    for path, value in options.items():
        section, _, name = path.rpartition(".")
        owner = functools.reduce(getattr, section.split("."), found)
        assert hasattr(owner, name), path
        setattr(owner, name, value)
    return found


def _poison_before_loads() -> None:
    """Whatever a load of ours leaves as it was makes the run another one."""
    from mcore_ckpt.integrations.kit.loop import LoopCheckpoints

    load = LoopCheckpoints.load

    def poisoned(checkpoints: Any, training: Any, args: Any, config: Any, **words: Any) -> Any:
        if not (args["finetune"] or args["no_load_optim"] or config.skip_frozen):
            poison(training_of(training.model, training.optimizer, training.lr_scheduler))
        return load(checkpoints, training, args, config, **words)

    LoopCheckpoints.load = poisoned


@contextlib.contextmanager
def _stand_in(options: Mapping[str, Any]) -> Iterator[None]:
    """What Bridge's switches of the optimizer need that no CPU has."""
    if options.get("optimizer.optimizer_cpu_offload"):
        # What saves and loads is to see tensors as they are.
        for name in ("__init__", "step"):
            setattr(HybridDeviceOptimizer, name, _on_device(getattr(HybridDeviceOptimizer, name)))
        yield
    else:
        # Megatron's DistributedOptimizer cannot load what it has saved with torch's own Adam, which it takes without
        # transformer-engine.
        with fused_adam():
            yield


def _on_device(method: Callable[..., Any]) -> Callable[..., Any]:
    def on_device(*args: Any, **kwargs: Any) -> Any:
        with simulated_device():
            return method(*args, **kwargs)

    return on_device


def _hold_commit(folder: str) -> None:
    """Rank 0 gets no further in committing this folder, or what is below it, than to the rename."""
    publish = commit.publish

    def hold(staging: Path, role_dir: Path, attempt: str) -> None:
        if f"/{folder}/" in f"{role_dir}/":
            threading.Event().wait()
        publish(staging, role_dir, attempt)

    commit.publish = hold
