"""Defines the checkpoint manager that replaces Megatron-Bridge's own manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt.checkpoint import step_dir
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.integrations.bridge import after_commit, data_loader
from mcore_ckpt.integrations.bridge.hf_files import BridgeTokenizer, PublishedConfig
from mcore_ckpt.integrations.bridge.kept_mains import KeptMains
from mcore_ckpt.integrations.bridge.options import (
    arguments,
    overridden_config,
    refuse_unsupported,
    settings,
    warn_of_retention,
)
from mcore_ckpt.integrations.bridge.resume import (
    Source,
    check_adapters_findable,
    check_findable,
    find_source,
    no_foreign_checkpoint,
)
from mcore_ckpt.integrations.bridge.train_state import restore_train_state, saved_state
from mcore_ckpt.integrations.bridge.unsupported import refuse_load, refuse_model, refuse_save
from mcore_ckpt.integrations.kit.loop import Loaded, LoopCheckpoints, Training
from mcore_ckpt.integrations.kit.together import on_all_ranks
from mcore_ckpt.ranks import read_topology
from mcore_ckpt.state import process_groups_of


class McoreCheckpointManager:
    """A checkpoint manager for `checkpoint.custom_manager_class`. Bridge makes such a manager on every rank.

    Checkpoints are `<checkpoint.save>/global_steps_{iteration}/{role}`. Bridge's own manager loads HuggingFace folders
    and the checkpoints that Bridge has written itself.

    Args:
        checkpoint_config: `cfg.checkpoint`.

    Raises:
        UnsupportedError: an option cannot be honoured.
        InvalidArgumentError: `load` or `pretrained_checkpoint` names a single checkpoint of ours. Bridge finds
            checkpoints only through the folder of all checkpoints.
        CheckpointNotFoundError: `exit_on_missing_checkpoint` or `ckpt_step` is set, and `load` has no checkpoint. If
            only `exit_on_missing_checkpoint` is set, a checkpoint in `pretrained_checkpoint` is enough.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        from megatron.bridge.training.checkpointing import DefaultCheckpointManager

        refuse_unsupported(checkpoint_config)
        check_findable(checkpoint_config, settings().role, settings().config.timeout_s)
        self._checkpoints = LoopCheckpoints()
        self._stock = DefaultCheckpointManager(checkpoint_config)
        self._announcements = after_commit.Announcements()
        self._handed_over = data_loader.HandedOver()
        self._unsaved = data_loader.Unsaved()
        self._mains: KeptMains | None = None
        self._published = PublishedConfig()
        self._has_begun = False

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """The context, which Bridge's `setup` reads after a load. It names the folder of the data loader's state."""
        return self._stock.checkpointing_context

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Saves a checkpoint.

        Args:
            ctx: Bridge's CheckpointSaveContext.
            callback_manager: Bridge's CallbackManager, whose `on_checkpoint_save` is fired after the commit. Bridge 0.4
                passes none.

        Raises:
            UnsupportedError: the context asks for something that cannot be honoured. Nothing has been done.
            CheckpointError: see CheckpointManager.save.
        """
        from megatron.bridge.training import checkpointing, fault_tolerance

        refuse_save(ctx)
        if dist.get_rank() == 0:
            self._unsaved.warn_of(ctx.train_data_iterator)
        self._begin(ctx.state.cfg)
        self._restore_mains()
        state, cfg, step = ctx.state, ctx.state.cfg, ctx.state.train_state.step
        fault_tolerance.on_checkpointing_start(state)
        folder = getattr(cfg.dataset, "dataloader_save", None)
        if folder:
            checkpointing.maybe_save_dataloader_state(
                ctx.model, ctx.train_data_iterator, step, folder, pg_collection=getattr(ctx, "pg_collection", None)
            )
        args, config = arguments(cfg), _config(cfg)
        handle = self._checkpoints.save(
            step,
            self._training(ctx, config),
            args,
            config,
            lambda: _saved_state(ctx),
            data_iterator=ctx.train_data_iterator,
        )
        self._announcements.tell(state, has_ended=True)  # announces the previous save, for which this save has waited
        fire = after_commit.event_of(ctx, callback_manager)
        place = step_dir(Path(args.folder("save")), step)
        self._announcements.follow(after_commit.AnnouncedSave(handle, place, step, fire))
        if not cfg.checkpoint.async_save:
            self._announcements.tell(state, has_ended=True)
        fault_tolerance.on_checkpointing_end(global_state=state, is_async_finalization=False)

    def load(self, ctx: Any) -> tuple[int, float]:
        """Loads a checkpoint from `load`, or else the weights from `pretrained_checkpoint`.

        From `load`, this method loads step `ckpt_step`, or the newest checkpoint if `ckpt_step` is not set.

        Args:
            ctx: Bridge's CheckpointLoadContext.

        Returns:
            The iteration, and the number of floating point operations so far. Both are in `ctx.state`, too.

        Raises:
            UnsupportedError: the context asks for something that cannot be honoured. Nothing has been done.
            CheckpointError: see CheckpointManager.load.
        """
        refuse_load(ctx)
        cfg = ctx.state.cfg
        self._begin(cfg)
        self._checkpoints.finalize(blocking=True)
        source = find_source(cfg.checkpoint, settings().role, settings().config.timeout_s)
        if source is Source.THEIRS:
            iteration, operations = self._stock.load(ctx)
            return iteration, operations
        if source is Source.PRETRAINED:
            cfg.checkpoint.finetune = True  # as Bridge's load_checkpoint does, because other code reads this field
        args, config = arguments(cfg), _config(cfg)
        if source is Source.PRETRAINED:
            args["load"], args["ckpt_step"] = cfg.checkpoint.pretrained_checkpoint, None
        training = self._training(ctx, config)
        loaded = self._checkpoints.load(training, args, config, find_theirs=no_foreign_checkpoint)
        assert loaded is not None, "rank 0 has found a checkpoint"
        if ctx.optimizer is not None and not (args["finetune"] or args["no_load_optim"]):
            self._mains = KeptMains(ctx.optimizer)
        restore_train_state(ctx.state, loaded)
        self._hand_over(cfg, loaded, training)
        step = ctx.state.train_state.step
        after_commit.tell_of_load(ctx.state, step_dir(Path(loaded.folder), loaded.iteration), loaded.folder)
        return step, ctx.state.train_state.floating_point_operations_so_far

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Announces a committed save to callbacks and loggers. Bridge calls this method before each iteration.

        Args:
            state: Bridge's GlobalState.
            blocking: True waits until no save is under way.
            terminate: True also waits, and then frees the memory that saves use.

        Raises:
            UnsupportedError, CheckpointNotFoundError: a checkpoint cannot hold the model, or
                `exit_on_missing_checkpoint` is set and no checkpoint has the run's adapters. Only the first call raises
                these errors, because the model was not known before.
            CheckpointError: the save that was under way failed. All ranks raise it. With `blocking` or `terminate` this
                method raises the error; otherwise the next save or load does.
        """
        self._begin(state.cfg)
        self._restore_mains()
        self._checkpoints.finalize(blocking, terminate)
        self._announcements.tell(state, has_ended=blocking or terminate)
        if terminate:
            self._handed_over.remove()
            # This ends the process that Bridge's `setup` has started for its own asynchronous saves.
            self._stock.finalize_async_saves(state, blocking=True, terminate=True)

    def _begin(self, cfg: Any) -> None:
        """Checks the options outside of `cfg.checkpoint`, once, as soon as Bridge shows its whole configuration."""
        if self._has_begun:
            return
        self._has_begun = True
        refuse_model(cfg.model)
        if cfg.checkpoint.save and dist.get_rank() == 0:
            warn_of_retention(cfg.checkpoint, settings().config)
        if cfg.peft is not None and cfg.checkpoint.exit_on_missing_checkpoint:
            check_adapters_findable(cfg.checkpoint, settings().config.timeout_s)

    def _training(self, ctx: Any, config: CheckpointConfig) -> Training:
        own, cfg = settings(), ctx.state.cfg
        hf_config = own.hf_config
        if hf_config is None and "hf_model" in config.save_contents:
            hf_config = self._published.get(cfg, own.config.timeout_s)
        processing_class, tokenizer = own.processing_class, getattr(cfg.dataset, "tokenizer", None)
        if processing_class is None and tokenizer is not None and cfg.checkpoint.save_tokenizer_assets:
            processing_class = BridgeTokenizer(tokenizer, cfg.tokenizer)
        return Training(list(ctx.model), ctx.optimizer, ctx.opt_param_scheduler, own.role, hf_config, processing_class)

    def _restore_mains(self) -> None:
        mains, self._mains = self._mains, None
        if mains is not None:
            mains.restore()

    def _hand_over(self, cfg: Any, loaded: Loaded, training: Training) -> None:
        """Lets Bridge's `setup` find the data loader's state, unless Bridge's configuration names another place."""
        if cfg.checkpoint.finetune or getattr(cfg.dataset, "dataloader_load", None) is not None:
            return
        state, dp = loaded.state.get(data_loader.STATE), _data_parallel(training.model)

        def write() -> None:
            # A rank without a state cannot find a mismatch, so the errors of other ranks must reach that rank.
            folder = self._handed_over.write(state, loaded.iteration, dp)
            self.checkpointing_context[data_loader.CONTEXT_FIELD] = folder

        topic = "handing over the data loader's state"
        on_all_ranks("bridge/data_loader", topic, write, settings().config.timeout_s)


def _config(cfg: Any) -> CheckpointConfig:
    return overridden_config(cfg.checkpoint, settings().config, cfg.peft is not None)


def _data_parallel(model: list[Any]) -> tuple[int, int]:
    coordinates, topology = read_topology(process_groups_of(model))
    return coordinates.dp, topology.dp


def _saved_state(ctx: Any) -> dict[str, Any]:
    """Returns this rank's extra state. The save calls this function."""
    loader = data_loader.read_state(ctx.train_data_iterator, _data_parallel(ctx.model))
    return {**saved_state(ctx.state, ctx.num_floating_point_operations_so_far), data_loader.STATE: loader}
