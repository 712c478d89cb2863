"""Waits for what another thread does."""

import time
from collections.abc import Callable

LONG_S = 30.0


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds. Fails if it still does not after LONG_S seconds."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
