"""Listens for requests to stop a training: signals, and a file that any process may make.

A signal handler notes the signal and limits waits. The handler logs nothing and takes no lock, because it may interrupt
a save, a log record or a lock's owner.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mcore_ckpt.errors import InvalidStateError
from mcore_ckpt.processes import Home

logger = logging.getLogger(__name__)

# The pause between two looks for the file, in seconds. One stat a second is no load for a file system.
LOOK_S = 1.0
# The signals by which a parent or a terminal ends a forked child. Any other signal of the guard is for the training.
# Such a signal reaches a child only because the scheduler, such as Slurm, signals all processes of the job step.
_ENDS_CHILDREN = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class StopRequest:
    """A request to stop the training.

    Attributes:
        reason: what has asked, such as "SIGTERM".
        at: when the request came (`time.monotonic()`).
    """

    reason: str
    at: float


class Signals:
    """Notes signals between `install` and `remove`. Earlier handlers of these signals are called, too.

    Args:
        numbers: the signals.
        heard: a function that the signal handler calls with the first request, so the function must take no lock.

    Attributes:
        first: the first signal that has come; None before.
    """

    def __init__(self, numbers: Sequence[int], heard: Callable[[StopRequest], object] = bool) -> None:
        self._numbers, self._heard = tuple(numbers), heard
        self._before: dict[int, Any] = {}
        self._home, self._is_active = Home(), False
        self._complained: set[int] = set()
        self.first: StopRequest | None = None

    @property
    def has_any(self) -> bool:
        """True if there are signals to note."""
        return bool(self._numbers)

    def install(self, can_do_without: bool) -> None:
        """Begins to note the signals.

        Args:
            can_do_without: whether something else can ask for a stop. If so, a thread that cannot handle signals only
                causes a warning.

        Raises InvalidStateError if this is not the main thread, which alone can handle signals, and nothing else can
        ask for a stop.
        """
        if not self._numbers:
            return
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            text = (
                f"the thread {thread.name!r} cannot handle {', '.join(map(_name, self._numbers))}, because Python "
                "handles signals only on the main thread"
            )
            if not can_do_without:
                raise InvalidStateError(f"{text}: enter the guard there, or use a trigger_file and signals=()")
            logger.warning("%s: only the trigger file and the end of the training's time can stop the training", text)
            return
        self._is_active = True
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Puts back the handlers that were there before.

        A handler that was set later stays, and may still call the handler of this object.
        """
        self._is_active = False
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                # None stands for a handler of another language. Python cannot put it back, so the signal gets its
                # default action.
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def warn_of_others(self) -> None:
        """Warns once of each signal that has another handler now, because the signal may not reach this object."""
        for number in self._before:
            if self._is_active and signal.getsignal(number) != self._note and number not in self._complained:
                self._complained.add(number)
                logger.warning(
                    "%s has got another handler since the PreemptionGuard was entered, so it may not stop the training "
                    "at a step boundary: enter the guard after that handler is set",
                    _name(number),
                )

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if not self._home.is_here and number not in _ENDS_CHILDREN and not callable(before):
            # This is a forked child, such as a data loader's worker. If the signal ended the child, the training would
            # fail in the next batch, before the last save.
            return
        if not self._is_active or not self._home.is_here:
            # This is a forked child, or a later handler calls this handler after `remove`.
            _as_before(number, before, frame)
            return
        if self.first is None:
            self.first = StopRequest(_name(number), time.monotonic())
            self._heard(self.first)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _as_before(number: int, before: Any, frame: FrameType | None) -> None:
    """Does what the signal would do without the guard."""
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _name(number: int) -> str:
    return signal.Signals(number).name


class TriggerFile:
    """Looks for a file on another thread, so that a file system that hangs does not hold up the training.

    Args:
        path: the file.
        deadline_s: how long after a request the machine goes, in seconds; None if unknown. If the file is older than
            `deadline_s` when `start` is called, it was made before this start of the training, and does not count.
        heard: called with the request, on the thread that looks.

    Attributes:
        found: the request, once the file has been seen; None before.
    """

    def __init__(self, path: Path, deadline_s: float | None, heard: Callable[[StopRequest], object] = bool) -> None:
        self._path, self._deadline_s, self._heard = path, deadline_s, heard
        self._over = threading.Event()
        self._old: tuple[int, int] | None = None
        self.found: StopRequest | None = None

    def start(self) -> None:
        """Begins to look."""
        threading.Thread(target=self._run, name="mcore_ckpt trigger file", daemon=True).start()

    def end(self, acted: bool) -> None:
        """Stops looking.

        If the training has stopped (`acted`), removes the file, so that it does not stop the training again after the
        restart.
        """
        self._over.set()
        if acted and self.found is not None:
            with suppress(OSError):
                self._path.unlink()

    def _run(self) -> None:
        self._look(began=None)
        last = time.monotonic()
        while self.found is None and not self._over.wait(LOOK_S):
            now = time.monotonic()
            self._look(began=last)  # the file was made after the previous look
            last = now

    def _look(self, began: float | None) -> None:
        try:
            status = os.stat(self._path)
        except OSError:  # mostly the file is not there; a file system that fails now may answer at the next look
            return
        mark = (status.st_ino, status.st_mtime_ns)
        if began is None:
            age = max(0.0, time.time() - status.st_mtime)
            if self._deadline_s is not None and age > self._deadline_s:
                self._old = mark
                logger.warning(
                    "%s is %.0f s old, but the machine goes %g s after such a request, so it was made for an earlier "
                    "run and does not stop this one: remove it",
                    *(self._path, age, self._deadline_s),
                )
            began = time.monotonic() - age
        if mark != self._old:
            self.found = StopRequest(f"the file {self._path}", began)
            self._heard(self.found)
