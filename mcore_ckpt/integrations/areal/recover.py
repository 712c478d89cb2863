"""AReaL's RecoverHandler (1.0.4): what a training comes back from after a failure, and the way back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api import SaveLoadMeta, StepInfo
from areal.utils import recover as areal

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.integrations.areal import recover_info, stock_files
from mcore_ckpt.integrations.areal.engine import is_checkpointed
from mcore_ckpt.integrations.areal.hearing import be_heard
from mcore_ckpt.integrations.areal.recover_info import INFO_ROLE, Progress
from mcore_ckpt.integrations.areal.timing import agree_with, ends_epoch, frequency_of
from mcore_ckpt.integrations.areal.units import RecoverUnits, Unit, lost
from mcore_ckpt.ranks import agree
from mcore_ckpt.recover import retried
from mcore_ckpt.schedule import Schedule
from mcore_ckpt.steps import complete_steps, reading

if TYPE_CHECKING:
    from areal.api import FinetuneSpec
    from areal.api.cli_args import RecoverConfig

logger = logging.getLogger(__name__)

_OFF = ("off", "disabled")


class RecoverHandler(areal.RecoverHandler):
    """Same configuration and calls. A unit is the weights of all engines and recover_info: it is whole, or not there.

    Args:
        config: AReaL's; its frequencies are those of now, whatever a unit was saved with.
        ft_spec: AReaL's.
        keep: how many units stay on disk. With more than one, a damaged one is passed over for the one before.
        others: engines that are loaded, though `load` is not given them: PPOTrainer saves its critic and loads only its
            actor.
        timeout_s: of every wait for another rank, in seconds.

    Raises ValueError: a frequency is not above 0.
    """

    def __init__(
        self,
        config: RecoverConfig,
        ft_spec: FinetuneSpec,
        keep: int = 1,
        others: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self.last_step_info = StepInfo(-1, -1, -1, ft_spec.steps_per_epoch)
        self._others = dict(others or {})
        self._schedule = Schedule(frequency_of(config))
        self._root = Path(
            os.path.abspath(self.recover_info_path(config.experiment_name, config.trial_name, config.fileroot))
        )
        self._units = RecoverUnits(self._root, keep, timeout_s)

    def dump(
        self,
        engine: Any,
        step_info: StepInfo,
        saver: Any,
        evaluator: Any,
        stats_logger: Any,
        dataloader: Any,
        tokenizer: Any = None,
        processor: Any = None,
        base_model_path: str | None = None,
    ) -> None:
        """Saves a unit if that is due. Where the engines save beside the training it counts when the last one has.

        Raises:
            UnsupportedError: an engine is none of ours; nothing has been saved.
            CheckpointError: what an engine raises, or see `RecoverUnits.open`; the unit before stays.
        """
        be_heard()
        if self.config.mode in _OFF:
            return
        self._ensure_recover_supported(engine)
        ended = ends_epoch(self.ft_spec, step_info.epoch_step)
        if not self._schedule.due(ended, 1, agree_with(self._units.seat)):
            return
        engines = self._normalize_recover_engines(engine)
        _refuse_others(engines)
        self._units.tidy()
        if step_info.global_step == self._units.current:
            logger.info("step %d has been saved already", step_info.global_step)
            return

        def read_progress() -> Progress:
            return Progress(
                step=asdict(step_info),
                saver=saver.state_dict(),
                evaluator=evaluator.state_dict(),
                stats_logger=stats_logger.state_dict(),
                checkpoint=self._schedule.state_dict(),
                dataloader=dataloader.state_dict(),
            )

        unit = self._units.open(step_info.global_step, read_progress, list(engines))
        for name, each in engines.items():
            each.save(
                SaveLoadMeta(
                    path=str(unit.part(name)),
                    weight_format="dcp",
                    with_optim=not self.config.no_save_optim,
                    tokenizer=tokenizer,
                    processor=processor,
                    base_model_path=base_model_path,
                )
            )
        self._units.follow(step_info.global_step)
        self.last_step_info = step_info
        self._units.tidy()

    def load(
        self,
        engine: Any,
        saver: Any,
        evaluator: Any,
        stats_logger: Any,
        dataloader: Any,
        inference_engine: Any = None,
        weight_update_meta: Any = None,
        inference_engine_update_from: str = "default",
    ) -> Any:
        """Loads the newest unit, and returns AReaL's RecoverInfo of it; None: start from the beginning.

        That is only if recovery is off, or if there never was a unit here: see `RecoverUnits.find`.

        Raises:
            CheckpointNotFoundError: there were units, and none is whole; lists what is there. Nothing has changed.
            CheckpointCorruptError: none can be loaded; says why of each.
            CheckpointMismatchError: it is sound, and of another model.
        """
        be_heard()
        if self.config.mode in _OFF:
            self._warn_of_what_is_there()
            return None
        self._ensure_recover_supported(engine)
        if inference_engine is not None and weight_update_meta is None:
            raise ValueError("weight_update_meta is missing: the inference engine would go on with its old weights")
        engines = {**self._others, **self._normalize_recover_engines(engine)}
        progress = self._load_newest(engines)
        if progress is None:
            return None
        saver.load_state_dict(progress.saver)
        self._schedule.load_state_dict(progress.checkpoint)
        evaluator.load_state_dict(progress.evaluator)
        stats_logger.load_state_dict(progress.stats_logger)
        dataloader.load_state_dict(progress.dataloader)
        self.last_step_info = StepInfo(**progress.step)
        if inference_engine is not None:
            self._update(inference_engine, weight_update_meta, engines[inference_engine_update_from])
        return areal.RecoverInfo(
            last_step_info=self.last_step_info,
            saver_info=dict(progress.saver),
            evaluator_info=dict(progress.evaluator),
            stats_logger_info=dict(progress.stats_logger),
            dataloader_info=progress.dataloader,
            checkpoint_info=dict(progress.checkpoint),
        )

    def _load_newest(self, engines: Mapping[str, Any]) -> Progress | None:
        retries = self.config.retries
        units = retried(lambda: self._units.find(list(engines)), retries)
        if not units and self._has_stock_files():
            return self._load_stock(engines)
        reasons: list[str] = []
        for unit in units:
            # Between two engines another process's retention could take it.
            with reading(unit.part(name) for name in (*engines, INFO_ROLE)):
                try:
                    progress = self._read(partial(recover_info.read, unit.part(INFO_ROLE)))
                    for name, each in engines.items():
                        retried(partial(self._load_engine, each, unit, name), retries)
                except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                    logger.warning("step %d cannot be recovered from: %s", unit.step, error)
                    reasons.append(str(error))
                    continue
                self._follow(unit, engines)
            return progress
        if units:
            raise lost(units, reasons)
        return None

    def _follow(self, unit: Unit, engines: Mapping[str, Any]) -> None:
        self._units.follow(unit.step)
        logger.info("going on after step %d, from %s", unit.step, unit.path)
        left = [name for name in self._units.roles_of(unit) if name not in engines] if self._units.is_first else []
        if left:
            logger.warning("%s has %s, too, which nobody loads: it starts anew", unit.path, ", ".join(left))

    def _load_engine(self, engine: Any, unit: Unit, name: str) -> None:
        try:
            engine.load(self._to_load(unit.part(name)))
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # of an engine in another process there is the text alone
            raise CheckpointError(
                f"{unit.part(name)}: the engine could not load it: {error}. To go on from an older unit, if "
                f"{unit.path.parent} has one, move {unit.path.name} away"
            ) from error

    def _to_load(self, path: Path) -> SaveLoadMeta:
        return SaveLoadMeta(path=str(path), weight_format="dcp", with_optim=not self.config.no_load_optim)

    def _read(self, read: Callable[[int], Progress]) -> Progress:
        """Every rank's own, or on all ranks the error of one."""
        seat = self._units.seat
        found: list[Progress] = []

        def work() -> dict[str, Any]:
            found.append(read(seat.rank))
            return {}

        retried(lambda: agree(seat, "reading recover_info", work, dict), self.config.retries)
        return found[-1]

    def _has_stock_files(self) -> bool:
        seat = self._units.seat
        topic = "looking for what AReaL has saved"
        return bool(agree(seat, topic, {}, lambda: {"found": stock_files.found(self._root)})["found"])

    def _load_stock(self, engines: Mapping[str, Any]) -> Progress:
        """A run that AReaL has saved, which goes on here."""
        progress = self._read(partial(stock_files.read_stock, self._root))
        logger.warning("%s: going on from what AReaL itself has saved", self._root)
        for name, each in engines.items():
            path = areal.Saver.get_recover_checkpoint_path(
                self.config.experiment_name, self.config.trial_name, self.config.fileroot, name=name
            )
            each.load(self._to_load(path))
        return progress

    def _update(self, inference_engine: Any, weight_update_meta: Any, engine: Any) -> None:
        """The weights that rollouts are made with are those of the step that was loaded."""
        version = self.last_step_info.global_step + 1
        meta = weight_update_meta.with_version(version)
        engine.connect_engine(inference_engine, meta)
        inference_engine.pause()
        engine.update_weights(meta)
        inference_engine.resume()
        engine.set_version(version)
        inference_engine.set_version(version)

    def _warn_of_what_is_there(self) -> None:
        steps = [status.step for status in complete_steps(self._root)]
        if steps:
            logger.warning("%s has step %d, but recover.mode is off: training starts anew", self._root, steps[-1])


def _refuse_others(engines: Mapping[str, Any]) -> None:
    others = [f"{name} ({type(engine).__name__})" for name, engine in engines.items() if not is_checkpointed(engine)]
    if others:
        raise UnsupportedError(
            f"{', '.join(others)}: not an engine of mcore_ckpt.integrations.areal, so what it saves could not be "
            "recovered from: use one, or AReaL's own RecoverHandler"
        )
