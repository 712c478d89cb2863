"""`save_checkpoint` and `load_checkpoint` of ROLL's `MegatronTrainStrategy`, and how a worker comes by them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CommitError, UnsupportedError
from mcore_ckpt.integrations.roll.options import PIPELINE_ROLE, RollOptions, read_options, step_of
from mcore_ckpt.integrations.roll.unit import give_up, newest_valid, part_of
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.steps import TrainerLock, step_status

logger = logging.getLogger(__name__)


class CheckpointStrategy:
    """Goes before `MegatronTrainStrategy` among the bases; what it needs of that is named as there (2026-08)."""

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
        """Where the worker does not load what its pipeline goes on from, this does."""
        super().initialize(*args, **kwargs)  # type: ignore[misc]
        self._refuse_adapters()  # and not at the first save, hours from now
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
        """Saves this cluster's part of `<checkpoint_config.output_dir>/<ckpt_id>`. Every rank of the cluster calls it.

        Args:
            save_dir, local_state_path: where ROLL would write first, to be copied by an uploader after: not used.
            global_step: as in `ckpt_id`.
            ckpt_id: `checkpoint-{N}`.
            tag: "checkpoint".
            kwargs: is_last_step: returns when it is committed, whatever `async_upload` says.

        Returns:
            Seconds, by name: "load" until offloaded states were back, "save" until training may go on.

        Raises:
            CommitError: it failed; or the last checkpoint never became complete, since the driver's part is missing.
            LockedError: another trainer saves to this folder; nothing has been done.
            CheckpointError: see CheckpointManager.save.
        """
        _check_tag(tag)
        options = self._options()
        if step_of(ckpt_id) != global_step:
            raise ValueError(f"global_step is {global_step}, but ckpt_id is {ckpt_id!r}")
        started = time.perf_counter()
        self.load_states()
        loaded = time.perf_counter()
        step_path, role = options.root / ckpt_id, self.worker.cluster_name
        manager = self._manager_of(options)

        lock = TrainerLock(options.root, role)

        def answer() -> dict[str, Any]:
            self._check_last(step_path)
            # Before `save` does: a second trainer that was started by mistake is to give up nothing of the first one's.
            lock.take(options.config.timeout_s / 2)
            give_up(step_path, role)
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
        """Loads this cluster's part of a checkpoint, under any parallel layout. Every rank of the cluster calls it.

        A checkpoint that ROLL's own strategy has written is left to that.

        Args:
            load_dir: `.../checkpoint-{N}`, or the cluster's folder in it.
            tag: "checkpoint".
            kwargs: handed on to ROLL's own strategy.

        Raises:
            CheckpointNotFoundError: it is not complete.
            CheckpointError: see CheckpointManager.load.
        """
        _check_tag(tag)
        manager = self._manager_of(self._options())

        def answer() -> dict[str, Any]:
            found = part_of(Path(load_dir), self.worker.cluster_name)
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
        """Made when it is needed, since only then the model is there; kept, since its host memory is reused."""
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
        """The published model's, for `huggingface/`: the one that mcore_adapter keeps is megatron's."""
        path = self.worker_config.model_args.model_name_or_path
        if not path:
            return None
        from transformers import AutoConfig

        if not os.path.isdir(path):
            from roll.utils.checkpoint_manager import download_model

            path = download_model(path)
        try:
            return AutoConfig.from_pretrained(path, trust_remote_code=False)  # None would ask at the terminal
        except (OSError, ValueError) as error:
            # Of a model with code of its own, say. Its checkpoints do not need it.
            if self.megatron_train_args.save_hf_model:
                raise
            logger.warning("%s: no HuggingFace config goes beside the checkpoints: %s", path, error)
            return None

    def _check_last(self, step_path: Path) -> None:
        """On rank 0. ROLL only logs what its uploader raises (`CheckpointManager.upload`): here it is noticed."""
        last = self._saved
        if last is None or last == step_path or not last.exists() or self._options().config.if_failed == "warn":
            return
        status = step_status(last)
        if PIPELINE_ROLE not in status.committed:
            raise CommitError(
                f"{last} never became a checkpoint: the driver has not committed its part ({PIPELINE_ROLE}); its log "
                "says why"
            )


def _check_tag(tag: str) -> None:
    if tag != "checkpoint":
        raise UnsupportedError(f"tag is {tag!r}: there is one kind of checkpoint, 'checkpoint'")


class CheckpointWorker:
    """Goes before a worker of ROLL's among the bases: its strategy saves and loads as above.

    `create_strategy` knows ROLL's own strategies alone (`roll/distributed/strategy/factory.py`), and a worker calls it
    and loads within one method, `initialize`. So the strategy becomes ours when the worker sets it.
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
    """The same strategy, of a class that saves and loads as above.

    Another object with the same attributes: with ROLL's several bases Python does not let `__class__` be assigned.
    """
    cls = type(strategy)
    made: Any = object.__new__(type(f"Checkpoint{cls.__name__}", (CheckpointStrategy, cls), {"__module__": __name__}))
    made.__dict__ = strategy.__dict__
    return made


class ResumingWorker(CheckpointWorker):
    """For workers that never call `load_checkpoint`, though their pipeline goes on from the checkpoint's step: SFT's,
    which would train the first weights on the last data."""

    leaves_loading_to_strategy = True
