"""Waits for what another thread does."""

import faulthandler
import threading
import time
from collections.abc import Callable

import pytest

from mcore_ckpt import CheckpointManager

# Of this length only because eight processes on two slow cores have taken more than 30 s to start.
LONG_S = 120.0


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds. Fails, and shows where all threads are, if it does not after LONG_S seconds."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        if time.monotonic() > deadline:
            faulthandler.dump_traceback()
            pytest.fail(f"not so after {LONG_S:.0f} s")
        time.sleep(0.001)


def wait_for_hung_calls(manager: CheckpointManager) -> None:
    """Returns when all calls that the manager has given up have returned."""
    wait_for(lambda: all(work.ended for work in manager._disk._left))


def join_threads(name: str) -> None:
    """Returns when no thread of this name runs any more. Fails if one still does after LONG_S seconds."""
    for thread in threading.enumerate():
        if thread.name == name:
            # enumerate() also returns a thread that another one is just about to start, and join() refuses it.
            assert thread._started.wait(LONG_S)  # type: ignore[attr-defined]
            thread.join(LONG_S)
            assert not thread.is_alive()
