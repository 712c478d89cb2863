"""What a training comes back from, as one unit: the weights of all its engines and its `recover_info`, in one step.

    <root>/                                     AReaL's recover_info folder
    ├── latest_checkpointed_iteration.txt       for people, as in any folder of steps
    ├── step_info.json                          for people: AReaL's documents say to look there
    └── global_steps_{N}/
        ├── recover_info/                       written first: says which engines the step is made of
        └── default/  critic/  ...              of each engine

A step counts when all its parts are committed, whichever comes last and whatever process writes it. So there is no
moment at which new weights are paired with an old data position, and a save that goes on beside the training needs
nobody to wait for it.
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
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from mcore_ckpt.integrations.areal import stock_files
from mcore_ckpt.integrations.areal.recover_info import INFO_ROLE, JSON_BYTES, STEP_FILE, Progress, write
from mcore_ckpt.io import read_small, replace_file
from mcore_ckpt.ranks import Agreement, agree, rendezvous
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import (
    PreservationPolicy,
    StepStatus,
    TrainerLock,
    complete_steps,
    delete_old_steps,
    delete_step,
    discard_step,
    list_steps,
    remove_leftovers,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unit:
    """A step that all that was asked for can be loaded from."""

    step: int
    path: Path

    def part(self, name: str) -> Path:
        """The folder of an engine, or of INFO_ROLE."""
        return self.path / name


class RecoverUnits:
    """The units below one root. Every rank that runs the trainer makes one, which waits for the others, and calls its
    methods.

    Args:
        root: the folder of the steps.
        keep: how many complete units stay.
        timeout_s: of every wait for another rank, in seconds.
    """

    def __init__(self, root: Path, keep: int, timeout_s: float) -> None:
        self._root = root
        self._policy = PreservationPolicy(keep)
        self._timeout_s = timeout_s
        self._seat = rendezvous("areal/units", timeout_s)
        self._lock = TrainerLock(root, INFO_ROLE)
        self._has_saved = False
        self._current: int | None = None

    @property
    def seat(self) -> Agreement:
        return self._seat

    @property
    def is_first(self) -> bool:
        return self._seat.is_coordinator

    def roles_of(self, unit: Unit) -> list[str]:
        """The engines that a unit is made of."""
        roles = read_manifest(unit.part(INFO_ROLE)).roles
        return [role for role in roles if role != INFO_ROLE]

    @property
    def current(self) -> int | None:
        """The step that this training has last saved, or come back from: what it goes on after."""
        return self._current

    def follow(self, step: int) -> None:
        """The training goes on after this step, whose unit it has loaded, or whose engines have all saved."""
        self._current = step

    def find(self, roles: Sequence[str]) -> list[Unit]:
        """The units that have these engines, the newest first; none if no save has ever been completed here.

        Raises CheckpointNotFoundError: there are some, or were, and none is whole; lists what is there.
        """
        wanted = [*roles, INFO_ROLE]

        def answer() -> dict[str, Any]:
            return {"steps": [(found.step, str(found.path)) for found in _resumable(self._root, wanted)]}

        found = agree(self._seat, "finding a unit to recover from", {"root": str(self._root), "roles": wanted}, answer)
        return [Unit(step, Path(path)) for step, path in found["steps"]]

    def open(self, step: int, read_progress: Callable[[], Progress], roles: Sequence[str]) -> Unit:
        """Begins a unit: its recover_info is committed, and it counts once these engines have saved into it.

        Args:
            step: of the unit.
            read_progress: returns this rank's part of recover_info.
            roles: the engines.

        Raises:
            CheckpointError: there are units of an earlier run, and this training has not come back from any: it would
                mix with them. Nothing has been changed.
            CommitError, UnsupportedError: as any save; what was there counts as before.
        """
        folder = step_dir(self._root, step)
        write(self._seat, folder / INFO_ROLE, step, roles, read_progress, before=partial(self._make_room, step))
        return Unit(step, folder)

    def tidy(self) -> None:
        """Once the unit of this training is complete the others may go. Raises nothing that a save would fail for."""
        if self._seat.is_coordinator and self._current is not None:
            try:
                self._tidy(self._current)
            except OSError as error:
                logger.warning("%s: old units could not be deleted: %s", self._root, error)

    def _make_room(self, step: int) -> None:
        """On rank 0: what an earlier attempt at this step has left must not be taken for a part of this one."""
        self._lock.take(self._timeout_s / 2)
        complete = [status.step for status in complete_steps(self._root)]
        if self._current is None and complete:
            raise CheckpointError(
                f"{self._root}: has units of an earlier run (step {', '.join(map(str, complete))}), and this training "
                "has not come back from any of them: call load first, or delete or move the folder to start afresh"
            )
        if self._current is not None and step < self._current:
            raise CheckpointError(
                f"{self._root}: this training has come back from step {self._current}, and is about to save step "
                f"{step}: it goes over again what it has done, and would leave the newer unit to be taken for newer"
            )
        if not self._has_saved:
            remove_leftovers(self._root, INFO_ROLE, alone=True)
        self._has_saved = True
        for path in step_dirs(self._root).get(step, []):
            if (path / PINNED_FILE).exists():
                raise CheckpointError(
                    f"{path}: is pinned, and training is about to save this step again: unpin it, or move it away"
                )
            logger.warning("%s: removing what an earlier run has left of step %d", path, step)
            discard_step(path)

    def _tidy(self, step: int) -> None:
        complete = complete_steps(self._root)
        if step not in [status.step for status in complete]:
            return  # it is still being saved
        for status in complete:
            if status.step > step and not status.pinned:
                logger.warning("%s: deleting it: training went on from an older unit, to step %d", status.path, step)
                delete_step(status)
        delete_old_steps(self._root, self._policy, step)
        self._show(step)

    def _show(self, step: int) -> None:
        """For people, beside the tracker."""
        if set(stock_files.found(self._root)) - {STEP_FILE}:
            stock_files.move_aside(self._root)
        source = step_dir(self._root, step) / INFO_ROLE / STEP_FILE
        shown, data = self._root / STEP_FILE, read_small(source, JSON_BYTES)
        if not shown.exists() or read_small(shown, JSON_BYTES) != data:
            replace_file(shown, data)


def _resumable(root: Path, roles: Sequence[str]) -> list[StepStatus]:
    try:
        return resumable_steps(root, roles)
    except CheckpointNotFoundError:
        statuses = list_steps(root)
        # The tracker comes with the first step that is complete.
        if os.path.lexists(root / TRACKER_FILE) or any(s.is_complete or s.problems for s in statuses):
            raise
        reasons = "".join(f"\n  {status.reason}" for status in statuses)
        logger.warning("%s: no save was ever completed, so training starts from the beginning%s", root, reasons)
        return []


def lost(units: Sequence[Unit], reasons: Sequence[str]) -> CheckpointCorruptError:
    """None of the units could be loaded."""
    listed = "".join(f"\n  tried: {reason}" for reason in reasons)
    return CheckpointCorruptError(
        f"{units[0].path.parent}: no unit can be loaded, and what has been loaded may be of several: training must not "
        f"go on from here. To start from the beginning all the same, move the folder away{listed}"
    )
