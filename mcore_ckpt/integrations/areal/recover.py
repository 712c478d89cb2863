"""Replaces AReaL's RecoverHandler (1.0.4), which saves and loads the state that a training recovers from."""

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

from mcore_ckpt.config import TIMEOUT_S
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.integrations.areal import recover_info, stock_files
from mcore_ckpt.integrations.areal.engine import is_checkpointed
from mcore_ckpt.integrations.areal.frequency import agree_with, ends_epoch, frequency_of
from mcore_ckpt.integrations.areal.loggers import enable_loggers
from mcore_ckpt.integrations.areal.recover_info import INFO_ROLE, Place, Progress
from mcore_ckpt.integrations.areal.recovery_steps import RecoveryStep, RecoverySteps, engines_of, nothing_loaded
from mcore_ckpt.ranks import agree
from mcore_ckpt.recover import retried
from mcore_ckpt.schedule import Schedule
from mcore_ckpt.steps import list_steps, reading

if TYPE_CHECKING:
    from areal.api import FinetuneSpec
    from areal.api.cli_args import RecoverConfig

logger = logging.getLogger(__name__)

_OFF = ("off", "disabled")


class RecoverHandler(areal.RecoverHandler):
    """Saves the weights of all engines and recover_info as one step. Loads only complete steps.

    This class has the configuration and the methods of AReaL's RecoverHandler.

    Args:
        config: AReaL's configuration. After a restart, the frequencies in this configuration apply, not the saved
            frequencies.
        ft_spec: AReaL's FinetuneSpec.
        keep: how many complete steps stay on disk. With 2 or more, `load` can skip a damaged step.
        others: further engines for `load` to load. AReaL's PPOTrainer saves its critic, but passes only its actor to
            `load`.
        timeout_s: how long any wait for another rank may take, in seconds.
        shared_with_group: as in CheckpointConfig, for a root that this handler makes.
        data_begins_anew: if True, a load under another data-parallel size leaves the data loader as it is, with a
            warning, so that its epoch begins anew. If False, such a load raises an error.

    Raises ValueError: a frequency is not above 0.
    """

    def __init__(
        self,
        config: RecoverConfig,
        ft_spec: FinetuneSpec,
        keep: int = 1,
        others: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        shared_with_group: bool | None = None,
        data_begins_anew: bool = False,
    ) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self.last_step_info = StepInfo(-1, -1, -1, ft_spec.steps_per_epoch)
        self._others = dict(others or {})
        self._data_begins_anew = data_begins_anew
        self._schedule = Schedule(frequency_of(config))
        self._root = Path(
            os.path.abspath(self.recover_info_path(config.experiment_name, config.trial_name, config.fileroot))
        )
        self._steps = RecoverySteps(self._root, keep, timeout_s, shared_with_group)

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
        """Saves a step if a save is due. The step is complete once the last engine has committed.

        With async saves, the commits follow in the background after this method returns.

        Raises:
            UnsupportedError: an engine is not a CheckpointedEngine. Nothing was saved.
            CheckpointError: an engine could not save, or `RecoverySteps.open` failed. The previous step stays.
        """
        enable_loggers()
        if self.config.mode in _OFF:
            return
        self._ensure_recover_supported(engine)
        ended = ends_epoch(self.ft_spec, step_info.epoch_step)
        if not self._schedule.due(ended, 1, agree_with(self._steps.agreement)):
            return
        engines = self._normalize_recover_engines(engine)
        _refuse_others(engines)
        self._steps.delete_old()
        if step_info.global_step == self._steps.current:
            logger.info("step %d has been saved already", step_info.global_step)
            return

        place = self._place(engines)

        def read_progress() -> Progress:
            return Progress(
                step=asdict(step_info),
                saver=saver.state_dict(),
                evaluator=evaluator.state_dict(),
                stats_logger=stats_logger.state_dict(),
                checkpoint=self._schedule.state_dict(),
                dataloader=dataloader.state_dict(),
                dp=place.dp,
                size=place.size,
            )

        step = self._steps.open(step_info.global_step, read_progress, list(engines))
        for name, each in engines.items():
            each.save(
                SaveLoadMeta(
                    path=str(step.role_dir(name)),
                    weight_format="dcp",
                    with_optim=not self.config.no_save_optim,
                    tokenizer=tokenizer,
                    processor=processor,
                    base_model_path=base_model_path,
                )
            )
        self._steps.current = step_info.global_step
        self.last_step_info = step_info
        self._steps.delete_old()

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
        """Loads the newest complete step.

        Returns AReaL's RecoverInfo of the step. None if training starts from the beginning, because recovery is off or
        no step was ever completed here (`RecoverySteps.find`).

        Raises:
            CheckpointNotFoundError: there are steps, but none is complete. The message lists the steps. Nothing was
                loaded.
            CheckpointCorruptError: no step can be loaded. The message gives the reason for each step.
            CheckpointMismatchError: a step is intact, but belongs to another model; or its data position belongs to
                another data-parallel size (`data_begins_anew`). In the second case nothing was loaded.
        """
        enable_loggers()
        if self.config.mode in _OFF:
            self._warn_of_what_is_there()
            return None
        self._ensure_recover_supported(engine)
        if inference_engine is not None and weight_update_meta is None:
            raise ValueError("weight_update_meta is missing: without it the inference engine keeps its old weights")
        handed_over = self._normalize_recover_engines(engine)
        engines = {**self._others, **handed_over}
        progress = self._load_newest(engines, self._place(handed_over))
        if progress is None:
            return None
        saver.load_state_dict(progress.saver)
        self._schedule.load_state_dict(progress.checkpoint)
        evaluator.load_state_dict(progress.evaluator)
        stats_logger.load_state_dict(progress.stats_logger)
        if progress.dataloader is not None:
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

    def _place(self, engines: Mapping[str, Any]) -> Place:
        # AReaL's trainers divide the data by the data-parallel ranks of their actor, which is the first engine.
        first, agreement = next(iter(engines.values())), self._steps.agreement
        dp, size = first.data_parallel_rank, first.data_parallel_world_size
        return Place(agreement.rank, agreement.world_size, int(dp), int(size))

    def _load_newest(self, engines: Mapping[str, Any], place: Place) -> Progress | None:
        retries = self.config.retries
        steps = retried(lambda: self._steps.find(list(engines)), retries)
        if not steps and self._has_stock_files():
            return self._load_stock(engines, place)
        reasons: list[str] = []
        for step in steps:
            # Without this lock, retention of another process could delete the step between the loads of two engines.
            with reading(step.role_dir(name) for name in (*engines, INFO_ROLE)):
                try:
                    read = partial(recover_info.read, step.role_dir(INFO_ROLE), place, self._data_begins_anew)
                    progress = self._read(read)
                    for name, each in engines.items():
                        retried(partial(self._load_engine, each, step, name), retries)
                except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                    logger.warning("step %d cannot be loaded: %s", step.step, error)
                    reasons.append(str(error))
                    continue
                self._continue_from(step, engines)
            return progress
        if steps:
            raise nothing_loaded(steps, reasons)
        return None

    def _continue_from(self, step: RecoveryStep, engines: Mapping[str, Any]) -> None:
        self._steps.current = step.step
        logger.info("continuing after step %d, from %s", step.step, step.path)
        if not self._steps.agreement.is_coordinator:
            return
        left = [name for name in engines_of(step) if name not in engines]
        if left:
            logger.warning("%s also has the engines %s, which this training does not load", step.path, ", ".join(left))

    def _load_engine(self, engine: Any, step: RecoveryStep, name: str) -> None:
        try:
            engine.load(self._to_load(step.role_dir(name)))
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # errors of engines in other processes arrive as text, without their type
            raise CheckpointError(
                f"{step.role_dir(name)}: the engine could not load this checkpoint: {error}. To continue from an older "
                f"step, move {step.path.name} out of {step.path.parent}"
            ) from error

    def _to_load(self, path: Path) -> SaveLoadMeta:
        return SaveLoadMeta(path=str(path), weight_format="dcp", with_optim=not self.config.no_load_optim)

    def _read(self, read: Callable[[], Progress]) -> Progress:
        """Returns what `read` returns on this rank. If `read` raises on one rank, all ranks raise."""
        found: list[Progress] = []

        def work() -> dict[str, Any]:
            found.append(read())
            return {}

        retried(lambda: agree(self._steps.agreement, "reading recover_info", work, dict), self.config.retries)
        return found[-1]

    def _has_stock_files(self) -> bool:
        topic = "looking for AReaL's own recovery files"
        return bool(agree(self._steps.agreement, topic, {}, lambda: {"found": stock_files.found(self._root)})["found"])

    def _load_stock(self, engines: Mapping[str, Any], place: Place) -> Progress:
        """Loads AReaL's own recovery files, to continue the run with our checkpoints."""
        progress = self._read(partial(stock_files.read_stock, self._root, place, self._data_begins_anew))
        logger.warning("%s: continuing from AReaL's own recovery files", self._root)
        for name, each in engines.items():
            path = areal.Saver.get_recover_checkpoint_path(
                self.config.experiment_name, self.config.trial_name, self.config.fileroot, name=name
            )
            each.load(self._to_load(path))
        return progress

    def _update(self, inference_engine: Any, weight_update_meta: Any, engine: Any) -> None:
        """Sends the weights that were loaded to the inference engine, so that rollouts use them."""
        version = self.last_step_info.global_step + 1
        meta = weight_update_meta.with_version(version)
        engine.connect_engine(inference_engine, meta)
        inference_engine.pause()
        engine.update_weights(meta)
        inference_engine.resume()
        engine.set_version(version)
        inference_engine.set_version(version)

    def _warn_of_what_is_there(self) -> None:
        steps = [status.step for status in list_steps(self._root) if status.is_claimed]
        if steps:
            logger.warning(
                "%s has step %d, but recover.mode is off, so training starts from the beginning", self._root, steps[-1]
            )


def _refuse_others(engines: Mapping[str, Any]) -> None:
    others = [f"{name} ({type(engine).__name__})" for name, engine in engines.items() if not is_checkpointed(engine)]
    if others:
        raise UnsupportedError(
            f"{', '.join(others)}: this engine is not from mcore_ckpt.integrations.areal, so training could not "
            "recover from its checkpoints: use an engine of mcore_ckpt.integrations.areal, or AReaL's own "
            "RecoverHandler"
        )
