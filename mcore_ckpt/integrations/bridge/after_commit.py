"""Tells callbacks and loggers of Megatron-Bridge that a checkpoint is committed, as Bridge's own manager does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from mcore_ckpt import SaveHandle

_EVENT = "on_checkpoint_save"


@dataclass(frozen=True, eq=False)
class AnnouncedSave:
    """A save whose commit will be announced: its handle, its step and the step's folder.

    `fire` fires Bridge's event on this rank; None if no callback listens to it.
    """

    handle: SaveHandle
    folder: Path
    step: int
    fire: Callable[[], None] | None


def event_of(ctx: Any, callback_manager: Any) -> Callable[[], None] | None:
    """Returns a function that fires Bridge's event; None, on all ranks, if no callback listens to it."""
    if callback_manager is None:
        return None
    from megatron.bridge.training.callbacks import CallbackContext, should_fire

    if not should_fire(callback_manager, _EVENT):
        return None
    context = CallbackContext(
        state=ctx.state, model=unwrap_model(ctx.model), user_state=callback_manager.user_state, optimizer=ctx.optimizer
    )
    return lambda: callback_manager.fire(_EVENT, context)


class Announcements:
    """Announces each save once it is committed. Every rank calls the same methods."""

    def __init__(self) -> None:
        self._save: AnnouncedSave | None = None

    def follow(self, save: AnnouncedSave) -> None:
        """Sets the save to announce next. The previous save must have ended."""
        self._save = save

    def tell(self, state: Any, has_ended: bool) -> None:
        """Announces the save once it is committed. A failed save is not announced.

        Callbacks may communicate, so all ranks must call them at the same time. If there are callbacks, an all_reduce
        tells each rank whether the save has ended on all ranks. Without callbacks, a rank only looks whether the save
        has ended on this rank, so no GPU has to wait for an all_reduce.

        Args:
            state: Bridge's GlobalState.
            has_ended: whether the caller knows that the save has ended on all ranks. Then no all_reduce is needed.
        """
        save = self._save
        if save is None or not (has_ended or (_all_ended(save) if save.fire is not None else save.handle.done)):
            return
        self._save = None
        if not save.handle.committed:
            return  # the next save or load raises the error
        _tell_loggers(state, save)
        if save.fire is not None:
            save.fire()


def _all_ended(save: AnnouncedSave) -> bool:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ended = torch.tensor([int(save.handle.done)], dtype=torch.int, device=device)
    dist.all_reduce(ended, op=dist.ReduceOp.MIN)
    return bool(ended.item())


def _tell_loggers(state: Any, save: AnnouncedSave) -> None:
    from megatron.bridge.training.utils import comet_utils, mlflow_utils, wandb_utils
    from megatron.bridge.training.utils.log_utils import append_to_progress_log

    cfg = state.cfg
    root = cfg.checkpoint.save
    if cfg.logger.log_progress and cfg.checkpoint.async_save:
        append_to_progress_log(root, f"Saved async checkpoint\tIteration: {save.step}", barrier=False)
    if dist.get_rank() != dist.get_world_size() - 1:
        return  # Bridge has its loggers on the last rank
    where = (str(save.folder), root, save.step)
    wandb_utils.on_save_checkpoint_success(*where, wandb_writer=state.wandb_logger)
    if getattr(cfg.logger, "mlflow_log_artifacts", True):  # Bridge 0.4 has no such option
        mlflow_utils.on_save_checkpoint_success(*where, mlflow_logger=state.mlflow_logger)
    comet_utils.on_save_checkpoint_success(*where, comet_logger=state.comet_logger)


def tell_of_load(state: Any, folder: Path, root: str) -> None:
    """Tells Bridge's loggers, and its fault tolerance, that a checkpoint was loaded."""
    from megatron.bridge.training import fault_tolerance
    from megatron.bridge.training.utils import comet_utils, mlflow_utils, wandb_utils

    if dist.get_rank() == dist.get_world_size() - 1:
        wandb_utils.on_load_checkpoint_success(str(folder), root, state.wandb_logger)
        mlflow_utils.on_load_checkpoint_success(str(folder), root, state.mlflow_logger)
        comet_utils.on_load_checkpoint_success(str(folder), root, state.comet_logger)
    if state.train_state.step > 0:
        fault_tolerance.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
