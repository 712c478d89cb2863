"""PPO's workers of verl 0.6 and 0.7, each with a megatron model of its own (`verl.workers.megatron_workers`).

Only the actor's rollout is left out, because it needs a server of vLLM or SGLang.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import mpu
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.megatron_utils import load_megatron_model_to_gpu, load_megatron_optimizer
from verl.workers.megatron_workers import ActorRolloutRefWorker, CriticWorker

NAME = "ppo_megatron_trainer"
OPTIONS = ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8")


@dataclass(frozen=True)
class Engine:
    """What a worker trains, under the names that an engine has."""

    module: Any
    optimizer: Any
    lr_scheduler: Any

    def to(self, device: str) -> None:
        load_megatron_model_to_gpu(self.module)
        load_megatron_optimizer(self.optimizer)


class Actor(ActorRolloutRefWorker):
    def _build_rollout(self, trust_remote_code: bool = False) -> None:
        pass


class Worker:
    """A rank's part of a worker group."""

    def __init__(self, worker: Any, role: str) -> None:
        self._worker, self._role = worker, role
        self.engine = Engine(*(getattr(worker, f"{role}_{n}") for n in ("module", "optimizer", "optimizer_scheduler")))
        self.save_checkpoint, self.load_checkpoint = worker.save_checkpoint, worker.load_checkpoint

    def wait(self) -> None:
        """Returns once no save of ours is under way."""
        getattr(self._worker.checkpoint_mananager, "wait", lambda: None)()

    def train(self, batch: list[Any]) -> None:
        """One step on this rank's share of the batch."""
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        getattr(self._worker, f"update_{self._role}")(_experience(batch[rank::size]))


def _experience(sequences: list[dict[str, torch.Tensor]]) -> DataProto:
    """Something to learn: the last four tokens of each sequence are its response."""
    ids = pad_sequence([each["input_ids"] for each in sequences], batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(each["input_ids"]) for each in sequences], True, padding_side="left")
    response = ids[:, -4:]
    one = torch.ones(response.shape)
    tensors = {"input_ids": ids, "responses": response, "attention_mask": mask, "response_mask": mask[:, -4:]}
    tensors |= {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "old_log_probs": -5 * one, "advantages": one}
    tensors |= {"values": 0 * one, "returns": one / 2}
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0, "global_token_num": mask.sum(-1).tolist()})


def make_actor(config: Any) -> Worker:
    # As the worker does where it makes the process group, too.
    sizes = config.actor_rollout_ref.actor.megatron
    mpu.initialize_model_parallel(sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size)
    # With a rollout in its name, because only then the worker offloads (0.6, 0.7).
    worker = Actor(config.actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    return Worker(worker, "actor")


def make_critic(config: Any) -> Worker:
    """As RayPPOTrainer.init_workers has it made."""
    worker = CriticWorker(omega_conf_to_dataclass(config.critic))
    worker.init_model()
    return Worker(worker, "critic")
