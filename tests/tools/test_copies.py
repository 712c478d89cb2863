"""Copies on several threads, of which none may run on when the caller removes the copied files."""

import threading

import pytest

from mcore_ckpt.tools.maintain.copies import Count, copy_all
from tests.support.thread_starts import interrupt_first_start


def test_no_copy_runs_after_ctrl_c_while_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool does not know the thread whose start was interrupted, so it does not wait for this thread's copy."""
    interrupt_first_start(monkeypatch)
    removed, late = threading.Event(), []

    def copy(item: int, count: Count) -> None:
        try:
            while True:
                count(0)  # raises an error once the copies are stopped
        finally:
            if removed.wait(0.2):  # ends at once if the caller did not wait
                late.append(item)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        copy_all(range(10), copy, lambda nbytes: None)
    removed.set()
    for worker in set(threading.enumerate()) - before:
        worker.join(60)
    assert not late
