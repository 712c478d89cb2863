"""ROLL's SFT worker, which loads nothing."""

import os

from roll.pipeline.base_worker import Worker


class SFTWorker(Worker):
    def __init__(self, worker_config, cluster_name="sft_train"):
        super().__init__(worker_config, cluster_name)

    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.start_strategy()

    def do_checkpoint(self, global_step, is_last_step=False):
        local = os.path.join(self.pipeline_config.output_dir, self.worker_name, f"checkpoint-{global_step}")
        return self.save(os.path.join(local, self.cluster_name), global_step, is_last_step=is_last_step)
