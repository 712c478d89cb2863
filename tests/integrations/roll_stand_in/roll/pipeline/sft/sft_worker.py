"""ROLL's SFT worker, which loads nothing."""

import os

from roll.distributed.strategy.factory import create_strategy
from roll.pipeline.base_worker import Worker


class SFTWorker(Worker):
    def __init__(self, worker_config, cluster_name="sft_train"):
        super().__init__(worker_config, cluster_name)
        self.strategy = None

    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.strategy = create_strategy(worker=self)
        self.strategy.initialize(model_provider=None)

    def do_checkpoint(self, global_step, is_last_step=False):
        ckpt_id = f"checkpoint-{global_step}"
        save_dir = os.path.join(self.pipeline_config.output_dir, self.worker_name, ckpt_id, self.cluster_name)
        metrics = self.strategy.save_checkpoint(save_dir, global_step, ckpt_id, is_last_step=is_last_step)
        return {f"time/{self.cluster_name}/do_checkpoint/{name}": value for name, value in metrics.items()}
