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
        self.strategy = None

    def initialize(self, pipeline_config, *args, **kwargs):
        self.pipeline_config = pipeline_config

    def start_strategy(self):
        """Each of ROLL's workers has these lines."""
        self.strategy = create_strategy(worker=self)
        self.strategy.initialize(model_provider=None)

    def folder_to_resume(self):
        """As do those that load."""
        resume = self.pipeline_config.resume_from_checkpoint
        if resume is True:
            resume = get_latest_ckpt(self.pipeline_config.checkpoint_config)
        return download_model(resume) if resume else None

    def save(self, save_dir, global_step, **options):
        metrics = self.strategy.save_checkpoint(save_dir, global_step, f"checkpoint-{global_step}", **options)
        return {f"time/{self.cluster_name}/do_checkpoint/{name}": value for name, value in metrics.items()}


class ActorWorker(Worker):
    def __init__(self, worker_config, cluster_name="actor_train"):
        super().__init__(worker_config, cluster_name)

    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.start_strategy()
        load_dir = self.folder_to_resume()
        if load_dir:
            self.strategy.load_checkpoint(load_dir=load_dir, tag="checkpoint")
        self.strategy.offload_states()

    def do_checkpoint(self, global_step, is_last_step=None):
        local = os.path.join(self.pipeline_config.output_dir, self.worker_name, f"checkpoint-{global_step}")
        return self.save(local, global_step, is_last_step=is_last_step)


class CriticWorker(Worker):
    def __init__(self, worker_config, cluster_name="critic"):
        super().__init__(worker_config, cluster_name)

    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.start_strategy()
        if pipeline_config.resume_from_checkpoint:
            load_dir = os.path.join(self.folder_to_resume(), self.cluster_name)
            self.strategy.load_checkpoint(load_dir=load_dir, tag="checkpoint")
        self.strategy.offload_states()

    def do_checkpoint(self, global_step, is_last_step=None):
        local = os.path.join(self.pipeline_config.output_dir, self.worker_name, f"checkpoint-{global_step}")
        return self.save(
            os.path.join(local, self.cluster_name), global_step, local_state_path=local, is_last_step=is_last_step
        )
