"""ROLL's BasePipeline: when a checkpoint is made, in which order, and what a run goes on from."""

import os
import re
import shutil
from concurrent import futures

from roll.utils.checkpoint_manager import CheckpointManager, download_model, get_latest_ckpt
from roll.utils.worker_state import WorkerState


class BasePipeline:
    checkpoint_clusters: list = []  # noqa: RUF012 -- as in ROLL

    def __init__(self, pipeline_config):
        self.pipeline_config = pipeline_config
        self.state = WorkerState()
        self.checkpoint_manager = CheckpointManager(checkpoint_config=pipeline_config.checkpoint_config)
        self.executor = futures.ThreadPoolExecutor(max_workers=5)
        self.resume_from_checkpoint = False
        resume = pipeline_config.resume_from_checkpoint
        if resume is True:
            latest = get_latest_ckpt(pipeline_config.checkpoint_config)
            self.resume_from_checkpoint = download_model(latest) if latest else False
        elif resume:
            self.resume_from_checkpoint = download_model(resume)
        if self.resume_from_checkpoint:
            folder = os.path.join(self.resume_from_checkpoint, "pipeline")
            self.state = WorkerState.load_from_json(load_dir=folder, tag="pipeline")

    def run(self):
        pass

    def set_checkpoint_clusters(self, *clusters):
        self.checkpoint_clusters = [*self.checkpoint_clusters, *clusters]

    def do_checkpoint(self, global_step, is_last_step=None):
        config = self.pipeline_config
        if is_last_step is None:
            is_last_step = global_step == config.max_steps - 1
        metrics = self.state.log_history[-1]
        metrics["system/step"] = global_step
        if global_step <= 0 or (global_step % config.save_steps and global_step != config.max_steps - 1):
            return
        for cluster in self.checkpoint_clusters:
            metrics.update(cluster.do_checkpoint(global_step=global_step, is_last_step=is_last_step))
        ckpt_id = f"checkpoint-{global_step}"
        local = os.path.join(config.output_dir, "pipeline", ckpt_id)
        save_dir = os.path.join(local, "pipeline")
        self.state.save_to_json(save_dir=save_dir, tag="pipeline")
        self.state.save_rng_state(save_dir=save_dir, tag="pipeline")
        if config.checkpoint_config.get("async_upload", True) and not is_last_step:
            self.executor.submit(self.checkpoint_manager.upload, ckpt_id=ckpt_id, local_state_path=local)
        else:
            self.checkpoint_manager.upload(ckpt_id=ckpt_id, local_state_path=local)
        self._cleanup_old_checkpoints()

    def _cleanup_old_checkpoints(self):
        config = self.pipeline_config
        if config.max_ckpt_to_keep <= 0:
            return
        folders = [os.path.join(config.output_dir, name) for name in os.listdir(config.output_dir)]
        folders = [folder for folder in folders if os.path.isdir(folder)]
        found = {name for folder in folders for name in os.listdir(folder) if re.fullmatch(r"checkpoint-\d+", name)}
        newest = sorted(found, key=lambda name: int(name.rpartition("-")[2]), reverse=True)
        for name in newest[config.max_ckpt_to_keep :]:
            for folder in folders:
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
