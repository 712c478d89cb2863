"""Replaces AReaL's Saver (1.0.4), which exports HuggingFace models for evaluation and publishing."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal.api import SaveLoadMeta
from areal.utils import saver as areal

from mcore_ckpt.config import TIMEOUT_S
from mcore_ckpt.integrations.areal.engine import HF_ASYNC, CheckpointedEngine, is_checkpointed
from mcore_ckpt.integrations.areal.frequency import agree_with, ends_epoch, frequency_of
from mcore_ckpt.integrations.areal.loggers import enable_loggers
from mcore_ckpt.ranks import rendezvous
from mcore_ckpt.schedule import RoleSchedules

if TYPE_CHECKING:
    from areal.api import FinetuneSpec
    from areal.api.cli_args import SaverConfig

logger = logging.getLogger(__name__)


def export_name(epoch: int, step: int, global_step: int) -> str:
    """Returns the folder name of one export. (AReaL's `Saver.get_model_save_path` would also make an empty folder.)"""
    return f"epoch{epoch}epochstep{step}globalstep{global_step}"


class Saver(areal.Saver):
    """Exports models when exports are due. This class has the configuration, paths and methods of AReaL's Saver.

    Every rank makes a Saver. The constructor waits for the other ranks. Each role has its own schedule. The folder of
    an export appears once it is complete.

    With `mode` "sync", `save` returns when the folder is there. With "async" and "auto", `save` returns once the
    weights are copied. An engine that is not a CheckpointedEngine is exported synchronously, as by AReaL's Saver. With
    "async", a warning says so.
    """

    def __init__(self, config: SaverConfig, ft_spec: FinetuneSpec, timeout_s: float = TIMEOUT_S) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self._schedules = RoleSchedules(frequency_of(config))
        self._agree = agree_with(rendezvous("areal/saver", timeout_s))
        self._exporting: dict[str, Any] = {}
        self._engines: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters of each role's schedule as JSON values."""
        return self._schedules.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues counting from saved counters. The current config sets the frequency.

        Raises ValueError if the counters are invalid.
        """
        self._schedules.load_state_dict(state_dict)

    @property
    def is_async(self) -> bool:
        """True if an export can be under way. AReaL's trainers then do not wait for the other ranks after `save`."""
        return bool(self._exporting)

    def save(
        self,
        engine: Any,
        epoch: int,
        step: int,
        global_step: int,
        name: str = "default",
        tokenizer: Any = None,
        processor: Any = None,
        base_model_path: str | None = None,
    ) -> None:
        """Exports the engine's model if an export is due.

        Raises CheckpointError: this export failed, or an earlier export failed in the background.
        """
        enable_loggers()
        if is_checkpointed(engine):
            self._engines[name] = engine
        if not self._schedules.due(name, ends_epoch(self.ft_spec, step), 1, self._agree):
            return
        root = self.get_model_save_root(self.config.experiment_name, self.config.trial_name, self.config.fileroot, name)
        is_async = self._may_be_async(engine)
        engine.save(
            SaveLoadMeta(
                path=os.path.join(root, export_name(epoch, step, global_step)),
                weight_format=HF_ASYNC if is_async else "hf",
                with_optim=False,
                tokenizer=tokenizer,
                processor=processor,
                base_model_path=base_model_path,
            )
        )
        if is_async:
            self._exporting[name] = engine

    def maybe_wait_for_staging(self) -> None:
        """Does nothing, because the weights have already been copied when `save` returns."""

    def finalize(self) -> None:
        """Waits for exports and for the RecoverHandler's saves.

        Without this call, AReaL's controllers would only log a failure of an export or save, and only when they end.

        Raises:
            CheckpointError: an export or a save failed.
            Exception: an engine in another process failed.
        """
        engines, self._engines, self._exporting = self._engines, {}, {}
        for engine in engines.values():
            if isinstance(engine, CheckpointedEngine):
                engine.wait_async_saves()
            else:  # a controller: `TrainController`
                engine._custom_function_call("wait_async_saves")

    def _may_be_async(self, engine: Any) -> bool:
        if self.config.mode == "sync":
            return False
        if not is_checkpointed(engine) and self.config.mode == "async":
            logger.warning(
                "saver.mode is async, but %s cannot export asynchronously: exporting synchronously",
                type(engine).__name__,
            )
        return is_checkpointed(engine)
