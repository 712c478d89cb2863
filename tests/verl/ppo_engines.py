"""PPO's workers of verl 0.8 and newer: actor and critic, each with an engine."""

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import sft_loss

NAME = "ppo_trainer"
OPTIONS = (
    "model_engine=megatron",
    "actor_rollout_ref.model.use_remove_padding=False",
    "critic.model.use_remove_padding=False",
)


class Worker:
    """A rank's part of a worker group."""

    def __init__(self, worker: ActorRolloutRefWorker | TrainingWorker) -> None:
        self._training = getattr(worker, "actor", worker)
        self.engine = self._training.engine
        self.save_checkpoint, self.load_checkpoint = worker.save_checkpoint, worker.load_checkpoint

    def wait(self) -> None:
        """Returns once no save of ours is under way."""
        getattr(self.engine.checkpoint_mananager, "wait", lambda: None)()

    def train(self, batch: list[Any]) -> None:
        """One step on this rank's share of the batch."""
        rank, size = self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size()
        options = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0}
        options |= {"pad_mode": DatasetPadMode.NO_PADDING, "update_lr_scheduler": True, "global_token_num": None}
        data = tu.get_tensordict(SFTTensorCollator(DatasetPadMode.NO_PADDING)(batch[rank::size]), options)
        self._training.train_batch(data=data)


def make_actor(config: Any) -> Worker:
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    worker.set_loss_fn(partial(sft_loss, config=None))
    return Worker(worker)


def make_critic(config: Any) -> Worker:
    """As RayPPOTrainer.init_workers has it made."""
    critic = omega_conf_to_dataclass(config.critic)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=critic.engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
            profiler_config=None,
        )
    )
    worker.reset()
    worker.set_loss_fn(value_loss)
    return Worker(worker)


def value_loss(model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict]:
    """Something to learn."""
    return (model_output["values"].values().float() - 0.5).square().mean(), {}
