"""Finds out what is wrong with steps as a whole and with their tracker, even while trainers save there.

A look finds a step without one of its roles between two commits, a tracker that is late between a commit and its
update, and half of a step that retention is deleting. A moment later all of that is in order. So what a first look
finds is a problem only if later looks find it, too, and no living trainer can be about to mend it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.io import tuning
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.listing import StepStatus
from mcore_ckpt.steps.trainer_watch import Life, TrainerWatch


@dataclass(frozen=True)
class Settled:
    """What is left of the problems of a first look.

    Attributes:
        problems: what is wrong.
        under_way: what a living trainer is about to complete.
    """

    problems: tuple[str, ...] = ()
    under_way: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Suspect:
    """What may be a problem: of a step, or of the tracker if `status` is None."""

    text: str
    status: StepStatus | None


class StepProblems:
    """Looks at steps when it is made, and again in `settle`.

    Args:
        path: the folder of one step, or of all steps.
        step: the only step to look at in a folder of all steps; None for all of them and the tracker.

    Attributes:
        statuses: the steps, as the first look found them.

    Raises OSError like `list_steps`.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        self._path = path
        self._step = step
        self._is_one = steps.is_step(path)
        self._root = path.parent if self._is_one else path
        self._watch = TrainerWatch(self._root)
        self._began = time.monotonic()
        self.statuses = self._look()
        self._first = {suspect.text for suspect in self._suspects(self.statuses)}

    def settle(self) -> Settled:
        """Returns what is still wrong. It waits while that may change by itself. Raises OSError like `list_steps`."""
        while True:
            suspects = [suspect for suspect in self._suspects(self._look()) if suspect.text in self._first]
            self._first = {suspect.text for suspect in suspects}
            lives = [(suspect.text, self._life(suspect)) for suspect in suspects]
            if not any(life is Life.UNKNOWN for _, life in lives):
                return Settled(
                    tuple(text for text, life in lives if life is Life.DEAD),
                    tuple(text for text, life in lives if life is Life.ALIVE),
                )
            time.sleep(tuning.SETTLE_POLL_S)

    def _look(self) -> list[StepStatus]:
        statuses = [steps.step_status(self._path)] if self._is_one else steps.list_steps(self._path, self._step)
        return [status for status in statuses if self._step in (None, status.step)]

    def _suspects(self, statuses: Sequence[StepStatus]) -> list[_Suspect]:
        # A save that is under way is not a problem.
        suspects = [
            _Suspect(status.reason, status)
            for status in statuses
            if not status.is_complete and steps.holds_something(status)
        ]
        if not self._is_one and self._step is None:
            suspects += [_Suspect(text, None) for text in tracker.tracker_problems(self._path)]
        return suspects

    def _life(self, suspect: _Suspect) -> Life:
        """Returns whether a trainer that is about to mend the problem is alive."""
        if suspect.status is None:
            # The trainer moves the tracker right after its commit. If it has not done so for that long, it has failed.
            is_late = time.monotonic() - self._began >= tuning.TRACKER_SETTLES_S
            return Life.DEAD if is_late or self._watch.life_of_any() is Life.DEAD else Life.UNKNOWN
        missing = suspect.status.declared - suspect.status.committed
        newest = steps.newest_complete(self._root)
        if suspect.status.problems or not missing or (newest is not None and suspect.status.step < newest.step):
            return Life.DEAD
        return self._watch.life_of_saver(suspect.status.declared, missing)
