"""Waits for what another thread does."""

import threading
import time
from collections.abc import Callable

LONG_S = 30.0


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds. Fails if it still does not after LONG_S seconds."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def join_threads(name: str) -> None:
    """Returns when no thread of this name runs any more. Fails if one still does after LONG_S seconds."""
    for thread in threading.enumerate():
        if thread.name == name:
            # enumerate() also returns a thread that another one is just about to start, and join() refuses it.
            assert thread._started.wait(LONG_S)  # type: ignore[attr-defined]
            thread.join(LONG_S)
            assert not thread.is_alive()
