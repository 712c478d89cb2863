"""Extends ROLL's driver: the uploader of the type mcore_ckpt, and pipelines that raise the errors of uploads."""

from __future__ import annotations

import logging
import queue
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CommitError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.integrations.kit.driver import is_complete_step, newest_valid
from mcore_ckpt.integrations.roll.checkpoints import RESUME_NEWEST, commit_pipeline, logged_metrics
from mcore_ckpt.integrations.roll.options import PIPELINE_ROLE, read_options, step_of
from mcore_ckpt.steps import delete_old_steps, rules_of_others

logger = logging.getLogger(__name__)

TYPE = "mcore_ckpt"
"""The value of `checkpoint_config.type` that selects this package."""

_RNG_FILE = "rng_state_pipeline.pth"  # written by WorkerState.save_rng_state


class CheckpointUploader:
    """The uploader that ROLL makes for a `checkpoint_config` of type mcore_ckpt, in the driver and in each worker.

    The uploader commits the role `pipeline`, which holds the driver's state. ROLL calls this commit an upload, but
    nothing leaves the shared folder. `CheckpointStrategy` commits the roles of the clusters.

    Args:
        output_dir: the folder that contains each `checkpoint-{N}`. Unlike ROLL's own uploaders, this uploader adds no
            timestamp to the name.
        args: must be empty.
        kwargs: the other options in `checkpoint_config`.
    """

    def __init__(self, output_dir: str, *args: Any, **kwargs: Any) -> None:
        if args:
            raise InvalidArgumentError(
                f"positional arguments {args} are not supported: pass checkpoint_config as keyword arguments"
            )
        self.options = read_options({"output_dir": output_dir, **kwargs})
        self.roles: tuple[str, ...] | None = None

    def upload(self, ckpt_id: str, local_state_path: str, **kwargs: Any) -> None:
        """Commits the driver's role of a checkpoint.

        Raises:
            UnsupportedError: the files were saved by ROLL's own strategy and not by the driver.
            CommitError: the role could not be written. The checkpoint stays incomplete, and the previous checkpoint is
                kept.
        """
        source = Path(local_state_path) / PIPELINE_ROLE
        if not source.is_dir():
            raise UnsupportedError(
                f"{local_state_path} has no {PIPELINE_ROLE}/: with checkpoint_config.type={TYPE} each cluster that "
                "saves needs a worker_cls of mcore_ckpt.integrations.roll"
            )
        options = self.options
        metrics = logged_metrics(source, options.metrics)
        commit_pipeline(options.root, ckpt_id, source, self.roles, options.config.timeout_s, metrics)

    def get_latest_ckpt(self) -> str | None:
        """Returns the newest complete checkpoint; None if no checkpoint was ever complete.

        Raises CheckpointNotFoundError if there are checkpoints, but none is complete. In this case a run must not
        silently start from the beginning.
        """
        found = newest_valid(self.options.root, PIPELINE_ROLE, self.options.verify_on_resume)
        return None if found is None else str(found)


class CheckpointPipeline:
    """A mixin that corrects how a pipeline of ROLL saves and resumes. The mixin must be the first base.

    ROLL's `BasePipeline` only logs an uploader's errors, deletes the local folders of its workers instead of old
    checkpoints, and never restores the driver's random number generators. With this mixin, `do_checkpoint` raises the
    errors, `max_ckpt_to_keep` applies to checkpoints, and `run` restores the generators.
    """

    # Attributes of BasePipeline.
    pipeline_config: Any
    checkpoint_manager: Any
    resume_from_checkpoint: Any

    def __init__(self, pipeline_config: Any) -> None:
        # Replace `true` by a path once, before the workers receive the config. Otherwise each worker would look for a
        # checkpoint itself, and CriticWorker and StudentWorker would treat `true` as a path.
        if pipeline_config.resume_from_checkpoint is True:
            uploader = CheckpointUploader(**pipeline_config.checkpoint_config)
            pipeline_config.resume_from_checkpoint = uploader.get_latest_ckpt() or False
        elif pipeline_config.resume_from_checkpoint:
            # Raises an error for a checkpoint of ours that is not complete, before any worker starts.
            is_complete_step(Path(pipeline_config.resume_from_checkpoint), RESUME_NEWEST)
        super().__init__(pipeline_config)  # type: ignore[call-arg]
        self.checkpoint_manager = _Uploads(self.checkpoint_manager.uploader)

    def set_checkpoint_clusters(self, *clusters: Any) -> None:
        super().set_checkpoint_clusters(*clusters)  # type: ignore[misc]
        uploader = self.checkpoint_manager.uploader
        uploader.roles = (*(uploader.roles or ()), *(cluster.cluster_name for cluster in clusters))

    def run(self) -> Any:
        if self.resume_from_checkpoint:
            _write_rng(Path(self.resume_from_checkpoint) / PIPELINE_ROLE / _RNG_FILE)
        return super().run()  # type: ignore[misc]

    def _cleanup_old_checkpoints(self) -> None:
        """Waits for the upload and deletes old steps.

        ROLL's `do_checkpoint` calls this method after the start of the upload.

        Raises the upload's error, or a CommitError if the upload does not end in time.
        """
        uploads: _Uploads = self.checkpoint_manager
        step = uploads.finish()
        options = uploads.uploader.options
        try:
            others = rules_of_others(options.root, PIPELINE_ROLE)
            delete_old_steps(options.root, options.policy(self.pipeline_config), step, others=others)
        except OSError as error:
            logger.warning("the checkpoint is committed, but old checkpoints could not be deleted: %s", error)


class _Uploads:
    """Replaces ROLL's `CheckpointManager`, whose `upload` only prints an error. Here `finish` raises the error."""

    def __init__(self, uploader: CheckpointUploader) -> None:
        self.uploader = uploader
        self._ended: queue.Queue[tuple[str, BaseException | None]] = queue.Queue()

    def upload(self, ckpt_id: str, local_state_path: str, keep_local_file: bool = False) -> None:
        try:
            self.uploader.upload(ckpt_id=ckpt_id, local_state_path=local_state_path)
            if not keep_local_file:
                shutil.rmtree(local_state_path, ignore_errors=True)
        except BaseException as error:
            self._ended.put((ckpt_id, error))
        else:
            self._ended.put((ckpt_id, None))

    def finish(self) -> int:
        """Waits for the upload, which can run on another thread, and returns its step. Raises the upload's error."""
        timeout_s = self.uploader.options.config.timeout_s
        try:
            ckpt_id, error = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            raise CommitError(f"the driver's role of a checkpoint was not written within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return step_of(ckpt_id)


def _write_rng(path: Path) -> None:
    """Restores the random states that `WorkerState.save_rng_state` wrote. Never executes code from the file."""
    if not path.exists():
        return
    from mcore_ckpt.formats import load_safely

    state = load_safely(path, str(path))
    python = state["python"]
    random.setstate((python[0], tuple(python[1]), python[2]))
    import numpy

    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
