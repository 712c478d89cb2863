"""A run of verl's asynchronous trainer with its real queue, as far as checkpoints go.

The trainer's own `_load_checkpoint`, `_save_checkpoint` and `_reissue_inflight_prompts` run. Stood in for are rollouts
(a prompt in the queue waits until it is trained), ray's processes (`queue_here`) and the worker group: the actor is in
the driver's process. It is a megatron model that counts how often it was trained with which prompt. So at the end of a
run that went on, however it had ended before, each count must be 1: the weights, the queue and the position in the data
are of one step.
"""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync

from mcore_ckpt.integrations.verl import MegatronCheckpointManager
from tests.distributed import forked_ranks
from tests.distributed.training import Layout, build, parallel
from tests.verl import queue_here

PROMPTS, BATCH = 16, 2
STEPS = PROMPTS // BATCH
AHEAD = 3 * BATCH
"""How many prompts the driver keeps in the queue."""

CALLBACK = "mcore_ckpt.integrations.verl.DriverRole"

# Before these calls of Python's a process can be killed. "open" counts if the file is to be written.
_CHANGES = ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir")


@dataclass(frozen=True)
class AsyncRun:
    """A run. Each step is saved.

    Attributes:
        folder: what the run leaves beside its checkpoints.
        root: `trainer.default_local_dir`.
        watched: the step in whose save changes of the disk are counted.
        killed_at: the process is killed before the change with this number, or before the queue is written ("queue");
            None: the run goes on to its end.
        stops_at: the run ends after this step.
        callback: `trainer.checkpoint_callback_class`.
        resume: `trainer.resume_mode` and `trainer.resume_from_path`.
        more: further options, as on verl's command line.
    """

    folder: Path
    root: Path
    async_save: bool = False
    watched: int = 3
    killed_at: int | str | None = None
    stops_at: int = STEPS
    callback: str | None = CALLBACK
    resume: tuple[str, str | None] = ("auto", None)
    more: tuple[str, ...] = ()

    def start(self) -> int:
        """Returns what the process exited with: -9 if it was killed."""
        self.folder.mkdir()
        return forked_ranks.run(1, self._work, self.folder / "log")[0]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def changes(self) -> int:
        """How many changes of the disk the watched save has made."""
        return int((self.folder / "changes").read_text())

    @property
    def resumed_from(self) -> int:
        return int((self.folder / "resumed_from").read_text())

    @property
    def reissued(self) -> list[int]:
        """The prompts that the trainer has sent to the rollout again."""
        return [int(each) for each in (self.folder / "reissued").read_text().split()]

    @property
    def counts(self) -> list[int]:
        """How often each prompt is in the weights."""
        return [int(each) for each in (self.folder / "counts").read_text().split()]

    def _write(self, name: str, found: Any) -> None:
        (self.folder / name).write_text(str(found))

    def config(self) -> Any:
        actor = {
            "_target_": "mcore_ckpt.integrations.verl.McoreCkptConfig",
            "save_contents": ["model", "extra"],
            "load_contents": ["model", "extra"],
            "async_save": self.async_save,
        }
        trainer = {
            "default_local_dir": str(self.root),
            "default_hdfs_dir": None,
            "resume_mode": self.resume[0],
            "resume_from_path": self.resume[1],
            "max_actor_ckpt_to_keep": 2,
            "max_critic_ckpt_to_keep": None,
            "del_local_ckpt_after_load": False,
            "checkpoint_callback_class": self.callback,
        }
        config = OmegaConf.create(
            {
                "trainer": trainer,
                "actor_rollout_ref": {"actor": {"checkpoint": actor}},
                "critic": {"enable": False, "checkpoint": None},
                "algorithm": {"adv_estimator": "grpo"},
            }
        )
        config.merge_with_dotlist(list(self.more))
        OmegaConf.set_struct(config, True)
        return config

    def _work(self, rank: int) -> None:
        layout = Layout(1, num_layers=1)
        with parallel(layout):
            self.run(SmallActor(build(layout, seed=1).model))

    def run(self, actor: "Actor") -> None:
        """The run of a trainer with this actor."""
        queue_here.start()
        trainer = make_trainer(self.config(), actor)
        trainer._load_checkpoint()
        self._write("resumed_from", trainer.global_steps)
        trainer.agent_loop_manager = SimpleNamespace(generate_sequences=self._generate)
        self._write("reissued", "")
        trainer.global_steps += 1
        trainer._reissue_inflight_prompts()
        batches = iter(trainer.train_dataloader)
        while trainer.global_steps <= self.stops_at:
            _fill_queue(batches)
            if not tq.kv_list("train")["train"]:
                break  # prompts were lost
            actor.counts[_next_prompts()] += 1
            if trainer.global_steps == self.watched:
                self._watch(trainer, actor)
            else:
                trainer._save_checkpoint()
            trainer.global_steps += 1
        _wait(trainer, actor)
        self._write("counts", " ".join(str(int(each)) for each in actor.counts))

    def _generate(self, batch: Any) -> None:
        self._write("reissued", " ".join(str(int(each)) for each in batch["prompt"]))

    def _watch(self, trainer: Any, actor: "Actor") -> None:
        if self.killed_at == "queue":
            tq.save_checkpoint = lambda *arguments, **more: os.kill(os.getpid(), signal.SIGKILL)
        _wait(trainer, actor)  # the step before is complete
        state = {"count": 0, "on": True}

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if not state["on"] or event not in _CHANGES or (event == "open" and not _writes(arguments)):
                return
            if state["count"] == self.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            state["count"] += 1

        sys.addaudithook(hook)
        trainer._save_checkpoint()
        _wait(trainer, actor)
        state["on"] = False
        self._write("changes", state["count"])


def _wait(trainer: Any, actor: "Actor") -> None:
    actor.wait()
    getattr(trainer.checkpoint_callback, "wait", lambda: None)()


def _writes(arguments: tuple[Any, ...]) -> bool:
    return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class Actor(Protocol):
    """The worker group: what the driver calls is done at once."""

    save_checkpoint: Any
    load_checkpoint: Any

    def init(self, config: Any) -> None:
        """Makes the worker, as the trainer does after its callback."""

    def wait(self) -> None:
        """Returns once no save is under way."""

    @property
    def counts(self) -> torch.Tensor:
        """How often each prompt was trained: a part of the weights."""


class SmallActor:
    """A megatron model with our manager, without verl's engine."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def init(self, config: Any) -> None:
        options = config.actor_rollout_ref.actor.checkpoint
        manager = MegatronCheckpointManager(model=self._model, checkpoint_config=options, role="actor")
        self.save_checkpoint, self.load_checkpoint, self.wait = (
            manager.save_checkpoint,
            manager.load_checkpoint,
            manager.wait,
        )
        self.counts.zero_()

    @property
    def counts(self) -> torch.Tensor:
        return counts_in(self._model)


def counts_in(model: Any) -> torch.Tensor:
    return next(model[0].parameters()).data.view(-1)[:PROMPTS]


def make_trainer(config: Any, actor: Actor) -> Any:
    """The trainer with its actor already made: making workers is ray's business."""
    trainer: Any = PPOTrainerColocateAsync.__new__(PPOTrainerColocateAsync)
    # As `PPOTrainer.__init__` begins: the callback is there before the workers are made.
    trainer.config, trainer.checkpoint_callback = config, build_checkpoint_callback(config)
    trainer.use_critic, trainer.global_steps, trainer.trainer_mode = False, 0, "colocate_async"
    trainer.total_training_steps = STEPS
    actor.init(config)
    trainer.actor_rollout_wg = actor
    trainer.train_dataloader = StatefulDataLoader(list(range(PROMPTS)), batch_size=BATCH)
    return trainer


def _fill_queue(batches: Any) -> None:
    while len(tq.kv_list("train").get("train", {})) < AHEAD and (batch := next(batches, None)) is not None:
        tags = [{"is_prompt": True, "status": "pending"} for _ in batch]
        fields = TensorDict({"prompt": batch}, batch_size=len(batch))
        tq.kv_batch_put([f"p{int(each):02d}" for each in batch], "train", fields, tags)


def _next_prompts() -> torch.Tensor:
    keys = sorted(tq.kv_list("train")["train"])[:BATCH]
    prompts = tq.kv_batch_get(keys, "train")["prompt"]
    tq.kv_clear(keys, "train")
    return prompts
