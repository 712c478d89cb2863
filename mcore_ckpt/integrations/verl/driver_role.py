"""Defines a callback of verl's trainer (0.9.1). The callback commits the driver's files as a role of each step."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

try:
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
    from verl.trainer.ppo.utils import need_critic
except ImportError as error:
    raise ImportError(f"DriverRole needs verl 0.9.1 or newer: pip install verl ({error})") from error

from mcore_ckpt.checkpoint import Manifest, ManifestSummary
from mcore_ckpt.errors import CheckpointError, CommitError
from mcore_ckpt.integrations.kit.driver import delete_after_driver, driver_agreement
from mcore_ckpt.integrations.verl.driver_files import DRIVER, add_files, correct_tracker
from mcore_ckpt.integrations.verl.driver_options import declare_driver, settings_of_run, trained_roles
from mcore_ckpt.io import Worker
from mcore_ckpt.steps import (
    TrainerLock,
    commit_role,
    list_steps,
    move_tracker,
    remove_leftovers,
    step_status,
)

logger = logging.getLogger(__name__)

# How often the driver looks whether the workers have committed an async save, in seconds.
_POLL_S = 0.2


class DriverRole(CheckpointCallback):
    """Makes `data.pt` and `transfer_queue/` a role of each step.

    To use this class, name it in `trainer.checkpoint_callback_class`. A step is then complete once the workers, and
    after them the driver, have committed. verl makes the callback in its driver before the workers, and calls the
    callback after the driver has written its files.

    Args:
        config: verl's whole configuration. DriverRole sets `checkpoint.roles` in it, because the workers cannot see
            whether the driver will commit.

    Raises:
        InvalidArgumentError: a role that is trained is not saved by this package, so no step would be complete.
        UnsupportedError: `config` has a fast tier or a remote store, whose copies of the steps would lack this role.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        has_critic = need_critic(config)
        self._trained = trained_roles(has_critic)
        self._roles = declare_driver(config, has_critic)
        self._config = settings_of_run(config, has_critic)
        self._root = Path(os.path.abspath(config.trainer.default_local_dir))
        self._lock = TrainerLock(self._root, DRIVER)
        self._work = Worker("mcore_ckpt driver of verl")
        self._next_save, self._deadline = threading.Event(), math.inf
        self._failure: CheckpointError | None = None
        self._has_saved = False
        if config.trainer.resume_mode == "auto":
            correct_tracker(self._root)
        self._earlier = frozenset(head.attempt for status in list_steps(self._root) for head in status.heads)

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **more: Any
    ) -> None:
        """Commits the driver's files in a step after the workers, and moves the tracker to the step.

        With `async_save`, the commit runs in the background, and the next call waits for the commit. In the last step,
        this call itself waits.

        Raises CheckpointError: the role was not committed, so the step is not complete. After an async save, the next
        call or `wait` raises this error. With `if_failed="warn"` the error is only logged.
        """
        # The workers have begun this save, so their previous save has ended. Do not wait for that save any longer.
        self._next_save.set()
        self.wait()
        self._next_save.clear()
        step = int(global_step)
        # Every save runs on another thread. Otherwise `wait` would not notice a hanging disk.
        self._work.add(partial(self._save, Path(os.path.abspath(checkpoint_dir)), step))
        if not async_save:
            self.wait()
        self._work.add(partial(delete_after_driver, self._root, DRIVER, self._config, step))
        if step >= trainer.total_training_steps:
            self.wait()  # Ray ends this process when the trainer returns

    def wait(self) -> None:
        """Waits until no step is being committed or deleted. Waits for the workers for at most `timeout_s` seconds.

        Raises CheckpointError: see `on_save`.
        """
        self._deadline = time.monotonic() + self._config.timeout_s
        self._work.wait(self._config.timeout_s)
        self._deadline = math.inf
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _save(self, step_path: Path, step: int) -> None:
        try:
            self._commit(step_path, step)
        except (CheckpointError, OSError) as error:
            if self._config.if_failed == "warn":
                logger.warning("%s: this step stays incomplete: %s", step_path, error)
            else:
                self._failure = error if isinstance(error, CheckpointError) else CommitError(str(error))

    def _commit(self, step_path: Path, step: int) -> None:
        workers = self._await_workers(step_path)

        def stamp(manifest: Manifest) -> Manifest:
            return replace(manifest, run=workers.run, commit=workers.commit)

        commit_role(
            driver_agreement(DRIVER, self._config.timeout_s),
            step_path / DRIVER,
            step,
            self._roles,
            partial(add_files, step_path),
            before=self._prepare,
            after=partial(move_tracker, self._root, step),
            may_commit=partial(self._lock.take, patience_s=0),
            stamp=stamp,
        )

    def _await_workers(self, step_path: Path) -> ManifestSummary:
        """Waits until the workers have committed all their roles of a step, and returns the newest of these commits.

        After a rollback, a step is saved again. If the driver committed before the workers, the driver's role would
        complete the step with the old roles of an earlier start.

        Raises CommitError: the workers have not committed, although the next save has begun or the time for waiting is
        over.
        """
        while True:
            # Decide first whether this look is the last one, because the workers may commit during the look.
            is_last_look = self._next_save.is_set() or time.monotonic() > self._deadline
            there = [head for head in step_status(step_path).heads if head.role in self._trained]
            heads = [head for head in there if head.attempt not in self._earlier]
            missing = set(self._trained) - {head.role for head in heads}
            if not missing:
                return max(heads, key=lambda head: head.number)
            if is_last_look:
                raise CommitError(
                    f"{step_path}: not committed by {', '.join(sorted(missing))}: look at the workers' log"
                )
            self._next_save.wait(_POLL_S)

    def _prepare(self) -> None:
        self._lock.take(self._config.timeout_s / 2)
        if not self._has_saved:
            remove_leftovers(self._root, DRIVER, alone=True)
        self._has_saved = True
