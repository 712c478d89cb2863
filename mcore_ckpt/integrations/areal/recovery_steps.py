"""Saves, finds and deletes recovery steps. Each step has the weights of all engines and `recover_info`.

    <root>/                                     AReaL's recover_info folder
    ├── latest_checkpointed_iteration.txt       the tracker, for people
    ├── step_info.json                          for people, because AReaL's documents name it
    └── global_steps_{N}/
        ├── recover_info/                       written first; its manifest lists the engines
        └── default/  critic/  ...              one folder for each engine

A step is complete once all its roles are committed, in any order and by any process. So new weights are never paired
with an old data position, and training does not have to wait for saves in the background.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import PINNED_FILE, TRACKER_FILE, read_manifest, step_dir, step_dirs
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, HungDiskError
from mcore_ckpt.integrations.areal import stock_files
from mcore_ckpt.integrations.areal.recover_info import INFO_ROLE, JSON_BYTES, STEP_FILE, Progress, write
from mcore_ckpt.io import DiskWatch, read_small, replace_file, top_mode
from mcore_ckpt.ranks import Agreement, agree, rendezvous
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import (
    PreservationPolicy,
    StepStatus,
    TrainerLock,
    check_own_step,
    delete_old_steps,
    delete_step,
    discard_step,
    list_steps,
    remove_leftovers,
    rules_of_others,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveryStep:
    """The number and the folder of a step that the training saves, or from which it can recover."""

    step: int
    path: Path

    def role_dir(self, name: str) -> Path:
        """Returns the folder of an engine, or of INFO_ROLE."""
        return self.path / name


class RecoverySteps:
    """Saves, finds and deletes the recovery steps below one root.

    Every rank that runs the trainer makes such an object, and calls its methods. The constructor waits for the other
    ranks.

    Args:
        root: the folder of the steps.
        keep: how many complete steps stay.
        timeout_s: how long any wait for another rank may take, in seconds.
        shared: whether the Unix group may enter a root that this object makes (`CheckpointConfig.shared_with_group`).

    Attributes:
        agreement: connects this rank with the other ranks that run the trainer.
        current: the step that this training last saved or recovered from; None at the beginning. The caller sets
            `current` once all engines of the step have been loaded or saved.
    """

    def __init__(self, root: Path, keep: int, timeout_s: float, shared: bool | None = None) -> None:
        self._root = root
        self._policy = PreservationPolicy(keep)
        self._timeout_s = timeout_s
        self._lock = TrainerLock(root, INFO_ROLE, top_mode(shared))
        self._has_saved = False
        self.agreement: Agreement = rendezvous("areal/recovery", timeout_s)
        self.agreement.runner = DiskWatch(timeout_s, who=f"rank {self.agreement.rank}: ")
        self.current: int | None = None

    def find(self, roles: Sequence[str]) -> list[RecoveryStep]:
        """Returns the complete steps that have the engines `roles`, the newest first; [] if no save was ever completed.

        Raises CheckpointNotFoundError: there are or were steps, but none is complete with these engines. The message
        lists the steps.
        """
        wanted = [*roles, INFO_ROLE]

        def answer() -> dict[str, Any]:
            return {"steps": [(found.step, str(found.path)) for found in _resumable(self._root, wanted)]}

        request = {"root": str(self._root), "roles": wanted}
        found = agree(self.agreement, "finding a step to recover from", request, answer)
        return [RecoveryStep(step, Path(path)) for step, path in found["steps"]]

    def open(self, step: int, read_progress: Callable[[], Progress], roles: Sequence[str]) -> RecoveryStep:
        """Commits recover_info of a step. The step is complete once the engines `roles` are committed, too.

        Raises:
            CheckpointError: the root has steps of an earlier run that this training has not recovered from, so the
                steps of two runs would mix; or the step is older than `current`; or the step is pinned. Nothing
                was saved.
            CommitError, UnsupportedError: recover_info could not be saved. Earlier steps stay complete.
        """
        folder = step_dir(self._root, step)
        prepare, keep_lock = partial(self._prepare, step), partial(self._lock.take, patience_s=0)
        write(self.agreement, folder / INFO_ROLE, step, roles, read_progress, prepare, keep_lock)
        return RecoveryStep(step, folder)

    def delete_old(self) -> None:
        """Deletes old steps if the current step is complete. Errors of the disk are logged, not raised."""
        if self.agreement.is_coordinator and (current := self.current) is not None:
            try:
                self.agreement.runner.run(lambda: self._delete_old(current))
            except (OSError, HungDiskError) as error:
                logger.warning("%s: old steps could not be deleted: %s", self._root, error)

    def _prepare(self, step: int) -> None:
        """Runs on rank 0 before a save: takes the lock, and removes leftovers and any older folder of this step."""
        self._lock.take(self._timeout_s / 2)
        # A step with missing files counts, too: a user may restore the files, so the training must not begin anew.
        there = [status.step for status in list_steps(self._root) if status.is_claimed]
        if self.current is None and there:
            raise CheckpointError(
                f"{self._root}: has steps of an earlier run (step {', '.join(map(str, there))}), and this training "
                "has not recovered from any of them: call load first, or delete or move the folder to start afresh"
            )
        if self.current is not None and step < self.current:
            raise CheckpointError(
                f"{self._root}: this training continued from step {self.current}, and is about to save step {step}. A "
                "restart would then load the newer step, which is not part of this training. Save to another folder, "
                "or move the newer step out of this folder"
            )
        if not self._has_saved:
            remove_leftovers(self._root, INFO_ROLE, alone=True)
        self._has_saved = True
        for path in step_dirs(self._root).get(step, []):
            if (path / PINNED_FILE).exists():
                raise CheckpointError(
                    f"{path}: is pinned, but training is about to save this step again: unpin it, or move it to "
                    "another folder"
                )
            check_own_step(path)
            logger.warning("%s: removing what an earlier run has left of step %d", path, step)
            discard_step(path)

    def _delete_old(self, step: int) -> None:
        statuses = list_steps(self._root)
        if not any(status.step == step and status.is_complete for status in statuses):
            return  # the current step is still being saved
        for status in statuses:
            if status.step > step and status.is_claimed and not status.pinned:
                logger.warning(
                    "%s: deleting this step, because training went back to an older step, and has now saved step %d",
                    status.path,
                    step,
                )
                delete_step(status)
        delete_old_steps(self._root, self._policy, step, others=rules_of_others(self._root, INFO_ROLE))
        self._copy_step_file(step)

    def _copy_step_file(self, step: int) -> None:
        """Copies the step's step_info.json into the root, because AReaL's documents say that the file is there."""
        if set(stock_files.found(self._root)) - {STEP_FILE}:
            stock_files.move_aside(self._root)
        source = step_dir(self._root, step) / INFO_ROLE / STEP_FILE
        target, data = self._root / STEP_FILE, read_small(source, JSON_BYTES)
        if not target.exists() or read_small(target, JSON_BYTES) != data:
            replace_file(target, data)


def engines_of(step: RecoveryStep) -> list[str]:
    """Returns the engines that a step consists of."""
    return [role for role in read_manifest(step.role_dir(INFO_ROLE)).roles if role != INFO_ROLE]


def nothing_loaded(steps: Sequence[RecoveryStep], reasons: Sequence[str]) -> CheckpointCorruptError:
    """Returns the error to raise if none of the steps could be loaded."""
    listed = "".join(f"\n  tried: {reason}" for reason in reasons)
    return CheckpointCorruptError(
        f"{steps[0].path.parent}: no step can be loaded, and the engines may now hold parts of several steps, so "
        f"training must not continue. To start from the beginning, move this folder to another place{listed}"
    )


def _resumable(root: Path, roles: Sequence[str]) -> list[StepStatus]:
    try:
        return resumable_steps(root, roles)
    except CheckpointNotFoundError:
        statuses = list_steps(root)
        # The tracker is written with the first complete step. Without a tracker, no save was ever completed.
        if os.path.lexists(root / TRACKER_FILE) or any(s.is_complete or s.problems for s in statuses):
            raise
        reasons = "".join(f"\n  {status.reason}" for status in statuses)
        logger.warning("%s: no save was ever completed, so training starts from the beginning%s", root, reasons)
        return []
