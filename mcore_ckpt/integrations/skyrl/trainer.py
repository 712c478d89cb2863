"""Extends SkyRL's trainers, so that the driver's files and the weights of a step count only together.

SkyRL's `RayPPOTrainer.save_checkpoints` (0.3) lets the workers save, then writes `data.pt` (the data loader's state)
and `trainer_state.pt` next to the weights, and then its tracker. `FullyAsyncRayPPOTrainer` adds `fully_async_state.pt`
(the prompts that were trained on) even after the tracker. With this package, SkyRL's trainer writes these files into a
temporary folder, and the package then commits them as a role of the step:

    <ckpt_path>/
    ├── latest_checkpointed_iteration.txt   our tracker
    └── global_step_{N}/
        ├── policy/                         the weights, by the workers (worker.py)
        └── driver/                         data.pt, trainer_state.pt, fully_async_state.pt
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import parse_step
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CheckpointError, UnsupportedError
from mcore_ckpt.integrations.kit.driver import commit_driver_files, delete_after_driver, is_complete_step
from mcore_ckpt.integrations.kit.objects import changed, with_first_base
from mcore_ckpt.integrations.skyrl.driver_files import LoggedMetrics, check_files, put_files
from mcore_ckpt.integrations.skyrl.options import DRIVER_ROLE, options_of
from mcore_ckpt.integrations.skyrl.root_steps import move_stock_tracker, newest, saved_attempts, set_aside
from mcore_ckpt.steps import PreservationPolicy

logger = logging.getLogger(__name__)


def checkpointed(trainer: Any, worker: Any = None) -> Any:
    """Returns SkyRL's trainer with our checkpoints. `BasePPOExp.get_trainer` is the place to call this function.

    Args:
        trainer: a RayPPOTrainer, or an object of a class derived from it, such as FullyAsyncRayPPOTrainer.
        worker: a class derived from PolicyWorkerBase, not yet an actor of ray. Its `checkpoint_config` has the options.
            None: PolicyWorkerBase.

    Raises UnsupportedError, InvalidArgumentError: SkyRL's configuration, or `checkpoint_config`, has an option that
    cannot be honoured.
    """
    if worker is None:
        from mcore_ckpt.integrations.skyrl.worker import PolicyWorkerBase as worker
    made = with_first_base(trainer, CheckpointTrainer, __name__)
    made.checkpoint_worker = worker
    made.checkpoint_options = options_of(worker.checkpoint_config, trainer.cfg.trainer)
    made.tracker = LoggedMetrics(trainer.tracker)
    return made


class CheckpointTrainer:
    """A mixin for SkyRL's trainers. The mixin must be the first base. `checkpointed` makes such trainers."""

    # Attributes of RayPPOTrainer.
    cfg: Any
    dispatch: Any
    global_step: int
    resume_mode: Any
    train_dataloader: Any
    all_metrics: Any
    tracker: LoggedMetrics

    checkpoint_worker: Any
    checkpoint_options: CheckpointConfig

    @property
    def _root(self) -> Path:
        return Path(self.cfg.trainer.ckpt_path).expanduser().absolute()

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        """Makes the models' workers, and takes `checkpoint_worker` in place of SkyRL's PolicyWorker.

        Raises UnsupportedError: the experiment has another policy worker than SkyRL's.
        """
        import ray
        from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import PolicyWorker as stock

        if PolicyWorker is not stock:
            raise UnsupportedError(
                "the experiment has a policy worker of its own: derive its class from "
                "mcore_ckpt.integrations.skyrl.PolicyWorkerBase, pass the class to checkpointed(trainer, worker), and "
                "let the experiment pass SkyRL's own PolicyWorker"
            )
        super().build_models(ray.remote(num_gpus=1)(self.checkpoint_worker), CriticWorker, RefWorker)  # type: ignore[misc]

    def save_checkpoints(self) -> str:
        """Saves the step `global_step`, and returns its folder. With `async_dist_ckpt_save` the policy commits later.

        Raises:
            CommitError: the driver's role was not committed, so the step does not count.
            UnsupportedError: the driver does not see what the workers have saved with this package.
            Exception: a worker raised. Earlier steps stay, but an earlier save of this step may be lost.
        """
        root, step = self._root, self.global_step
        step_path = root / f"global_step_{step}"
        set_aside(step_path)
        before = saved_attempts(step_path)
        workers = _Workers(self.dispatch, step_path)
        with tempfile.TemporaryDirectory(prefix="mcore_ckpt-skyrl-") as scratch:
            with changed(self, dispatch=workers), changed(self.cfg.trainer, ckpt_path=scratch):
                files = Path(super().save_checkpoints())  # type: ignore[misc]
            if not self._workers_have_begun(step_path, workers.models, before):
                return str(step_path)
            check_files(files, str(root))
            wanted = {rule.metric for rule in PreservationPolicy.of(self.checkpoint_options).keep_best}
            commit_driver_files(
                step_path / DRIVER_ROLE,
                step,
                files,
                workers.models,
                self.checkpoint_options.timeout_s,
                self.tracker.of_step(step, self.all_metrics, wanted),
            )
        # SkyRL's own messages name the temporary folder, so log the real folder.
        logger.info("committed the driver's files of step %d in %s", step, step_path / DRIVER_ROLE)
        delete_after_driver(root, DRIVER_ROLE, self.checkpoint_options, step)
        move_stock_tracker(root)
        return str(step_path)

    def _workers_have_begun(
        self, step_path: Path, models: list[str], before: frozenset[tuple[str | None, str]]
    ) -> bool:
        """True if our workers have saved all models, or are saving them. `before` has the attempts of earlier saves.

        False if a save failed although no error was raised (`if_failed="warn"`). The driver's files must not be
        committed then, because they could complete the weights of an earlier save of this step.

        Raises UnsupportedError: this process does not see the saves.
        """
        begun = {role for role, _ in saved_attempts(step_path) - before}
        missing = ", ".join(sorted(set(models) - begun))
        if missing and self.checkpoint_options.if_failed == "warn":
            logger.warning(
                "%s is no new checkpoint, because the save of %s failed: see the workers' log", step_path, missing
            )
            return False
        if missing:
            raise UnsupportedError(
                f"{step_path}: the driver does not see that the workers have saved {missing} with mcore_ckpt, so the "
                "step does not count: trainer.ckpt_path must be a folder that all nodes share, and the workers' class "
                "must derive from mcore_ckpt.integrations.skyrl.PolicyWorkerBase"
            )
        return True

    async def train(self) -> Any:
        """Trains as SkyRL does, and then makes SkyRL's tracker name the last step.

        At the end of the training, SkyRL itself waits for the last save.
        """
        result = await super().train()  # type: ignore[misc]
        move_stock_tracker(self._root)
        return result

    def _cleanup_old_checkpoints(self) -> None:
        """Does nothing, because SkyRL would also count steps that are not complete. We delete after the commit."""

    def load_checkpoints(self) -> Any:
        """Loads what `trainer.resume_mode` names, and returns what SkyRL's trainer returns.

        SkyRL's own `load_checkpoints` loads a checkpoint that SkyRL wrote.

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none is complete; or the named step is not complete.
            CheckpointError: the data loader did not take its position back. (SkyRL only logs that, and starts the data
                from the beginning.)
        """
        step_path = self._find()
        if step_path is None:
            return super().load_checkpoints()  # type: ignore[misc]
        loader = _Loader(self.train_dataloader)
        with tempfile.TemporaryDirectory(prefix="mcore_ckpt-skyrl-") as scratch:
            folder = Path(scratch) / f"global_step_{parse_step(step_path.name)}"
            put_files(step_path, folder)
            workers, from_path = _Workers(self.dispatch, step_path), type(self.resume_mode)("from_path")
            with (
                changed(self, dispatch=workers, train_dataloader=loader, resume_mode=from_path),
                changed(self.cfg.trainer, resume_path=str(folder)),
            ):
                step, _, *more = super().load_checkpoints()  # type: ignore[misc]
        if not loader.has_taken:
            raise CheckpointError(
                f"{step_path}: the data loader did not take its position back, so the training would use prompts "
                f"twice: {loader.error or 'the log has the reason'}"
            ) from loader.error
        return (step, str(step_path), *more)

    def _find(self) -> Path | None:
        """Returns the folder of our step to load; None if SkyRL's own method must load, or start from the beginning."""
        mode = self.resume_mode.value
        if mode == "latest":
            return newest(self._root)
        if mode != "from_path" or not self.cfg.trainer.resume_path:
            return None
        path = Path(self.cfg.trainer.resume_path).expanduser().absolute()
        advice = "To load the newest complete checkpoint, use trainer.resume_mode=latest"
        return path if is_complete_step(path, advice) else None


class _Workers:
    """Replaces SkyRL's WorkerDispatch during a save or a load, so that each model's folder lies in the real step.

    Attributes:
        models: the models that were saved.
    """

    def __init__(self, dispatch: Any, step_path: Path) -> None:
        self._dispatch = dispatch
        self._step_path = step_path
        self.models: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatch, name)

    def save_checkpoint(self, model: str, ckpt_dir: str, *args: Any, **kwargs: Any) -> None:
        self._dispatch.save_checkpoint(model, str(self._step_path / model), *args, **kwargs)
        self.models.append(model)

    def load_checkpoint(self, model: str, ckpt_dir: str, *args: Any, **kwargs: Any) -> None:
        self._dispatch.load_checkpoint(model, str(self._step_path / model), *args, **kwargs)


class _Loader:
    """Replaces the data loader during a load, and notes whether the loader has taken its position.

    If the loader could not take its position, SkyRL only logs this.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.error: Exception | None = None
        self.has_taken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_state_dict(self, state: Any) -> None:
        try:
            self._loader.load_state_dict(state)
            self.has_taken = True
        except Exception as error:
            self.error = error
            raise
