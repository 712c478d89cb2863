"""Work on a thread that exists only while there is some: in order, none is lost, and errors end nothing."""

import logging
import signal
import sys
import threading
from functools import partial
from types import FrameType

import pytest

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.io.worker import Handle, NoThreadError, Worker, all_workers
from tests.support.thread_starts import limit_threads
from tests.support.waiting import LONG_S, join_threads

NAME = "worker of tests"


class Gate:
    """Holds a worker up until it is opened."""

    def __init__(self, worker: Worker) -> None:
        self._may_go_on, begun = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            assert self._may_go_on.wait(LONG_S)

        worker.add(hold)
        assert begun.wait(LONG_S)

    def open(self) -> None:
        self._may_go_on.set()
        join_threads(NAME)


def threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def test_functions_are_called_in_their_order_on_one_thread_that_ends_then() -> None:
    worker, called = Worker(NAME), list[int]()
    gate = Gate(worker)
    for number in range(5):
        worker.add(partial(called.append, number))
    assert (threads(), worker.is_at_work, called) == (1, True, [])
    assert not worker.wait_at_most(0.01)
    gate.open()
    assert called == [0, 1, 2, 3, 4]
    assert not worker.is_at_work
    worker.add(partial(called.append, 5))
    assert worker.wait_at_most(LONG_S)
    worker.wait(LONG_S)
    assert called[-1] == 5


def test_of_those_that_wait_only_the_newest_is_called_if_it_is_there_instead() -> None:
    worker, called = Worker(NAME, must_finish=False), list[int]()
    gate = Gate(worker)
    for number in range(5):
        worker.add(partial(called.append, number), instead=True)
    assert threads() == 1
    gate.open()
    assert called == [4]


def test_an_error_is_logged_and_the_next_function_is_called(caplog: pytest.LogCaptureFixture) -> None:
    worker, called = Worker(NAME), list[int]()
    gate = Gate(worker)

    def fail() -> None:
        raise ValueError("first")

    for work in (fail, partial(called.append, 1)):
        worker.add(work)
    with caplog.at_level(logging.ERROR):
        gate.open()
    assert called == [1]
    assert "continues after an unexpected error" in caplog.text
    assert "ValueError: first" in caplog.text


@pytest.mark.parametrize("must_finish", [True, False])
def test_without_another_thread_only_what_must_be_done_is_done_here(
    must_finish: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, called = Worker(NAME, must_finish), list[threading.Thread]()

    def work() -> None:
        called.append(threading.current_thread())

    with monkeypatch.context() as patched:
        limit_threads(patched, 0)
        if must_finish:
            worker.add(work)
            assert called == [threading.current_thread()]
        else:
            with pytest.raises(NoThreadError, match="can't start new thread"):
                worker.add(work)
            assert called == []
    worker.add(work)
    assert worker.wait_at_most(LONG_S)
    assert len(called) == (2 if must_finish else 1), "what was refused is not called later"


class Interrupted(RuntimeError):
    """What a handler of SIGTERM raises."""


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("must_finish", [True, False])
def test_what_a_signal_handler_interrupts_is_not_done(
    must_finish: bool, has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the thread has begun or not: nobody waits for it for ever, and what is added later is done."""
    worker, called = Worker(NAME, must_finish), list[int]()
    start = threading.Thread.start

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Interrupted

    def interrupted(thread: threading.Thread) -> None:
        if has_begun:
            start(thread)
        handler(signal.SIGTERM, sys._getframe())

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(Interrupted):
            worker.add(partial(called.append, 1))
    assert not worker.is_at_work
    assert worker.wait_at_most(LONG_S)
    worker.wait(LONG_S)
    worker.add(partial(called.append, 2))
    worker.wait(LONG_S)
    assert called == [2]


def test_an_exiting_interpreter_waits_only_for_what_must_be_done() -> None:
    must, may = Worker(NAME), Worker(NAME, must_finish=False)
    assert must in all_workers()
    assert may not in all_workers()


# -- handles ----------------------------------------------------------------------------------------------------


def test_a_handle_gives_what_the_work_has_made() -> None:
    handle: Handle[int] = Handle("the work is under way", ": wait")
    with pytest.raises(TimeoutError, match=r"^the work is under way after 0 s: wait$"):
        handle.wait(0)
    assert (handle.done, handle.exception) == (False, None)
    Worker(NAME).add(partial(handle.end, 5))
    assert (handle.wait(LONG_S), handle.done, handle.exception) == (5, True, None)


def test_a_handle_raises_what_has_failed() -> None:
    handle: Handle[int] = Handle("the work is under way")
    error = CheckpointError("no space left")
    Worker(NAME).add(partial(handle.fail, error))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no space left"):
            handle.wait(LONG_S)
    assert (handle.done, handle.exception) == (True, error)
