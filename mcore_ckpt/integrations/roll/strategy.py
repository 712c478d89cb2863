"""Replaces `save_checkpoint` and `load_checkpoint` of ROLL's `MegatronTrainStrategy` in ROLL's workers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CommitError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.integrations.roll.checkpoints import newest_valid, role_folder, uncommit_earlier_save
from mcore_ckpt.integrations.roll.options import PIPELINE_ROLE, RollOptions, read_options, step_of
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.steps import TrainerLock, step_status

logger = logging.getLogger(__name__)


class CheckpointStrategy:
    """Saves and loads in the place of `MegatronTrainStrategy` (2026-08), before which it comes in the list of bases."""

    # Of MegatronTrainStrategy.
    worker: Any
    worker_config: Any
    megatron_train_args: Any
    models_wrapped: Sequence[Any]
    models_unwrapped: Sequence[Any]
    optimizer: Any
    scheduler: Any
    tokenizer: Any
    processor: Any
    load_states: Any

    _manager: CheckpointManager | None = None
    _saved: Path | None = None

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Initializes the strategy. Also loads the checkpoint to resume from, if the worker would not load it."""
        super().initialize(*args, **kwargs)  # type: ignore[misc]
        self._refuse_adapters()  # now, instead of at the first save hours later
        resume = self.worker.pipeline_config.resume_from_checkpoint
        if not resume or not getattr(self.worker, "leaves_loading_to_strategy", False):
            return
        options = self._options()
        found = newest_valid(options.root, options.verify_on_resume) if resume is True else resume
        if found is not None:
            self.load_checkpoint(str(found))

    def save_checkpoint(
        self,
        save_dir: str,
        global_step: int,
        ckpt_id: str,
        tag: str = "checkpoint",
        local_state_path: str | None = None,
        **kwargs: Any,
    ) -> dict[str, float]:
        """Saves this cluster's role of `<checkpoint_config.output_dir>/<ckpt_id>`. Every rank of the cluster calls it.

        Args:
            save_dir, local_state_path: not used. ROLL would write there first, and an uploader would copy it.
            global_step: the N of `ckpt_id`.
            ckpt_id: `checkpoint-{N}`.
            tag: "checkpoint".
            kwargs: with `is_last_step`, returns when the role is committed, whatever `async_upload` says.

        Returns:
            Seconds by name: "load" until offloaded states were back, "save" until training may go on.

        Raises:
            CommitError: the save failed, or the checkpoint before never became complete because the driver's role is
                missing.
            LockedError: another trainer saves to this folder. Nothing has been done.
            CheckpointError: see CheckpointManager.save.
        """
        _check_tag(tag)
        options = self._options()
        if step_of(ckpt_id) != global_step:
            raise InvalidArgumentError(f"global_step is {global_step}, but ckpt_id is {ckpt_id!r}")
        started = time.perf_counter()
        self.load_states()
        loaded = time.perf_counter()
        step_path, role = options.root / ckpt_id, self.worker.cluster_name
        manager = self._manager_of(options)

        lock = TrainerLock(options.root, role)

        def answer() -> dict[str, Any]:
            self._check_last(step_path)
            # Take the lock before anything is taken back: a second trainer, started by mistake, must not touch the
            # checkpoints of the first one.
            lock.take(options.config.timeout_s / 2)
            uncommit_earlier_save(step_path, role)
            return {}

        try:
            manager.agree(f"beginning {ckpt_id} of {role}", {"ckpt_id": ckpt_id}, answer)
            handle = manager.save(global_step, roles=(role, PIPELINE_ROLE), path=step_path / role)
        finally:
            lock.release()  # the manager has its own share
        self._saved = step_path
        if kwargs.get("is_last_step") or not options.async_upload:
            handle.wait()
        return {"load": loaded - started, "save": time.perf_counter() - loaded}

    def load_checkpoint(self, load_dir: str, tag: str = "checkpoint", **kwargs: Any) -> None:
        """Loads this cluster's role of a checkpoint, under any parallel layout. Every rank of the cluster calls it.

        A checkpoint that ROLL's own strategy wrote is loaded by that strategy.

        Args:
            load_dir: `.../checkpoint-{N}`, or the cluster's folder in it.
            tag: "checkpoint".
            kwargs: passed to ROLL's own strategy.

        Raises:
            CheckpointNotFoundError: the checkpoint is not complete.
            CheckpointError: see CheckpointManager.load.
        """
        _check_tag(tag)
        manager = self._manager_of(self._options())

        def answer() -> dict[str, Any]:
            found = role_folder(Path(load_dir), self.worker.cluster_name)
            return {"path": None if found is None else str(found)}

        path = manager.agree(f"looking at {load_dir}", {"load_dir": str(load_dir)}, answer)["path"]
        if path is None:
            logger.info("%s is not a checkpoint of mcore_ckpt: ROLL's own strategy loads it", load_dir)
            super().load_checkpoint(load_dir, tag=tag, **kwargs)  # type: ignore[misc]
            return
        self.load_states()
        result = manager.load(path=path)
        logger.info("loaded step %d of %s from %s", result.step, manager.role, path)

    def _options(self) -> RollOptions:
        return read_options(self.worker_config.checkpoint_config)

    def _manager_of(self, options: RollOptions) -> CheckpointManager:
        """Returns the manager. Made on first use, when the model exists, and kept because its host memory is reused."""
        if self._manager is None:
            self._refuse_adapters()
            args = self.megatron_train_args
            contents = ("model",) if args.save_only_model else ("model", "optimizer", "extra")
            policy = options.policy(self.worker.pipeline_config)
            config = replace(
                options.config,
                max_to_keep=policy.max_to_keep,
                keep_every=policy.keep_every,
                save_contents=(*contents, "hf_model") if args.save_hf_model else contents,
                async_save=options.async_upload,
            )
            self._manager = CheckpointManager(
                options.root,
                list(self.models_wrapped),
                self.optimizer,
                self.scheduler,
                role=self.worker.cluster_name,
                hf_config=self._hf_config(),
                processing_class=self.tokenizer if self.processor is None else self.processor,
                config=config,
            )
        return self._manager

    def _refuse_adapters(self) -> None:
        for model in self.models_unwrapped:
            if hasattr(model, "peft_config"):
                raise UnsupportedError(
                    f"{self.worker.cluster_name} trains a {type(model).__name__}: adapters of PEFT are not supported "
                    "in ROLL; save them with ROLL's own strategy"
                )

    def _hf_config(self) -> Any:
        """Returns the published model's config, for `huggingface/`. mcore_adapter keeps only megatron's config."""
        path = self.worker_config.model_args.model_name_or_path
        if not path:
            return None
        from transformers import AutoConfig

        if not os.path.isdir(path):
            from roll.utils.checkpoint_manager import download_model

            path = download_model(path)
        try:
            return AutoConfig.from_pretrained(path, trust_remote_code=False)  # None would prompt at the terminal
        except (OSError, ValueError) as error:
            # For instance, a model with code of its own. Its checkpoints do not need the config.
            if self.megatron_train_args.save_hf_model:
                raise
            logger.warning("%s: no HuggingFace config goes beside the checkpoints: %s", path, error)
            return None

    def _check_last(self, step_path: Path) -> None:
        """Raises CommitError on rank 0 if the last checkpoint lacks the driver's role: ROLL only logs that failure."""
        last = self._saved
        if last is None or last == step_path or not last.exists() or self._options().config.if_failed == "warn":
            return
        status = step_status(last)
        if PIPELINE_ROLE not in status.committed:
            raise CommitError(
                f"{last} never became a checkpoint: the driver has not committed its role ({PIPELINE_ROLE}). Its "
                "log has the reason"
            )


def _check_tag(tag: str) -> None:
    if tag != "checkpoint":
        raise UnsupportedError(f"tag is {tag!r}: there is one kind of checkpoint, 'checkpoint'")


class CheckpointWorker:
    """Gives one of ROLL's workers a strategy that saves and loads with this package. It comes first among the bases.

    A worker makes its strategy and loads with it in one method, `initialize`, and `create_strategy` knows only ROLL's
    own strategies (`roll/distributed/strategy/factory.py`). So the strategy is replaced when the worker assigns it.

    Attributes:
        leaves_loading_to_strategy: the worker never calls `load_checkpoint`, so the strategy does when it initializes.
    """

    leaves_loading_to_strategy = False
    _strategy: Any = None

    @property
    def strategy(self) -> Any:
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: Any) -> None:
        if strategy is not None and not isinstance(strategy, CheckpointStrategy):
            from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy

            if not isinstance(strategy, MegatronTrainStrategy):
                raise UnsupportedError(
                    f"strategy_name is {strategy.strategy_name!r}: checkpoints of mcore_ckpt are for 'megatron_train'"
                )
            strategy = _with_checkpoints(strategy)
        self._strategy = strategy


def _with_checkpoints(strategy: Any) -> Any:
    """Returns a strategy with the same attributes, of a subclass that saves and loads with this package.

    It is another object, because Python does not let `__class__` be assigned with ROLL's several bases.
    """
    cls = type(strategy)
    made: Any = object.__new__(type(f"Checkpoint{cls.__name__}", (CheckpointStrategy, cls), {"__module__": __name__}))
    made.__dict__ = strategy.__dict__
    return made


class ResumingWorker(CheckpointWorker):
    """Loads the checkpoint, too, for a worker that never calls `load_checkpoint`, such as ROLL's SFT worker.

    Its pipeline resumes at the checkpoint's step all the same, and would train the initial weights on the last data.
    """

    leaves_loading_to_strategy = True
