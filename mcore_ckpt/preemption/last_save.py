"""Makes the last save before the machine goes, as safe as the time that is left allows.

    wait for a save that is under way, which may be of the last step already
    wait for copies that the last save would wait for, as long as the save still fits into the time after the copies
    choose, together with all ranks: durable, on the nodes only, or nothing
    save, and wait for it

Several managers, one for each role, make one choice and wait together. Every wait ends before the machine goes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from mcore_ckpt.errors import CheckpointError, InvalidStateError
from mcore_ckpt.preemption.choice import DURABLE, ON_NODES, Choice, Times, choose, least_safe, patience_before
from mcore_ckpt.ranks.deadlines import seconds_until
from mcore_ckpt.ranks.rounds import Record, decide
from mcore_ckpt.save.background import SaveHandle
from mcore_ckpt.save.save_control import SaveControl

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

# The share of the remaining time that is kept for the end of the process, and the most that is kept, in seconds.
_SHARE_TO_END, _MOST_TO_END_S = 0.1, 5.0


@dataclass(frozen=True)
class Stopped:
    """How a training was stopped.

    Attributes:
        step: the last step that was trained.
        reason: what has asked for the stop, with the rank: "SIGTERM on rank 3".
        saved: how step `step` is saved, as far as this rank knows: "durable" (in the root), "on the nodes" (only in the
            fast tier), or None: the step is not saved, and the newest complete step remains. If there are several
            roles, the role that is saved least safely counts.
    """

    step: int
    reason: str
    saved: str | None


def for_all_roles(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Calls a function for each item, even after a call has failed, and returns the results.

    Raises the first CheckpointError or TimeoutError after all calls. Further errors are logged.
    """
    results: list[Result] = []
    errors: list[CheckpointError | TimeoutError] = []
    for item in items:
        try:
            results.append(call(item))
        except (CheckpointError, TimeoutError) as error:
            errors.append(error)
    for further in errors[1:]:
        logger.error("%s", further)
    if errors:
        raise errors[0]
    return results


def time_for_waits(left_s: float) -> float:
    """Returns for how many seconds this rank may wait if its machine goes in `left_s` seconds."""
    return max(0.0, left_s - min(_MOST_TO_END_S, left_s * _SHARE_TO_END))


class LastSave:
    """The last save of one manager, or of several managers with different roles.

    Args:
        controls: control the managers' saves.
        save: saves a step, and returns one handle, or a list or tuple of the handles of all its saves. If the function
            returns anything else, or one handle for several managers, each manager must have begun a save of the step.
        given_s: see `Times.given_s`.
    """

    def __init__(self, controls: Sequence[SaveControl], save: Callable[[int], object], given_s: float | None) -> None:
        self._controls, self._save, self._given_s = controls, save, given_s
        self._agreement = controls[0].agreement
        # The guard has checked that these two values are the same for all managers.
        self._has_nodes, self._has_root = controls[0].destination.has_nodes, controls[0].destination.has_root
        self._ends_at = math.inf

    @property
    def times(self) -> Times:
        """How long saves of all managers take, one after the other, as far as this rank knows."""
        commits = [each.background.longest_s for each in self._controls]
        drains = [each.destination.drain_s for each in self._controls] if self._has_root else [0.0]
        return Times(_sum(commits), _sum(drains), self._given_s)

    def make(self, step: int, reason: str, left_s: float | None) -> Stopped:
        """Saves a step, if there is time. Every rank calls this method.

        A CheckpointError or TimeoutError is logged. Other errors are raised.

        Args:
            step: the last step that was trained.
            reason: what has asked for the stop.
            left_s: in how many seconds the machine goes; None if that is unknown.
        """
        self._limit(left_s)
        saved: str | None = None
        try:
            self._end_saves_under_way()
            if left_s is not None and left_s <= 0:  # true on all ranks, and a wait for ranks would end at once
                choice = Choice(self._saved_already(step), False, "no time is left")
            else:
                choice = self._choose_together(step)
            if choice.is_new:
                handles = self._begin(step, durable=choice.how == DURABLE)
            else:
                handles = self._saves_of(step) if choice.how is not None else []
            saved = self._await_all(handles)
            self._tell(step, choice, saved, handles)
        except (CheckpointError, TimeoutError) as error:
            logger.error("step %d could not be saved before the machine goes: %s", step, error)
        return Stopped(step, reason, saved)

    def _limit(self, left_s: float | None) -> None:
        if left_s is None:
            return
        seconds = time_for_waits(left_s)
        self._ends_at = time.monotonic() + seconds
        for control in self._controls:
            control.limit_waits(seconds)

    @property
    def _left_s(self) -> float:
        return self._ends_at - time.monotonic()

    @property
    def _patience_s(self) -> float | None:
        return seconds_until(self._ends_at)

    def _end_saves_under_way(self) -> None:
        for background in (control.background for control in self._controls):
            background.wait_at_most(self._patience_s)
            if background.failure() is not None:
                # This failure is logged already, and must not keep the last save from beginning.
                background.mark_failure_seen()

    def _last_moment_before(self, takes_s: float | None, is_known: bool) -> float:
        """Returns until when to wait (`time.monotonic()`) if a save is to follow (`patience_before`)."""
        return time.monotonic() + patience_before(self._left_s, takes_s, is_known)

    def _choose_together(self, step: int) -> Choice:
        """Chooses with all ranks what to save. Raises AgreementError if a rank is missing."""
        places = [control.destination for control in self._controls]
        times = self.times
        durable = times.durable_s, times.is_known
        until = self._last_moment_before(*durable)
        is_drained = all(each.await_drain(seconds_until(until)) for each in places)
        on_nodes = times.commit_s, times.commit_s is not None
        until = self._last_moment_before(*(on_nodes if self._saved_already(step) is None else durable))
        is_copied = all(each.await_copies_of(step, seconds_until(until)) for each in places)

        def work() -> Record:
            return {
                "busy": any(control.background.busy for control in self._controls),
                "drained": is_drained,
                "copied": is_copied,
                "saved": self._saved_already(step),
                "left": None if self._ends_at == math.inf else self._agreement.shortened(self._left_s),
            }

        def combine(records: Sequence[Record]) -> Record:
            busy = [rank for rank, record in enumerate(records) if record["busy"]]
            if busy:
                return vars(Choice(None, False, f"an earlier save is still under way on rank {busy[0]}"))
            all_saved = [record["saved"] for record in records]
            saved = all_saved[0] if len(set(all_saved)) == 1 else None
            left_s = min((record["left"] for record in records if record["left"] is not None), default=math.inf)
            done = [all(record[what] for record in records) for what in ("drained", "copied")]
            return vars(choose(left_s, self.times, saved, self._has_nodes, self._has_root, *done))

        return Choice(**decide(self._agreement, f"choosing how to save step {step}", work, combine))

    def _saves_of(self, step: int) -> list[SaveHandle]:
        """Returns the newest save of each manager, without saves of other steps."""
        newest = [control.background.newest_of_step for control in self._controls]
        return [each for each in newest if each is not None and each.step == step]

    def _saved_already(self, step: int) -> str | None:
        found = self._saves_of(step)
        if len(found) < len(self._controls):
            return None
        return least_safe(_how_saved(each, self._has_nodes) for each in found)

    def _begin(self, step: int, durable: bool) -> list[SaveHandle]:
        """Saves a step, and returns the handles to wait for.

        Raises InvalidStateError if the managers have not begun to save the step.
        """
        for control in self._controls:
            control.destination.choose_next(durable)
            # Copies to the root are waited for after all roles are on the nodes. Otherwise the first role's copy could
            # take all the time.
            control.background.awaits_drains = False
        try:
            returned = self._save(step)
        except (CheckpointError, TimeoutError) as error:
            if self._has_saved_anyway(step):
                logger.error("saving step %d has raised an error, but the step is saved: %s", step, error)
                return self._saves_of(step)
            raise
        finally:
            for control in self._controls:
                control.background.awaits_drains = True
        listed = returned if isinstance(returned, (list, tuple)) else [returned]
        given = [each for each in listed if isinstance(each, SaveHandle)]
        if len(given) > len(self._controls):
            logger.warning(
                "the function `save` of the PreemptionGuard has saved with %d managers, but the guard has %d: give the "
                "guard all of them, because it limits the waits of no other",
                *(len(given), len(self._controls)),
            )
        if given and len(self._controls) == 1:
            return given
        return self._with_all_roles(step, given, must_have_all=not given or listed is not returned)

    def _has_saved_anyway(self, step: int) -> bool:
        """Waits for all saves of the step that have begun. Returns True if all roles have saved the step.

        `save` may have raised its error after all roles had begun to save.
        """
        with suppress(CheckpointError, TimeoutError):
            return self._await_all(self._saves_of(step)) is not None and self._saved_already(step) is not None
        return False

    def _with_all_roles(self, step: int, given: Sequence[SaveHandle], must_have_all: bool) -> list[SaveHandle]:
        """Returns the given handles, and the handles of the managers' own saves of the step.

        If `must_have_all`, raises InvalidStateError if a manager has no save of the step.
        """
        own = self._saves_of(step)
        found = list(dict.fromkeys([*given, *own]))
        missing = [each.role for each in self._controls if each.background.newest_of_step not in own]
        if not missing or not must_have_all:
            return found
        self._await_all(found)
        raise InvalidStateError(
            f"the function `save` of the PreemptionGuard has not saved with the manager of {' and '.join(missing)}: "
            "let it save with each manager, or return a list with the handles of all its saves"
        )

    def _await_all(self, handles: Sequence[SaveHandle]) -> str | None:
        """Waits for all saves, as long as there is time. Returns how the step is saved.

        After the last wait, raises CheckpointError if a save has failed, or TimeoutError if a save is still under way.
        """
        return least_safe(for_all_roles(self._await, handles))

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
        return _how_saved(handle, self._has_nodes, only_ended=True)

    def _tell(self, step: int, choice: Choice, saved: str | None, handles: Sequence[SaveHandle]) -> None:
        if self._agreement.rank != 0:
            return
        if saved == DURABLE:
            logger.warning("step %d is saved, and durable", step)
        elif saved is not None:
            reason = choice.reason or _why_not_durable(handles)
            logger.warning("step %d is saved on the nodes, but not in the root: %s", step, reason)
        else:
            reason = choice.reason or "the last save was skipped"
            logger.warning("step %d is not saved, so the newest complete step remains: %s", step, reason)


def _sum(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    known = [each for each in listed if each is not None]
    return sum(known) if len(known) == len(listed) else None


def _why_not_durable(handles: Iterable[SaveHandle]) -> str:
    """Says why a step that was to become durable is only on the nodes."""
    late = [handle.drain for handle in handles if handle.drain is None or not handle.drain.committed]
    if not late:
        return "the copy to the root was not over in time, but is now"
    drain = late[0]
    if drain is None:
        return "the step was not to be copied to the root"
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
