"""Work on several threads: every item once, no new item after a failure."""

import threading
from contextlib import suppress

import pytest

from mcore_ckpt.io.threads import for_each, results_of
from tests.support.thread_starts import interrupt_first_start, limit_threads


@pytest.mark.parametrize("threads", [1, 4])
def test_every_item_is_worked_on_once_whatever_it_is(threads: int) -> None:
    lock, seen = threading.Lock(), []

    def work(item: int | None) -> None:
        with lock:
            seen.append(item)

    items = [0, None, 2, False, None, 5]
    for_each(items, work, threads)
    assert sorted(map(repr, seen)) == sorted(map(repr, items))


def test_the_first_failure_is_raised_and_no_further_item_begins() -> None:
    seen = []

    def work(item: int) -> None:
        seen.append(item)
        if item == 2:
            raise KeyError(item)

    with pytest.raises(KeyError, match="2"):
        for_each(range(10), work, 1)
    assert seen == [0, 1, 2]


def test_results_are_in_the_order_of_the_items() -> None:
    items = list(range(1000))
    assert results_of(items, lambda number: -number, threads=7) == [-number for number in items]


def test_calls_overlap() -> None:
    """Each waits for another one at the same time; alone it would fail."""
    together = threading.Barrier(2, timeout=60)
    assert len(results_of(range(64), lambda _: together.wait(), threads=2)) == 64


def test_a_few_items_start_no_thread() -> None:
    assert results_of([1, 2, 3], lambda _: threading.get_ident(), threads=8) == [threading.get_ident()] * 3


def test_a_few_long_items_overlap() -> None:
    together = threading.Barrier(2, timeout=60)
    assert len(results_of([1, 2], lambda _: together.wait(), threads=8, are_long=True)) == 2


def test_a_failure_is_raised_and_not_lost_among_results() -> None:
    def fails_once(number: int) -> int:
        if number == 500:
            raise ValueError(number)
        return number

    with pytest.raises(ValueError, match="500"):
        results_of(range(1000), fails_once, threads=4)


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_limit_of_threads_is_no_failure(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is done, on the threads that the system allows or on this one, and none of them runs on."""
    limit_threads(monkeypatch, allowed)
    before, who = threading.active_count(), set()

    def work(number: int) -> int:
        who.add(threading.get_ident())
        return -number

    assert results_of(range(100), work, threads=8) == [-number for number in range(100)]
    assert (threading.get_ident() in who) == (allowed == 0)
    assert threading.active_count() == before


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_failure_is_raised_where_threads_are_few(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(monkeypatch, allowed)

    def work(number: int) -> None:
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        for_each(range(10), work, threads=4)


def test_no_further_item_begins_after_ctrl_c_while_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_first_start(monkeypatch)
    interrupted, seen = threading.Event(), []

    def work(item: int) -> None:
        assert interrupted.wait(60)
        seen.append(item)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        for_each(range(10), work, 2)
    interrupted.set()
    for worker in set(threading.enumerate()) - before:
        worker.join(60)
    assert len(seen) <= 1  # the call that was running


def test_another_thread_waits_for_the_calls_if_it_is_interrupted_while_threads_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`disk_watch.Work.give_up` interrupts such a thread, and its work ends only when the calls have ended."""
    raised, late = threading.Event(), []

    def work(item: int) -> None:
        if raised.wait(0.2):  # ends at once if the caller did not wait
            late.append(item)

    def call() -> None:
        interrupt_first_start(monkeypatch)
        with suppress(KeyboardInterrupt):
            for_each(range(10), work, 2)
            late.append("not interrupted")
        raised.set()

    before = set(threading.enumerate())
    caller = threading.Thread(target=call)
    caller.start()
    caller.join(60)
    for worker in set(threading.enumerate()) - before:
        worker.join(60)
    assert raised.is_set()
    assert not late
