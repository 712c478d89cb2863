"""Work on several threads: every item once, no new item after a failure."""

import threading

import pytest

from mcore_ckpt.io.threads import for_each


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
