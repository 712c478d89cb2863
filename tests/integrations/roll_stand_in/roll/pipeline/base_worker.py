"""ROLL's workers that train."""

import os

from roll.distributed.strategy.factory import create_strategy
from roll.utils.checkpoint_manager import download_model, get_latest_ckpt


class Worker:
    def __init__(self, worker_config, cluster_name="actor_train"):
        self.worker_config = worker_config
        self.pipeline_config = None
        self.cluster_name = cluster_name  # ROLL: of the environment
        self.worker_name = f"{cluster_name}-0"

    def initialize(self, pipeline_config, *args, **kwargs):
        self.pipeline_config = pipeline_config


class ActorWorker(Worker):
    def __init__(self, worker_config, cluster_name="actor_train"):
        super().__init__(worker_config, cluster_name)
        self.strategy = None

    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.strategy = create_strategy(worker=self)
        self.strategy.initialize(model_provider=None)
        if pipeline_config.resume_from_checkpoint:
            load_dir = None
            if pipeline_config.resume_from_checkpoint is True:
                latest = get_latest_ckpt(pipeline_config.checkpoint_config)
                load_dir = download_model(latest) if latest else None
            else:
                load_dir = download_model(pipeline_config.resume_from_checkpoint)
            if load_dir:
                self.strategy.load_checkpoint(load_dir=load_dir, tag="checkpoint")
        self.strategy.offload_states()

    def do_checkpoint(self, global_step, is_last_step=None):
        ckpt_id = f"checkpoint-{global_step}"
        save_dir = os.path.join(self.pipeline_config.output_dir, self.worker_name, ckpt_id)
        metrics = self.strategy.save_checkpoint(save_dir, global_step, ckpt_id, is_last_step=is_last_step)
        return {f"time/{self.cluster_name}/do_checkpoint/{name}": value for name, value in metrics.items()}


class CriticWorker(Worker):
    def __init__(self, worker_config, cluster_name="critic"):
        super().__init__(worker_config, cluster_name)
        self.strategy = None

    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.strategy = create_strategy(worker=self)
        self.strategy.initialize(model_provider=None)
        if pipeline_config.resume_from_checkpoint:
            load_dir = None
            if pipeline_config.resume_from_checkpoint is True:
                latest = get_latest_ckpt(pipeline_config.checkpoint_config)
                load_dir = download_model(latest) if latest else None
            else:
                load_dir = download_model(pipeline_config.resume_from_checkpoint)
            load_dir = os.path.join(load_dir, self.cluster_name)
            self.strategy.load_checkpoint(load_dir=load_dir, tag="checkpoint")
        self.strategy.offload_states()

    def do_checkpoint(self, global_step, is_last_step=None):
        ckpt_id = f"checkpoint-{global_step}"
        local = os.path.join(self.pipeline_config.output_dir, self.worker_name, ckpt_id)
        metrics = self.strategy.save_checkpoint(
            os.path.join(local, self.cluster_name),
            global_step,
            ckpt_id,
            local_state_path=local,
            is_last_step=is_last_step,
        )
        return {f"time/{self.cluster_name}/do_checkpoint/{name}": value for name, value in metrics.items()}
