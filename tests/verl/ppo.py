"""What verl's PPO trainer does with checkpoints, with the workers that it has made by ray: actor and critic.

The driver is in rank 0, and its calls reach the workers of all ranks by a broadcast in the place of ray. There is no
rollout: both models learn from the same sequences.
"""

import functools
import os
import signal
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests.verl import engine_on_cpu, sft
from tests.verl.run import Run

if find_spec("verl.workers.megatron_workers") is None:
    from tests.verl import ppo_engines as kind
else:
    from tests.verl import ppo_workers as kind

try:
    from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
    from verl.trainer.ppo.v1 import get_trainer_cls
except ImportError:  # they are new in 0.9
    build_checkpoint_callback, get_trainer_cls = lambda config: None, None

STEPS = 4
BATCH = 8

ACTOR = "actor_rollout_ref.actor"
OURS = [f"{role}.checkpoint._target_=mcore_ckpt.integrations.verl.McoreCkptConfig" for role in (ACTOR, "critic")]


def both(option: str) -> list[str]:
    """An option of actor and critic alike."""
    return [f"{role}.{option}" for role in (ACTOR, "critic")]


@dataclass(frozen=True)
class PPORun(Run):
    """A run of a PPO trainer.

    Attributes:
        saves: the steps after which the trainer saves.
        killed_at: all ranks are killed before they train this step.
        held: a folder in whose commit rank 0 gets no further than to the rename, as "global_step_3/critic".
    """

    saves: tuple[int, ...] = ()
    killed_at: int | None = None
    held: str | None = None

    @property
    def resumed_from(self) -> int:
        return int((self.folder / "resumed_from").read_text())

    def configuration(self) -> Any:
        return configuration(self.root, self.model, self.overrides)

    def train(self, config: Any) -> dict[str, Any]:
        if self.held is not None:
            sft.hold_commit(self.held)
        with sft.stand_in(config.actor_rollout_ref.actor.optim.get("override_optimizer_config") or {}):
            return self._train(config)

    def _train(self, config: Any) -> dict[str, Any]:
        workers = {"actor": kind.make_actor(config), "critic": kind.make_critic(config)}
        if dist.get_rank() == 0:
            self._drive(config, workers)
            broadcast(None)
        else:
            serve(workers)
        return {role: worker.engine for role, worker in workers.items()}

    def _drive(self, config: Any, workers: dict[str, "Worker"]) -> None:
        """The part of the trainer's `fit` that is about checkpoints."""
        trainer = make_trainer(config, workers)
        trainer._load_checkpoint()
        (self.folder / "resumed_from").write_text(str(trainer.global_steps))
        batches = iter(trainer.train_dataloader)
        while trainer.global_steps < STEPS:
            if trainer.global_steps + 1 == self.killed_at:
                # So that of a step with two models just one is there.
                trainer.actor_rollout_wg.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            batch = next(batches)
            trainer.actor_rollout_wg.train(batch)
            trainer.critic_wg.train(batch)
            trainer.global_steps += 1
            if trainer.global_steps in self.saves:
                trainer._save_checkpoint()


class Worker(Protocol):
    """A rank's part of a worker group. `engine` has the model, the optimizer and the LR scheduler, as verl's has."""

    engine: Any
    save_checkpoint: Any
    load_checkpoint: Any

    def wait(self) -> None:
        """Returns once no save is under way."""

    def train(self, batch: list[Any]) -> None:
        """One step on this rank's share of the batch."""


class Group:
    """What the driver calls: all ranks do it."""

    def __init__(self, role: str, worker: Worker) -> None:
        self._role, self._worker = role, worker

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            broadcast((self._role, name, args, kwargs))
            getattr(self._worker, name)(*args, **kwargs)

        return call


def broadcast(call: Any) -> Any:
    """Rank 0's, on all ranks."""
    box = [call]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def serve(workers: dict[str, Worker]) -> None:
    """Does what the driver calls, until it has no more."""
    while (call := broadcast(None)) is not None:
        role, name, args, kwargs = call
        getattr(workers[role], name)(*args, **kwargs)


@functools.cache  # it takes a second, and runs that go on with a killed one have the same
def configuration(root: Path, model: Path, overrides: tuple[str, ...]) -> Any:
    engines = [option for role in (ACTOR, "critic") for option in engine_on_cpu.engine_options(f"{role}.megatron")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            kind.NAME,
            overrides=[
                *(*kind.OPTIONS, *engines),
                *(f"{model_at}={model}" for model_at in ("actor_rollout_ref.model.path", "critic.model.path")),
                *both("optim.lr=1e-2"),
                *both(f"optim.total_training_steps={STEPS}"),
                *both("use_dynamic_bsz=False"),
                *both("ppo_micro_batch_size_per_gpu=2"),
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                f"trainer.default_local_dir={root}",
                *overrides,
            ],
        )


def make_trainer(config: Any, workers: dict[str, Worker]) -> Any:
    """The trainer that main_ppo chooses, with its workers already made: making them is ray's business."""
    is_new = get_trainer_cls is not None and config.trainer.use_v1
    of = get_trainer_cls(config.trainer.v1.trainer_mode) if is_new else RayPPOTrainer
    trainer: Any = of.__new__(of)
    trainer.config, trainer.use_critic, trainer.global_steps = config, True, 0
    trainer.trainer_mode, trainer.checkpoint_callback = "sync", build_checkpoint_callback(config)
    trainer.actor_rollout_wg, trainer.critic_wg = (Group(role, worker) for role, worker in workers.items())
    trainer.train_dataloader = StatefulDataLoader(
        sft.Sequences(None, None, None, 0),
        batch_size=BATCH,
        collate_fn=list,
        generator=torch.Generator(),  # not the one that the dropout has
    )
    return trainer
