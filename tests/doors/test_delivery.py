"""Listeners are called in order on a thread of their own, and nothing that they do reaches a save."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_ckpt import delivery
from mcore_ckpt.delivery import Delivery
from mcore_ckpt.events import Deleted, ErrorText, Event, Started
from tests.support.endings import run_to_the_end
from tests.support.waiting import LONG_S, wait_for

# How long a test waits for what must not come.
SHORT_S = 0.01


def started(step: int) -> Event:
    return Started(step=step, role="actor", rank=0, path=Path("steps"), time=0.0)


def deleted(step: int) -> Event:
    return Deleted(step=step, role="actor", rank=0, path=Path("steps"), time=0.0, seconds=0.0)


class Held:
    """A listener that returns only when the test lets it."""

    def __init__(self) -> None:
        self.is_called, self.may_return = threading.Event(), threading.Event()
        self.steps: list[int | None] = []

    def __call__(self, event: Event) -> None:
        self.is_called.set()
        assert self.may_return.wait(LONG_S)
        self.steps.append(event.step)


@pytest.fixture
def held() -> Iterator[Held]:
    listener = Held()
    yield listener
    listener.may_return.set()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == delivery.logger.name]


def test_every_listener_gets_every_event_in_order_on_one_other_thread() -> None:
    got: list[tuple[str, int | None]] = []
    threads: set[threading.Thread] = set()
    posts = Delivery(
        [
            lambda event: got.append(("first", event.step)),
            lambda event: got.append(("second", event.step)),
            lambda event: threads.add(threading.current_thread()),
        ]
    )
    for step in range(100):
        posts.post(started(step))
    assert posts.drain()
    assert got == [(name, step) for step in range(100) for name in ("first", "second")]
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert thread.daemon
    posts.close()
    thread.join(LONG_S)
    assert not thread.is_alive()
    posts.post(started(100))  # as an upload does that goes on when its manager has been closed
    assert posts.drain()
    assert got[-1] == ("second", 100)


def test_without_listeners_there_is_no_thread() -> None:
    before = threading.active_count()
    posts = Delivery()
    posts.post(started(1))
    assert posts.drain(0)
    assert threading.active_count() == before


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_listener_that_raises_is_logged_once_for_each_kind_of_event(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __call__(self, event: Event) -> None:
            raise error("out of order")

    got: list[Event] = []
    posts = Delivery([Broken(), got.append, Broken()])
    for step in (1, 2, 3):
        posts.post(started(step))
        posts.post(deleted(step))
    assert posts.drain()
    assert got == [event for step in (1, 2, 3) for event in (started(step), deleted(step))]
    texts = warnings(caplog)
    assert len(texts) == 2 * 2
    assert sum("Broken called with Started of step 1" in text for text in texts) == 2
    assert sum("Broken called with Deleted of step 1" in text for text in texts) == 2
    assert "out of order" in caplog.text
    posts.close()


def test_a_full_queue_drops_events_and_one_warning_counts_them(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    posts = Delivery([held], capacity=3)
    posts.post(started(0))
    assert held.is_called.wait(LONG_S)
    for step in range(1, 11):
        posts.post(started(step))
    held.may_return.set()
    assert posts.drain()
    assert held.steps == [0, 1, 2, 3]
    (text,) = warnings(caplog)
    assert "7 events were dropped" in text
    posts.close()


def test_a_listener_that_never_returns_is_waited_for_once(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    posts = Delivery([held])
    posts.post(started(5))
    posts.post(started(6))
    assert held.is_called.wait(LONG_S)
    assert not posts.drain(SHORT_S)
    (text,) = warnings(caplog)
    assert "Held called with Started of step 5" in text
    assert "1 more events wait" in text
    assert not posts.drain(10 * LONG_S), "the same call is not waited for again"
    held.may_return.set()
    wait_for(lambda: held.steps == [5, 6])
    assert posts.drain()
    posts.close()


def test_slow_listeners_do_not_hold_up_each_wait(held: Held) -> None:
    """Of calls that each take long, a training waits for one alone."""
    posts = Delivery([held])
    posts.post(started(5))
    posts.post(started(6))
    assert held.is_called.wait(LONG_S)
    assert not posts.drain(SHORT_S, is_last=False)
    posts._given_up_on = None  # as if the next call had begun
    assert not posts.drain(10 * LONG_S, is_last=False)
    held.may_return.set()
    wait_for(lambda: held.steps == [5, 6])
    wait_for(lambda: posts.drain(is_last=False))
    posts.close()


def test_a_save_under_a_signal_handler_does_not_wait_for_what_that_has_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler waits for the save's own thread, and the interrupted frame holds the lock."""
    monkeypatch.setattr(delivery, "POST_WAIT_S", SHORT_S)
    posts = Delivery([lambda event: None])
    with posts._changed:
        save = threading.Thread(target=posts.post, args=(started(1),))
        save.start()
        save.join(LONG_S)
        assert not save.is_alive()
    posts.close()


def test_an_error_without_words_is_told_all_the_same() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    assert ErrorText.of(MuteError()).message == "the error has no readable message"


def test_a_listener_may_wait_for_its_own_manager() -> None:
    answers: list[bool] = []
    posts = Delivery([lambda event: answers.append(posts.drain(10 * LONG_S))])
    posts.post(started(1))
    assert posts.drain()
    assert answers == [False]
    posts.close()


def test_events_wait_while_the_system_grants_no_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[Event] = []
    posts = Delivery([got.append])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        posts.post(started(1))
        assert not posts.drain(10 * LONG_S)
    assert "1 events are not delivered" in warnings(caplog)[0]
    posts.post(started(2))
    assert posts.drain()
    assert [event.step for event in got] == [1, 2]
    posts.close()


def test_a_forked_child_delivers_its_own_events_and_the_parent_the_others(held: Held) -> None:
    """The fork comes while the thread delivers, and while the lock is held, which the child could never take."""
    got: list[int | None] = []
    posts = Delivery([lambda event: os.getpid() == parent and held(event), lambda event: got.append(event.step)])
    parent = os.getpid()
    posts.post(started(1))
    posts.post(started(2))
    assert held.is_called.wait(LONG_S)
    locked, may_unlock = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with posts._changed:
            locked.set()
            assert may_unlock.wait(LONG_S)

    holder = threading.Thread(target=hold_lock, daemon=True)
    holder.start()
    assert locked.wait(LONG_S)
    child = os.fork()
    if child == 0:
        signal.alarm(int(LONG_S))
        posts.post(started(3))
        os._exit(0 if posts.drain(LONG_S) and got == [3] else 1)
    may_unlock.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.may_return.set()
    assert posts.drain()
    assert got == [1, 2]
    posts.close()


def test_an_interpreter_that_ends_delivers_what_waits_and_leaves_a_listener_that_hangs(tmp_path: Path) -> None:
    imports = (
        "import threading, time, mcore_ckpt.delivery as delivery\n"
        "from mcore_ckpt.events import Started\n"
        "event = Started(step=1, role='actor', rank=0, path='steps', time=0.0)\n"
    )
    programs = {
        "slow": (
            "def slow(event):\n    time.sleep(0.2)\n    print('told of', event.step, flush=True)\n"
            "kept = delivery.Delivery([slow])\n"
            "kept.post(event)\n"
        ),
        "hung": (
            "delivery.DRAIN_WAIT_S = 0.1\n"
            "kept = delivery.Delivery([lambda event: threading.Event().wait()])\n"
            "kept.post(event)\n"
        ),
    }
    ended = run_to_the_end(imports, programs, tmp_path)
    assert (ended["slow"].status, ended["slow"].output) == (0, "told of 1\n")
    assert ended["hung"].status == 0
    assert "still busy after 0." in ended["hung"].output


def test_what_was_dropped_is_told_when_nothing_can_be_delivered(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    posts = Delivery([held], capacity=1)
    posts.post(started(0))
    assert held.is_called.wait(LONG_S)
    for step in (1, 2, 3):
        posts.post(started(step))
    assert not posts.drain(SHORT_S)
    assert "2 were dropped" in warnings(caplog)[0]
