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
from mcore_ckpt.integrations.kit.driver import newest_valid
from mcore_ckpt.integrations.kit.objects import with_first_base
from mcore_ckpt.integrations.kit.published import published_config
from mcore_ckpt.integrations.roll.checkpoints import role_folder
from mcore_ckpt.integrations.roll.options import PIPELINE_ROLE, RollOptions, read_options, step_of
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.steps import step_status, uncommit_earlier_save

logger = logging.getLogger(__name__)


class CheckpointStrategy:
    """A mixin that saves and loads in place of ROLL's `MegatronTrainStrategy` (2026-08).

    The mixin must be the first base.
    """

    # Attributes of MegatronTrainStrategy.
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
        """Initializes the strategy. Also loads the checkpoint to resume from if the worker does not load it itself."""
        super().initialize(*args, **kwargs)  # type: ignore[misc]
        resume = self.worker.pipeline_config.resume_from_checkpoint
        if not resume or not getattr(self.worker, "leaves_loading_to_strategy", False):
            return
        options = self._options()
        found = newest_valid(options.root, PIPELINE_ROLE, options.verify_on_resume) if resume is True else resume
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
        """Saves this cluster's role in `<checkpoint_config.output_dir>/<ckpt_id>`.

        Every rank of the cluster calls this method.

        Args:
            save_dir: not used. (ROLL's own strategy would write to this folder, and an uploader would copy the files.)
            global_step: the N in `ckpt_id`.
            ckpt_id: `checkpoint-{N}`.
            tag: must be "checkpoint".
            local_state_path: not used, like `save_dir`.
            kwargs: `is_last_step=True` waits until the role is committed, whatever `async_upload` is.

        Returns:
            Seconds by name. "load" is how long it took to bring offloaded states back, "save" how long the save itself
            held the training up.

        Raises:
            CommitError: this save failed, or the previous checkpoint is not complete because the driver's role is
                missing.
            LockedError: another trainer, or a tool, writes to this folder. Nothing was saved.
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

        def answer() -> dict[str, Any]:
            self._check_last(step_path)
            return {}

        def undo_earlier_save() -> None:
            # This runs after all checks, because a save that is refused must leave the earlier save as it is.
            uncommit_earlier_save(step_path, role, PIPELINE_ROLE)

        manager.agree(f"starting to save {role} in {ckpt_id}", {"ckpt_id": ckpt_id}, answer)
        handle = manager.save(
            global_step, roles=(role, PIPELINE_ROLE), path=step_path / role, prepared=undo_earlier_save
        )
        self._saved = step_path
        if kwargs.get("is_last_step") or not options.async_upload:
            handle.wait()
        return {"load": loaded - started, "save": time.perf_counter() - loaded}

    def load_checkpoint(self, load_dir: str, tag: str = "checkpoint", **kwargs: Any) -> None:
        """Loads this cluster's role of a checkpoint. Every rank of the cluster calls this method.

        The checkpoint may have been saved under another parallel layout. If ROLL's own strategy wrote the checkpoint,
        that strategy also loads it.

        Args:
            load_dir: `.../checkpoint-{N}`, or the cluster's folder in it.
            tag: must be "checkpoint".
            kwargs: passed to ROLL's own strategy, if that strategy loads the checkpoint.

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
            logger.info("%s is not a checkpoint of mcore_ckpt, so ROLL's own strategy loads it", load_dir)
            super().load_checkpoint(load_dir, tag=tag, **kwargs)  # type: ignore[misc]
            return
        self.load_states()
        result = manager.load(path=path)
        logger.info("loaded step %d of %s from %s", result.step, manager.role, path)

    def _options(self) -> RollOptions:
        return read_options(self.worker_config.checkpoint_config)

    def _manager_of(self, options: RollOptions) -> CheckpointManager:
        """Returns the manager.

        The first call makes the manager, because the model exists by then. Later saves reuse the manager's host memory.
        """
        if self._manager is None:
            args = self.megatron_train_args
            contents = ("model",) if args.save_only_model else ("model", "optimizer", "extra")
            policy = options.policy(self.worker.pipeline_config)
            config = replace(
                options.config,
                max_to_keep=policy.max_to_keep,
                keep_every=policy.keep_every,
                keep_best=policy.keep_best,
                keep_for=policy.keep_for,
                save_contents=(*contents, "hf_model") if args.save_hf_model else contents,
                async_save=options.async_upload,
                # ROLL fills the base model from model_name_or_path. So only adapters are saved, as by ROLL's own
                # strategy.
                skip_frozen=options.config.skip_frozen or any(hasattr(m, "peft_config") for m in self.models_unwrapped),
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

    def _hf_config(self) -> Any:
        """Returns the published model's config, for `huggingface/`. ROLL's model has only megatron's config."""
        path = self.worker_config.model_args.model_name_or_path
        if not path:
            return None
        if not os.path.isdir(path):
            from roll.utils.checkpoint_manager import download_model

            path = download_model(path)
        return published_config(path, needed=self.megatron_train_args.save_hf_model)

    def _check_last(self, step_path: Path) -> None:
        """Raises CommitError on rank 0 if the last checkpoint lacks the driver's role. ROLL only logs the reason."""
        last = self._saved
        if last is None or last == step_path or not last.exists() or self._options().config.if_failed == "warn":
            return
        status = step_status(last)
        if PIPELINE_ROLE not in status.committed:
            raise CommitError(
                f"{last} never became a checkpoint: the driver has not committed its role ({PIPELINE_ROLE}). The "
                "driver's log has the reason"
            )


def _check_tag(tag: str) -> None:
    if tag != "checkpoint":
        raise UnsupportedError(f"tag is {tag!r}, but mcore_ckpt supports only 'checkpoint'")


class CheckpointWorker:
    """A mixin that gives a worker of ROLL a strategy that saves and loads with this package.

    The mixin must be the first base. A worker makes its strategy in `initialize`, and loads with this strategy in the
    same method. ROLL's `create_strategy` (`roll/distributed/strategy/factory.py`) makes only ROLL's own strategies. So
    the strategy is replaced as soon as the worker assigns it. If `leaves_loading_to_strategy` is True, the worker never
    calls `load_checkpoint`, and the strategy loads when it is initialized.
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
                    f"strategy_name is {strategy.strategy_name!r}, but mcore_ckpt supports only 'megatron_train'"
                )
            strategy = with_first_base(strategy, CheckpointStrategy, __name__)
        self._strategy = strategy


class ResumingWorker(CheckpointWorker):
    """A CheckpointWorker for workers that never call `load_checkpoint`, such as ROLL's SFT worker.

    The pipeline of such a worker resumes at the checkpoint's step anyway. Without a load the worker would train the
    initial weights on the data after that step.
    """

    leaves_loading_to_strategy = True
