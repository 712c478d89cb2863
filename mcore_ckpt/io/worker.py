"""Does work on a thread that exists only while there is some."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from weakref import WeakSet

from mcore_ckpt.events import ErrorText
from mcore_ckpt.io.disk_watch import wait_for_thread
from mcore_ckpt.processes import emptied_in_child

logger = logging.getLogger(__name__)


class Worker:
    """Calls functions one after the other on a thread, which exists only while there are functions to call.

    An error of a function is logged, and the next function is called. An exiting interpreter does not wait for the
    functions, unless an exit handler does (`all_workers`).

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        _workers.add(self)

    def add(self, work: Callable[[], None]) -> None:
        """Calls a function after those that were added before; on this thread, if the system grants no other one."""
        with self._lock:
            self._waiting.append(work)
            if self._thread is not None and self._thread.is_alive():
                return
            # A daemon, because at exit the interpreter would wait without limit for a non-daemon thread.
            # Noted first: an exception of a signal handler may end `start` when the thread has begun.
            self._thread = thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
                return
            except RuntimeError:  # the system grants no thread: do the work here, which is slower but does not fail
                self._thread = None
        self._run()

    @property
    def is_at_work(self) -> bool:
        """True if functions are being called."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Waits until no function is left to call.

        Raises HungDiskError if one has been in a call to a file system for `timeout_s` seconds.
        """
        with self._lock:
            thread = self._thread
        if thread is not None:
            wait_for_thread(thread, timeout_s)

    def _run(self) -> None:
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


# Weak references are enough, because a running thread keeps its worker alive even if its owner has been dropped.
_workers: WeakSet[Worker] = emptied_in_child(WeakSet())


def all_workers() -> list[Worker]:
    """Returns the workers of this process."""
    return list(_workers)
