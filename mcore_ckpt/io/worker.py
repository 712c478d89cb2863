"""Does work on a thread that exists only while there is work, and lets other threads wait for the end of the work."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, cast
from weakref import WeakSet

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.events import ErrorText
from mcore_ckpt.interrupts import is_interrupt
from mcore_ckpt.io.disk_watch import wait_for_thread
from mcore_ckpt.processes import OwnEvent, emptied_in_child

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """Work that is under way or has ended, for threads that wait for it.

    The message of a TimeoutError begins with `under_way`, which says that the work is under way, and ends with
    `advice`.
    """

    def __init__(self, under_way: str, advice: str = "") -> None:
        self._under_way, self._advice = under_way, advice
        self._ended = OwnEvent(f"this {type(self).__name__}")
        self._result: Result | None = None
        self._exception: CheckpointError | None = None

    @property
    def done(self) -> bool:
        """True if the work has ended, whether it succeeded or failed."""
        return self._ended.is_set()

    @property
    def exception(self) -> CheckpointError | None:
        """The error that made the work fail. None while the work is under way, and if it succeeded."""
        return self._exception

    def wait(self, timeout: float | None = None) -> Result:
        """Waits for the end. Returns the result or raises the error; raises TimeoutError after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self._under_way} after {timeout:g} s{self._advice}")
        if self._exception is not None:
            raise self._exception
        return cast(Result, self._result)

    def end(self, result: Result) -> None:
        """Ends the work. Only the thread that does the work calls this."""
        self._result = result
        self._ended.set()

    def fail(self, error: CheckpointError) -> None:
        """Ends work that has failed. Only the thread that does the work calls this."""
        self._exception = error
        self._ended.set()


class NoThreadError(Exception):
    """The system grants no more threads."""


class Worker:
    """Calls functions one after the other on a thread, which exists only while there are functions to call.

    An error of a function is logged, and the next function is called. `must_finish`: whether all functions must be
    called. With `must_finish`, an exiting interpreter waits for the functions (`all_workers`), and the thread that adds
    a function calls the function if the system grants no thread. Without `must_finish`, an exiting interpreter does not
    wait.
    """

    def __init__(self, name: str, must_finish: bool = True) -> None:
        self._name, self._must_finish = name, must_finish
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        if must_finish:
            _workers.add(self)

    def add(self, work: Callable[[], object], instead: bool = False) -> None:
        """Calls a function after the functions that were added before, or `instead` of them. Returns immediately.

        If the system grants no thread, a worker with `must_finish` calls the function on the calling thread, and any
        other worker raises NoThreadError. If a signal handler raises an exception meanwhile, the function is not
        called.
        """
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                self._queue(work, instead)
                return
            # The thread is a daemon, because an exiting interpreter would wait without limit for a non-daemon thread.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                self._queue(work, instead)
                self._thread = thread
                thread.start()
                return
            except BaseException as error:
                # The thread may have started and be waiting for the lock. Once the thread has the lock, it finds that
                # it is not the thread of this worker, and ends.
                self._thread = None
                refused = isinstance(error, RuntimeError) and not is_interrupt(error)
                if not (refused and self._must_finish):
                    with suppress(ValueError):
                        self._waiting.remove(work)
                    if refused:
                        raise NoThreadError(str(error)) from error
                    raise
        self._work()  # on this thread, which is slower but does not fail

    def _queue(self, work: Callable[[], object], instead: bool) -> None:
        if instead:
            self._waiting.clear()
        self._waiting.append(work)

    @property
    def is_at_work(self) -> bool:
        """True if functions are being called."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Waits until no function is left.

        Raises HungDiskError if a function is in one call to a file system for `timeout_s` seconds.
        """
        with self._lock:
            thread = self._thread
        if thread is not None:
            wait_for_thread(thread, timeout_s)

    def wait_at_most(self, seconds: float) -> bool:
        """Waits until no function is left to call, for at most `seconds` seconds. Returns True if none is left."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return
        self._work()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception as error:
                trace = ErrorText.of(error).stacktrace
                logger.error("the thread %r continues after an unexpected error\n%s", self._name, trace)


# Weak references are enough, because a running thread keeps its worker alive.
_workers: WeakSet[Worker] = emptied_in_child(WeakSet())


def all_workers() -> list[Worker]:
    """Returns the workers of this process whose work must be finished."""
    return list(_workers)
