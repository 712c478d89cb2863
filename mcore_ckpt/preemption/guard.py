"""Defines the PreemptionGuard, which stops a training at a step boundary and saves before its machine goes."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mcore_ckpt.errors import InvalidArgumentError, InvalidStateError, InvalidTypeError
from mcore_ckpt.field_checks import check_value
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.preemption.end_times import EndTime, find_end, is_named
from mcore_ckpt.preemption.last_save import LastSave, Stopped, for_all_roles, time_for_waits
from mcore_ckpt.preemption.pace import Pace
from mcore_ckpt.preemption.requests import Signals, StopRequest, TriggerFile
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.save.background import SaveHandle
from mcore_ckpt.save.save_control import SaveControl
from mcore_ckpt.urls import local_path

logger = logging.getLogger(__name__)

# How long a process takes to end, in seconds.
_TO_END_S = 5.0


class PreemptionGuard:
    """Stops a training at a step boundary, and saves there, before its machine goes.

    Every rank makes a guard, enters the guard around its loop on the main thread, and asks `should_stop` after each
    step. A request that one rank has heard stops all ranks at the same step. Signals are only noted: they interrupt no
    step and no save, however many come. Only SIGKILL ends the last save.

    Args:
        manager: the manager that saves, or a list of managers, one for each role. All of them make the same kind of
            save. If one manager fails, the step counts as not saved.
        signals: the signals that ask for a stop, on any rank. Existing handlers of these signals are called, too, and
            are put back at the end.
        trigger_file: a file that asks for a stop as soon as it exists. Rank 0 looks for it once a second, and removes
            it when the training stops. None: no file. If the file is older than `deadline_s` when the guard is entered,
            it was made before this start of the training, so it is ignored.
        deadline_s: the time from a request until the machine goes, in seconds. A save that would end later is not
            begun. None: unknown, so the last save may take any time.
        training_ends_in_s: in how many seconds the machine will be taken away even if no request comes. The training
            stops early enough to save. None: the time that SLURM_JOB_END_TIME or `scontrol` gives, or the end of a
            reservation at SageMaker or Volcengine; `math.inf`: never.
        save_takes_s: how many seconds a durable save of all roles takes. `mcore-ckpt bench` predicts this time, but
            without parts and `hf_model`. `save_takes_s` counts until this process has made a durable save with each
            manager. None: unknown, so a save is tried.
        extra_state: the trainer's own state for the last save, or a function that returns this state. If there are
            several managers, the first manager saves the state.
        save: a function that saves a step. None: the guard calls `manager.save(step, extra_state)`, for each manager in
            turn. The function returns the handles of all its saves: one handle or a list. If the function returns
            something else, such as None, or one handle for several managers, then each manager must have begun a save
            of the step. Otherwise the step counts as not saved.
        exit_status: the value of the property `exit_status` if the training was stopped.

    Raises:
        InvalidArgumentError, InvalidTypeError: an argument has a value or a type that is not allowed.

    Example:
        >>> with PreemptionGuard(manager, deadline_s=120) as guard:  # doctest: +SKIP
        ...     for step in range(first, last + 1):
        ...         train_step()
        ...         if guard.should_stop(step):
        ...             break
        >>> sys.exit(guard.exit_status)  # doctest: +SKIP
    """

    def __init__(
        self,
        manager: CheckpointManager | Sequence[CheckpointManager],
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        trigger_file: str | Path | None = None,
        deadline_s: float | None = None,
        training_ends_in_s: float | None = None,
        save_takes_s: float | None = None,
        extra_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        save: Callable[[int], SaveHandle | Sequence[SaveHandle] | None] | None = None,
        exit_status: int = 0,
    ) -> None:
        managers = _checked_managers(manager)
        if save is not None and extra_state is not None:
            raise InvalidArgumentError("save and extra_state are both given: let save pass the extra state itself")
        check_value("deadline_s", deadline_s, float | None, {"above": 0, "of": "seconds"})
        check_value("save_takes_s", save_takes_s, float | None, {"above": 0, "of": "seconds"})
        if training_ends_in_s != math.inf:
            check_value("training_ends_in_s", training_ends_in_s, float | None, {"above": 0, "of": "seconds"})
        check_value("exit_status", exit_status, int, {"least": 0})
        self._controls = [each.save_control() for each in managers]
        _check_same_places(self._controls)
        self._rank_0 = self._controls[0].agreement.is_coordinator
        # This agreement has its own client of the key-value store, and does not watch disks. So training goes on if a
        # disk hangs.
        self._open = self._controls[0].open_own
        self._agreement: Agreement | None = None
        self._deadline_s, self._training_ends_in_s = deadline_s, training_ends_in_s
        self._exit_status = exit_status
        self._signals = Signals(_checked_signals(signals), self._limit_waits)
        self._file = None
        if trigger_file is not None and self._rank_0:
            path = local_path(trigger_file, "trigger_file").absolute()
            self._file = TriggerFile(path, deadline_s, self._limit_waits)
        self._has_file, self._has_been_entered = trigger_file is not None, False
        self._end: EndTime | None = None
        self._last_save = LastSave(self._controls, save or partial(_save_all, managers, extra_state), save_takes_s)
        self._pace = Pace(deadline_s)
        self._stopped: Stopped | None = None

    def __enter__(self) -> PreemptionGuard:
        """Begins to note signals, and to look for the file. Every rank enters the guard, and waits for the other ranks.

        Raises:
            InvalidStateError: this guard has been entered before; or, without a trigger file, a rank is not on its main
                thread, which alone can handle signals. In the second case all ranks raise this error.
            InvalidArgumentError: nothing can ever ask for a stop: no rank notes signals, there is no trigger file, and
                the training's time has no known end. All ranks raise this error.
            AgreementError: a rank is missing.
        """
        if self._has_been_entered:
            raise InvalidStateError("this PreemptionGuard has been entered before: make a new one")
        self._has_been_entered = True
        agreement = self._agreement = self._open()

        def work() -> Record:
            if self._rank_0:
                self._end = find_end(self._training_ends_in_s, os.environ)
            self._signals.install(can_do_without=self._has_file)
            return {"signals": self._signals.has_any, "file": self._file is not None}

        def combine(records: Sequence[Record]) -> Record:
            if not any(record["signals"] or record["file"] for record in records) and self._end is None:
                self._complain_of_no_source()
            return {}

        try:
            decide(agreement, "entering a PreemptionGuard", work, combine)
            if self._file is not None:
                self._file.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Puts back the handlers that were there before, and stops looking for the file."""
        self._signals.remove()
        if self._file is not None:
            self._file.end(acted=self._stopped is not None)
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.close()

    @property
    def is_requested(self) -> bool:
        """True if this rank has heard of a request to stop. The property asks no other rank and costs nothing.

        A long rollout can check this property to end early. But only `should_stop` gives the same answer on all ranks.
        """
        return self._request() is not None

    @property
    def stopped(self) -> Stopped | None:
        """How the training was stopped. None if it was not stopped."""
        return self._stopped

    @property
    def exit_status(self) -> int:
        """The status to exit with: the argument `exit_status` if the training was stopped, else 0."""
        return 0 if self._stopped is None else self._exit_status

    def should_stop(self, step: int) -> bool:
        """Returns True, on all ranks alike, if the training must stop now.

        In that case, the last save has been made already.

        All ranks call `should_stop` equally often: after each step and, if the trainer wants, between steps. At each
        call, the training state must still be the state after step `step`. If calls follow each other quickly, some
        calls return False without asking the other ranks. Which calls do this depends on `step`, so all ranks must give
        the same steps.

        If step `step` is saved already, or its save is under way, that save counts as the last save. If the last save
        does not fit into the time that is left, or fails, the newest complete step remains, the log says so, and the
        result is True. End the training when the result is True: with `deadline_s`, the manager then waits for other
        ranks only until the machine goes.

        Args:
            step: the last step that was trained.

        Raises:
            AgreementError: a rank is missing, or the ranks are not at the same step.
            InvalidStateError: the guard is not entered, a manager is closed, or this is a forked child.
        """
        if self._stopped is not None:
            return True
        agreement = self._agreement
        if agreement is None:
            raise InvalidStateError("this PreemptionGuard is not entered: use it in a with statement")
        check_value("step", step, int, {"least": 0})
        self._signals.warn_of_others()
        if not self._pace.asks_now(step):
            return False
        began = time.monotonic()
        outcome = self._ask(agreement, step)
        self._pace.asked(began, outcome["passes"])
        if outcome["reason"] is None:
            return False
        if self._rank_0:
            logger.warning("the training stops at step %d, because of %s", step, outcome["reason"])
        self._stopped = Stopped(step, outcome["reason"], None)
        self._stopped = self._last_save.make(step, outcome["reason"], outcome["left"])
        return True

    def exit(self) -> NoReturn:
        """Ends this process with `exit_status`, without waiting for threads or process groups.

        So the process ends in time even if a save is still under way, or a collective waits for a dead rank.
        """
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_status)

    def _limit_waits(self, request: StopRequest) -> None:
        """Ends this rank's waits for other ranks before its machine goes. The other ranks then give up, too.

        A signal handler, or the thread of the trigger file, calls this method as soon as there is a request, because
        this rank may already be waiting for a dead rank: in the training's own save, or in `should_stop`. Waits that
        begin after the limit has passed are not limited: if the machine is still there then, `deadline_s` was too
        short.
        """
        if self._deadline_s is None:
            return
        seconds = time_for_waits(request.at + self._deadline_s - time.monotonic())
        for control in self._controls:
            control.limit_waits(seconds, even_later=False)
        agreement = self._agreement
        if agreement is not None:
            agreement.limit_waits(seconds, even_later=False)

    def _ask(self, agreement: Agreement, step: int) -> Record:
        """Asks all ranks. Returns the reason to stop or None, the seconds left, and how many calls to pass over."""

        def work() -> Record:
            self._check_open()
            request = self._request()
            if request is None:
                return {"step": step, "reason": None, "left": None}
            left = None if self._deadline_s is None else request.at + self._deadline_s - time.monotonic()
            return {"step": step, "reason": request.reason, "left": left}

        def combine(records: Sequence[Record]) -> Record:
            same_everywhere([{"step": record["step"]} for record in records], "the step of should_stop")
            found = [(rank, record) for rank, record in enumerate(records) if record["reason"] is not None]
            reason, left = self._end_is_near(), [record["left"] for _, record in found if record["left"] is not None]
            if self._end is not None and (found or reason is not None):
                left.append(self._end.at - time.monotonic())
            if found:
                reason = f"{found[0][1]['reason']} on rank {found[0][0]}"
            return {"reason": reason, "left": min(left, default=None), "passes": self._pace.passes()}

        return decide(agreement, f"whether to stop at step {step}", work, combine)

    def _check_open(self) -> None:
        """Raises InvalidStateError if a manager is closed. Otherwise only the last save would find out."""
        closed = [control.role for control in self._controls if control.is_closed]
        if closed:
            raise InvalidStateError(
                f"the manager of {' and '.join(closed)} is closed, so this PreemptionGuard cannot save with it: close "
                "managers after the guard's block, or make a new guard with the managers that are open"
            )

    def _complain_of_no_source(self) -> None:
        """Raises InvalidArgumentError, or only warns, because nothing can ask for a stop. Called only on rank 0."""
        text = "nothing can stop this training: signals is empty, and trigger_file is not given"
        if self._training_ends_in_s is None and is_named(os.environ):
            # The user may rely on the time limit alone. If the scheduler does not tell the limit, training goes on.
            logger.warning("%s, and the end of this job is not known: give training_ends_in_s or trigger_file", text)
            return
        raise InvalidArgumentError(
            f"{text}, and there is no end of the training's time: give signals, trigger_file or training_ends_in_s, or "
            "train without a PreemptionGuard"
        )

    def _request(self) -> StopRequest | None:
        found = None if self._file is None else self._file.found
        return self._signals.first or found

    def _end_is_near(self) -> str | None:
        """Returns, on rank 0, the reason to stop if the machine goes before the next step could be saved; else None."""
        if self._end is None:
            return None
        needed_s = self._last_save.times.reserve_s + self._pace.longest_gap_s + _TO_END_S
        left_s = self._end.at - time.monotonic()
        if left_s > needed_s:
            return None
        return f"the end of the training's time in {max(0.0, left_s):.0f} s ({self._end.source})"


def _checked_managers(given: Any) -> list[CheckpointManager]:
    managers = list(given) if isinstance(given, (list, tuple)) else [given]
    for manager in managers:
        if not isinstance(manager, CheckpointManager):
            raise InvalidTypeError(
                f"manager is or has a {type(manager).__name__}: use a CheckpointManager or a list of them"
            )
    if not managers or len({(manager.root, manager.role) for manager in managers}) < len(managers):
        raise InvalidArgumentError(
            f"the managers have the roles {[manager.role for manager in managers]}: pass at least one manager, and "
            "only one for each role"
        )
    return managers


def _save_all(managers: Sequence[CheckpointManager], extra_state: Any, step: int) -> list[SaveHandle]:
    """Saves with each manager, even after another manager has failed. Raises the first error at the end."""

    def save(manager: CheckpointManager) -> SaveHandle:
        return manager.save(step, extra_state if manager is managers[0] else None)

    return for_all_roles(save, managers)


def _check_same_places(controls: Sequence[SaveControl]) -> None:
    """Raises InvalidArgumentError if the managers cannot all make the same kind of save."""
    places = {(each.destination.has_nodes, each.destination.has_root) for each in controls}
    if len(places) > 1:
        raise InvalidArgumentError(
            "the managers save to different places, so that no kind of last save fits all of them: give all of them "
            "a FastTier or none, and all of them a `durable_every` or none: "
            + ", ".join(f"{each.role} saves {_places(each)}" for each in controls)
        )


def _places(control: SaveControl) -> str:
    if not control.destination.has_nodes:
        return "to the root"
    return "to the nodes and the root" if control.destination.has_root else "to the nodes only"


def _checked_signals(numbers: object) -> list[int]:
    if not isinstance(numbers, Iterable) or isinstance(numbers, str):
        raise InvalidTypeError(f"signals is {numbers!r}: use a list of signals, such as [signal.SIGTERM]")
    return [_checked_signal(number) for number in dict.fromkeys(numbers)]


def _checked_signal(number: Any) -> int:
    try:
        found = signal.Signals(number)
    except ValueError:
        raise InvalidArgumentError(f"signals has {number!r}: use signals of the module signal") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise InvalidArgumentError(f"signals has {found.name}, which no process can handle: use another signal")
    return found
