"""AReaL's Saver (1.0.4): models in HuggingFace's format, for evaluation and publishing, every so often."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal.api import SaveLoadMeta
from areal.utils import saver as areal

from mcore_ckpt.integrations.areal.engine import HF_ASYNC, CheckpointedEngine, is_checkpointed
from mcore_ckpt.integrations.areal.hearing import be_heard
from mcore_ckpt.integrations.areal.timing import agree_with, ends_epoch, frequency_of
from mcore_ckpt.ranks import rendezvous
from mcore_ckpt.schedule import RoleSchedules

if TYPE_CHECKING:
    from areal.api import FinetuneSpec
    from areal.api.cli_args import SaverConfig

logger = logging.getLogger(__name__)


def export_name(epoch: int, step: int, global_step: int) -> str:
    """The folder of one export: what `Saver.get_model_save_path` would make at once, empty."""
    return f"epoch{epoch}epochstep{step}globalstep{global_step}"


class Saver(areal.Saver):
    """Same configuration, paths and calls. Every rank makes one, which waits for the others.

    Each role has a schedule of its own, and a folder appears when it is whole.

    `mode`: "sync"; "async", which lets training go on once the weights are copied, with engines of ours, and as AReaL's
    falls back to "sync" with others; "auto" does so without a word.
    """

    def __init__(self, config: SaverConfig, ft_spec: FinetuneSpec, timeout_s: float = 600.0) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self._schedules = RoleSchedules(frequency_of(config))
        self._agree = agree_with(rendezvous("areal/saver", timeout_s))
        self._exporting: dict[str, Any] = {}
        self._engines: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What has been counted for each role, as JSON values."""
        return self._schedules.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on counting from there, at the frequency that the config has now. Raises ValueError."""
        self._schedules.load_state_dict(state_dict)

    @property
    def is_async(self) -> bool:
        """Whether an export may be under way: trainers then do not wait for the other ranks after `save`."""
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
        """Exports the engine's model if that is due.

        Raises CheckpointError: the export has failed, or an earlier one that went on beside the training.
        """
        be_heard()
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
        """Nothing to wait for: the weights have been copied when `save` returns."""

    def finalize(self) -> None:
        """Ends exports, and saves of the RecoverHandler: AReaL's controllers only log what fails at their end.

        Raises CheckpointError: one has failed; of engines in other processes what AReaL raises for them.
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
            logger.warning("saver.mode is async, which %s cannot do: exporting synchronously", type(engine).__name__)
        return is_checkpointed(engine)
