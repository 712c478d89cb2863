"""Starts of threads that fail, or are interrupted."""

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


def interrupt_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises KeyboardInterrupt in the first start of a thread, as Ctrl-C does, when the thread runs already."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
