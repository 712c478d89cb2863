"""Finds problems of whole steps and of the tracker, even while trainers save there.

A single look can find a step that lacks a role because the role's commit is still to come, a tracker that is about to
be updated, or half of a step that retention is deleting. A moment later, all of these are in order. So a fault counts
as a problem only if later looks show it again, and if no living trainer could be about to mend it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io import tuning
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.choice import order_of
from mcore_ckpt.steps.listing import StepStatus
from mcore_ckpt.steps.node_files import is_node_folder
from mcore_ckpt.steps.owner import Life
from mcore_ckpt.steps.trainer_watch import TrainerWatch, any_life

# A role of a trainer can be one save ahead of another role, but waits for that role before the next save. So at most
# this many steps are under way.
_STEPS_UNDER_WAY = 2


@dataclass(frozen=True)
class Settled:
    """The result of later looks: the problems, and the steps that a living trainer is about to complete."""

    problems: tuple[str, ...] = ()
    under_way: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Suspects:
    """Possible problems: incomplete steps, and a problem of the tracker.

    `tracker` is None if the tracker has no problem, or is not examined. `tracked` is the step that the tracker names.
    """

    steps: tuple[StepStatus, ...]
    tracker: str | None
    tracked: int | None


class StepProblems:
    """Looks at steps in the constructor, and again in `settle`. `statuses` are the steps at the first look.

    Args:
        path: the folder of one step, or of all steps.
        step: the only step to look at in a folder of all steps; None for all steps and the tracker.

    Raises OSError as `list_steps` does.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        is_one = steps.is_step(path)
        self._root = path.parent if is_one else path
        self._watch = TrainerWatch(self._root)
        self._began = time.monotonic()
        self.statuses = [steps.step_status(path)] if is_one else steps.list_steps(path, step)
        self.statuses = [status for status in self.statuses if step in (None, status.step)]
        # Do not examine a tracker in a node's folder, because the fast tier has no tracker there.
        self._with_tracker = not is_one and step is None and not is_node_folder(path, self.statuses)
        self._suspects = self._look(self.statuses)

    def settle(self) -> Settled:
        """Returns the problems that remain. Waits, at most half a minute, while problems may still go away."""
        problems: list[str] = []
        under_way: list[str] = []
        try:
            while True:
                began = time.monotonic()
                suspects = self._look_again()
                lives = self._watch.lives()
                problems, under_way, unknown = self._sorted(suspects, lives)
                if not unknown:
                    return Settled(tuple(problems), tuple(under_way))
                # If a look takes longer than the pause (on a slow file system), pause for as long as the look took.
                time.sleep(max(tuning.SETTLE_POLL_S, time.monotonic() - began))
        except OSError as error:
            first = [status.reason for status in self._suspects.steps]
            first += [] if self._suspects.tracker is None else [self._suspects.tracker]
            return Settled(
                (*first, f"{self._root}: could not be read again, so these problems may be temporary: {error}")
            )

    def _look(self, statuses: Iterable[StepStatus]) -> _Suspects:
        # Leave out saves under way, and steps in which only files are missing: `verify` itself reports each missing
        # file.
        incomplete = (status for status in statuses if not status.is_claimed and steps.holds_something(status))
        tracked = steps.read_tracker(self._root)
        wrong = tracker.tracker_problems(self._root) if self._with_tracker else []
        return _Suspects(tuple(incomplete), next(iter(wrong), None), tracked)

    def _look_again(self) -> _Suspects:
        """Looks again, and returns the suspects of the last look that are still suspects."""
        last = self._suspects
        found = self._look([steps.step_status(status.path) for status in last.steps])
        # Compare the step that the tracker names, not the sentence about the tracker, because the sentence changes with
        # each commit. If the step has changed, the tracker is being updated.
        is_same = last.tracker is not None and found.tracked == last.tracked
        self._suspects = _Suspects(found.steps, found.tracker if is_same else None, found.tracked)
        return self._suspects

    def _sorted(self, suspects: _Suspects, lives: Mapping[str, Life]) -> tuple[list[str], list[str], list[str]]:
        """Sorts suspects into problems, saves under way, and undecided suspects."""
        by_life: dict[Life, list[str]] = {life: [] for life in Life}
        if suspects.steps:
            newest, numbers = steps.newest_complete(self._root), sorted(file_names.step_dirs(self._root))
            limits = [*numbers[-_STEPS_UNDER_WAY:][:1], *([] if newest is None else [newest.step])]
            oldest = max(limits, default=0)
            # After a rollback, steps under way have lower numbers than the abandoned steps, so look at the order of
            # commits, too.
            last = sorted(suspects.steps, key=order_of)[-_STEPS_UNDER_WAY:]
            for status in suspects.steps:
                is_newer = newest is not None and status in last and order_of(status) > order_of(newest)
                is_last = status.step >= oldest or is_newer
                by_life[life_of_saver(status, lives) if is_last else Life.DEAD].append(status.reason)
        if suspects.tracker is not None:
            # A trainer updates the tracker right after the commit. If the tracker is wrong for this long, the trainer
            # has failed.
            is_late = time.monotonic() - self._began >= tuning.TRACKER_SETTLES_S
            is_dead = is_late or any_life(lives.values()) is Life.DEAD
            by_life[Life.DEAD if is_dead else Life.UNKNOWN].append(suspects.tracker)
        return by_life[Life.DEAD], by_life[Life.ALIVE], by_life[Life.UNKNOWN]


def life_of_saver(status: StepStatus, lives: Mapping[str, Life]) -> Life:
    """Returns whether a trainer that could commit the missing roles of a step is alive."""
    missing = status.missing
    if status.problems or not missing:
        return Life.DEAD
    # A role has no lock file if no trainer has saved it yet, or if it consists of plain files. Then the trainer of any
    # other role of the step may write the missing role.
    candidates = status.declared if missing - lives.keys() else missing
    return any_life(lives[role] for role in candidates if role in lives)
