"""Runs the parts of several ranks on a thread each."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.waiting import LONG_S

# What a busy machine may add to a wait.
SLACK_S = 5.0


def on_threads(parts: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
    """What the part of each rank returned, or the exception that it raised. Fails if one hangs."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = parts[rank]()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S + SLACK_S)
        assert not thread.is_alive()
    return results
