"""A system that allows only so many threads."""

import threading

import pytest


def limit_threads(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    """Lets only `allowed` more threads start."""
    start, left = threading.Thread.start, iter(range(allowed))

    def limited(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
