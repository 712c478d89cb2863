"""Delivers events to listeners on its own thread, so that no listener can hold up or fail a save.

`Delivery.post` only puts an event into a queue. These failures are handled:

- A listener raises: the error is logged once for each listener and kind of event. The other listeners are called.
- A listener is slow: events wait. If too many events wait, new events are dropped, and a warning says how many.
- A listener never returns: `drain` gives up after `DRAIN_WAIT_S`, and from then on does not wait for that call again.
  The thread is a daemon, so an exiting interpreter does not wait for it.
- The system grants no thread: events wait until a later call gets a thread.
- The process forks: the child begins with an empty queue and no thread, because the parent delivers the events that
  wait.

Events contain only sums that a report has anyway, so events cost no computation. Each manager has its own thread, so a
listener that hangs stops only that manager's events. Nothing is sent between ranks, because a listener on each rank
costs nothing, but a message of each rank to rank 0 would cost time.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakSet

from mcore_ckpt.events import ErrorText, Event, Listener
from mcore_ckpt.processes import Home

logger = logging.getLogger(__name__)

# How many events may wait. A save posts four events on each rank.
QUEUE_EVENTS = 1000
# How long `CheckpointManager.wait`, `close` and an exiting interpreter wait for listeners, in seconds.
DRAIN_WAIT_S = 10.0
# How long `post` waits for the lock, in seconds. A thread usually holds the lock only for a moment. But if a signal
# handler interrupts that thread and saves, the save waits for another thread that posts. Without a limit, both threads
# would wait for ever.
POST_WAIT_S = 1.0
# If a manager was never closed, its thread ends after this time without events, in seconds. Most saves take less time,
# so the thread still exists while an exiting interpreter waits for a save. The thread must still exist then, because
# from Python 3.12 on, an exiting interpreter starts no new threads.
IDLE_S = 3600.0


class Delivery:
    """Calls listeners with events, one event after the other, in the order in which they were posted.

    This class does not use `io.worker.Worker`, because a signal handler may post while it interrupts `post`, and
    because a listener may fork, or end the thread.

    Args:
        listeners: what to call. If several managers of a process share a listener, each manager calls the listener on
            its own thread.
        capacity: how many events may wait.
    """

    def __init__(self, listeners: Sequence[Listener] = (), capacity: int = QUEUE_EVENTS) -> None:
        self._listeners = tuple(listeners)
        self._capacity = capacity
        self._idle_s = IDLE_S
        self._logged: set[tuple[int, type[Event]]] = set()
        self.start_anew()
        if self._listeners:
            _all.add(self)

    def start_anew(self) -> None:
        """Forgets all events and the thread. A forked child calls this, because the child does not have the thread."""
        # A condition has an RLock, so a signal handler that interrupts `post` and saves can post, too.
        self._changed = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._thread: threading.Thread | None = None
        self._called: tuple[Listener, Event] | None = None
        self._given_up_on: tuple[Listener, Event] | None = None
        self._is_late = False
        self._dropped = 0

    def post(self, event: Event) -> None:
        """Queues an event. Returns immediately and raises nothing."""
        if not self._listeners:
            return
        if not self._changed.acquire(timeout=POST_WAIT_S):
            self._dropped += 1
            return
        try:
            if len(self._waiting) >= self._capacity:
                self._dropped += 1
            else:
                self._waiting.append(event)
            self._ensure_thread()
            self._changed.notify_all()
        finally:
            self._changed.release()

    @property
    def has_listeners(self) -> bool:
        """True if there are listeners."""
        return bool(self._listeners)

    def drain(self, seconds: float | None = None, is_last: bool = True) -> bool:
        """Waits until all events are delivered, at most `seconds` (None: DRAIN_WAIT_S).

        Returns True if all events are delivered.

        `drain` does not wait again for a listener's call that an earlier `drain` has given up on. Without `is_last`,
        `drain` does not wait again at all until the listeners have caught up, because a slow listener must not hold up
        each `wait` of a training.
        """
        limit_s = DRAIN_WAIT_S if seconds is None else seconds
        with self._changed:
            if self._waiting and not self._ensure_thread():
                logger.warning("%d events are not delivered yet: the system grants no thread", len(self._waiting))
                return False
            if self._thread is threading.current_thread():
                return False  # a listener calls `drain`, and would wait for itself
            if self._called is not None and self._called is self._given_up_on:
                return False
            if self._is_late and not is_last and not self._is_idle():
                return False
            self._is_late = not self._changed.wait_for(self._is_idle, limit_s)
            if not self._is_late:
                return True
            self._given_up_on, waiting, dropped = self._called, len(self._waiting), self._dropped
        busy = "" if self._given_up_on is None else f" in {_told(*self._given_up_on)}"
        logger.warning(
            "listeners are still busy after %g s%s; %d more events wait and %d were dropped. Saves are not affected",
            limit_s,
            busy,
            waiting,
            dropped,
        )
        return False

    def close(self) -> None:
        """Drains, and lets the thread end. Later events, such as events of a continuing upload, are still delivered."""
        if self._listeners:
            self.drain()
            with self._changed:
                self._idle_s = 0.0
                self._changed.notify_all()

    def _is_idle(self) -> bool:
        return not self._waiting and self._called is None

    def _ensure_thread(self) -> bool:
        """Starts the thread if there is none. Returns False if the system grants none. The lock must be held."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="mcore_ckpt listeners", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        home = Home()
        while (event := self._next()) is not None:
            for listener in self._listeners:
                self._called = (listener, event)
                self._call(listener, event, home)
            with self._changed:
                self._called = None
                self._changed.notify_all()

    def _next(self) -> Event | None:
        """Waits for an event and takes it out of the queue. Returns None if no event comes, which ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._idle_s, self._idle_s)
            if not self._waiting:
                self._thread = None
                return None
            event = self._waiting.popleft()
            self._called = (self._listeners[0], event)
            dropped, self._dropped = self._dropped, 0
        if dropped:
            logger.warning(
                "%d events were dropped, because listeners are slower than events come (%d may wait). Saves are not "
                "affected",
                dropped,
                self._capacity,
            )
        return event

    def _call(self, listener: Listener, event: Event, home: Home) -> None:
        status: object = 0
        try:
            listener(event)
        except SystemExit as error:
            status = error.code or 0
            if home.is_here:
                self._log_failure(listener, event, error)  # otherwise the thread would end without a message
        except BaseException as error:
            status = 1
            self._log_failure(listener, event, error)
        if not home.is_here:
            # The listener has forked, and this is the child. The child has only this thread, which would wait for
            # events for ever. The child cannot end in the usual way, because the usual way needs the main thread, which
            # a child does not have.
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status if isinstance(status, int) else 1)

    def _log_failure(self, listener: Listener, event: Event, error: BaseException) -> None:
        """Logs an exception the first time for each listener and kind of event."""
        if (id(listener), type(event)) not in self._logged:
            self._logged.add((id(listener), type(event)))
            logger.warning(
                "%s has failed. Saves are not affected. Its further failures with this kind of event are not "
                "logged\n%s",
                _told(listener, event),
                ErrorText.of(error).stacktrace,
            )


def _told(listener: Listener, event: Event) -> str:
    name = getattr(listener, "__qualname__", type(listener).__qualname__)
    return f"the listener {name} called with {type(event).__name__} of step {event.step}"


_all: WeakSet[Delivery] = WeakSet()


# Runs after the exit handlers that finish saves and uploads, because these handlers still post events. Exit handlers
# run in reverse order of their registration, and the modules of saves and uploads are imported after this module.
@atexit.register
def _drain_all() -> None:
    until = time.monotonic() + DRAIN_WAIT_S
    for delivery in list(_all):
        delivery.drain(max(0.0, until - time.monotonic()))


def _forget_in_child() -> None:
    for delivery in list(_all):
        delivery.start_anew()


os.register_at_fork(after_in_child=_forget_in_child)
