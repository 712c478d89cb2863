"""Makes the last save before the machine goes, as safe as the time that is left allows.

    wait for a save that is under way, which may be of the last step already
    choose, together with all ranks: durable, on the nodes only, or nothing
    save, and wait for it

Every wait ends before the machine goes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.ranks.rounds import Record, decide
from mcore_ckpt.save.background import SaveHandle
from mcore_ckpt.save.save_control import SaveControl

logger = logging.getLogger(__name__)

DURABLE, ON_NODES = "durable", "on the nodes"
# The share of the remaining time that is kept for the end of the process, and the most that is kept, in seconds.
_SHARE_TO_END, _MOST_TO_END_S = 0.1, 5.0
# The time that is reserved for a save, as a multiple of the time that it is expected to take.
MARGIN = 1.25


@dataclass(frozen=True)
class Stopped:
    """How a training was stopped.

    Attributes:
        step: the last step that was trained.
        reason: what has asked for the stop, with the rank: "SIGTERM on rank 3".
        saved: how step `step` is saved, as this rank knows it: "durable" (in the root), "on the nodes" (only in the
            fast tier), or None: it is not saved, and the newest complete step remains.
    """

    step: int
    reason: str
    saved: str | None


@dataclass(frozen=True)
class Choice:
    """The decision how the last step is saved in the time that is left.

    Attributes:
        how: "durable" or "on the nodes"; None: nothing.
        is_new: whether the step is saved now; if not, an earlier save of the step counts.
        reason: why the step does not become durable; empty if it does.
    """

    how: str | None
    is_new: bool
    reason: str = ""


@dataclass(frozen=True)
class Times:
    """How long saves take, in seconds; None if unknown.

    Attributes:
        commit_s: from the beginning of a save until it is committed (with a fast tier: on the nodes).
        drain_s: from the commit until the step is in the root; 0.0 without a fast tier.
        given_s: how long a durable save takes in all, as the caller has said. Measured times are preferred.
    """

    commit_s: float | None
    drain_s: float | None
    given_s: float | None

    @property
    def durable_s(self) -> float | None:
        """How long a durable save takes, or a lower bound if only that is known; None if nothing is known."""
        if self.commit_s is not None and self.drain_s is not None:
            return self.commit_s + self.drain_s
        return max((each for each in (self.commit_s, self.given_s) if each is not None), default=None)


def choose(left_s: float, times: Times, saved: str | None, has_nodes: bool, has_root: bool) -> Choice:
    """Chooses what to save.

    Args:
        left_s: how many seconds are left; infinite if that is unknown.
        times: how long saves take. A save of unknown length is tried.
        saved: how the step is saved already; None if it is not.
        has_nodes, has_root: where saves can go.
    """
    if saved == DURABLE:
        return Choice(saved, is_new=False)
    problem = "the root gets no steps (durable_every=None)"
    if has_root:
        problem = _why_too_long("a durable save", times.durable_s, left_s)
        if not problem:
            return Choice(DURABLE, is_new=True)
    if saved is not None:
        return Choice(saved, is_new=False, reason=problem)
    if not has_nodes:
        return Choice(None, is_new=False, reason=problem)
    too_long = _why_too_long("a save on the nodes", times.commit_s, left_s)
    if too_long:
        return Choice(None, is_new=False, reason=too_long)
    return Choice(ON_NODES, is_new=True, reason=problem)


def _why_too_long(what: str, takes_s: float | None, left_s: float) -> str:
    if takes_s is None or takes_s * MARGIN <= left_s:
        return ""
    return f"{what} takes about {takes_s:.1f} s, but only {max(0.0, left_s):.1f} s are left"


def time_for_waits(left_s: float) -> float:
    """Returns for how many seconds this rank may wait if its machine goes in `left_s` seconds."""
    return max(0.0, left_s - min(_MOST_TO_END_S, left_s * _SHARE_TO_END))


class LastSave:
    """The last save of a manager.

    Args:
        control: controls the manager's saves.
        save: saves a step.
        given_s: see `Times.given_s`.
    """

    def __init__(self, control: SaveControl, save: Callable[[int], SaveHandle], given_s: float | None) -> None:
        self._control, self._save, self._given_s = control, save, given_s
        self._background, self._destination = control.background, control.destination
        self._ends_at = math.inf

    @property
    def times(self) -> Times:
        """How long saves take, as far as this rank knows."""
        return Times(self._background.longest_s, self._destination.drain_s, self._given_s)

    def make(self, step: int, reason: str, left_s: float | None) -> Stopped:
        """Saves a step, if there is time. Every rank calls it.

        A CheckpointError of the save is logged. Other errors are raised.

        Args:
            step: the last step that was trained.
            reason: what has asked for the stop.
            left_s: in how many seconds the machine goes; None if that is unknown.
        """
        self._limit(left_s)
        saved: str | None = None
        try:
            self._end_save_under_way()
            if left_s is not None and left_s <= 0:  # true on all ranks, and a wait for ranks would end at once
                choice = Choice(self._saved_already(step), False, "no time is left")
            else:
                choice = self._choose_together(step)
            if choice.is_new:
                self._destination.choose_next(choice.how == DURABLE)
                saved = self._await(self._save(step))
            elif choice.how is not None:
                newest = self._background.newest_of_step
                saved = choice.how if newest is None else self._await(newest)
            self._tell(step, choice, saved)
        except (CheckpointError, TimeoutError) as error:
            logger.error("step %d could not be saved before the machine goes: %s", step, error)
        return Stopped(step, reason, saved)

    def _limit(self, left_s: float | None) -> None:
        if left_s is None:
            return
        seconds = time_for_waits(left_s)
        self._ends_at = time.monotonic() + seconds
        self._control.limit_waits(seconds)

    @property
    def _left_s(self) -> float:
        return self._ends_at - time.monotonic()

    @property
    def _patience_s(self) -> float | None:
        return None if self._ends_at == math.inf else max(0.0, self._left_s)

    def _end_save_under_way(self) -> None:
        newest = self._background.newest_of_step
        if newest is not None:
            with suppress(CheckpointError, TimeoutError):
                newest.wait(self._patience_s)
        if self._background.failure() is not None:
            # This failure is logged already, and must not keep the last save from beginning.
            self._background.mark_failure_seen()

    def _choose_together(self, step: int) -> Choice:
        """Chooses with all ranks what to save. Raises AgreementError if a rank is missing."""

        def work() -> Record:
            return {
                "busy": self._background.busy,
                "saved": self._saved_already(step),
                "left": None if self._ends_at == math.inf else self._control.agreement.shortened(self._left_s),
            }

        def combine(records: Sequence[Record]) -> Record:
            busy = [rank for rank, record in enumerate(records) if record["busy"]]
            if busy:
                return vars(Choice(None, False, f"an earlier save is still under way on rank {busy[0]}"))
            all_saved = [record["saved"] for record in records]
            saved = all_saved[0] if len(set(all_saved)) == 1 else None
            left_s = min((record["left"] for record in records if record["left"] is not None), default=math.inf)
            places = self._destination.has_nodes, self._destination.has_root
            return vars(choose(left_s, self.times, saved, *places))

        return Choice(**decide(self._control.agreement, f"choosing how to save step {step}", work, combine))

    def _saved_already(self, step: int) -> str | None:
        newest = self._background.newest_of_step
        is_of_step = newest is not None and newest.step == step
        return _how_saved(newest, self._destination.has_nodes) if newest and is_of_step else None

    def _await(self, handle: SaveHandle) -> str | None:
        """Waits for a save and for the copies that make it safe, as long as there is time.

        Returns how the step is saved.
        """
        handle.wait(self._patience_s)
        if handle.skipped is not None:
            logger.error("step %d is not saved: %s", handle.step, handle.skipped)
            return None
        if handle.drain is not None:
            with suppress(CheckpointError, TimeoutError):  # the step is on the nodes already
                handle.drain.wait(self._patience_s)
        elif handle.copies is not None:
            with suppress(TimeoutError):
                handle.copies.wait(self._patience_s)
        return _how_saved(handle, self._destination.has_nodes, only_ended=True)

    def _tell(self, step: int, choice: Choice, saved: str | None) -> None:
        if self._control.agreement.rank != 0:
            return
        if saved == DURABLE:
            logger.warning("step %d is saved, and durable", step)
        elif saved is not None:
            reason = choice.reason or _why_not_durable(self._background.newest_of_step)
            logger.warning("step %d is saved on the nodes, but not in the root: %s", step, reason)
        else:
            reason = choice.reason or "the last save was skipped"
            logger.warning("step %d is not saved, so the newest complete step remains: %s", step, reason)


def _why_not_durable(handle: SaveHandle | None) -> str:
    """Says why a step that was to become durable is only on the nodes."""
    drain = None if handle is None else handle.drain
    if drain is None:
        return "the step was not to be copied to the root"
    if drain.committed:
        return "the copy to the root was not over in time, but is now"
    return f"the copy to the root has failed: {drain.exception}" if drain.done else "no time is left"


def _how_saved(handle: SaveHandle, has_nodes: bool, only_ended: bool = False) -> str | None:
    """Returns how the step is, or will be, saved. With `only_ended`, a copy to the root counts only if it has ended."""
    if not handle.committed:
        return None
    if not has_nodes:
        return DURABLE
    drain = handle.drain
    if drain is None or (drain.done and not drain.committed) or (only_ended and not drain.committed):
        return ON_NODES
    return DURABLE
