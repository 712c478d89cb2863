"""Reports the progress of a tool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""A function that tools call with the number of bytes done, and with the number of all bytes."""


def no_progress(done: int, total: int) -> None:
    """Ignores the progress of a tool."""


def summed(progress: Progress, total: int) -> Callable[[int], None]:
    """Returns a function that adds up the bytes of finished parts of the work, and passes the sum to `progress`.

    Several threads may call the returned function. `total` may be a lower bound of the work; the sum never exceeds it.

    Example:
        >>> add = summed(lambda done, total: print(done, total), 5)
        >>> add(3), add(3)
        3 5
        5 5
        (None, None)
    """
    done, lock = 0, threading.Lock()

    def add(nbytes: int) -> None:
        nonlocal done
        with lock:
            done = min(total, done + nbytes)
            progress(done, total)

    return add
