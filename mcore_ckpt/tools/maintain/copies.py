"""Copies many files on several threads. All threads end if one of them fails or the process is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from mcore_ckpt.io import tuning

Item = TypeVar("Item")
Result = TypeVar("Result")
Count = Callable[[int], None]


class _Stopped(Exception):
    """Ends a copying thread, because another thread has failed or the process was interrupted."""


def copy_all(items: Iterable[Item], copy: Callable[[Item, Count], Result], count: Count) -> list[Result]:
    """Calls `copy` with each item on several threads. Returns the results in the order in which the calls ended.

    When this function raises an error, all threads have ended, so the caller may remove the copied files.

    Args:
        items: the files to copy.
        copy: a function that copies one file. Each time that it has copied some bytes, it must call its second argument
            with the number of these bytes.
        count: a function that is called with these numbers of bytes, on several threads.
    """
    is_stopped, running, changed = False, 0, threading.Condition()

    def count_or_stop(nbytes: int) -> None:
        if is_stopped:
            raise _Stopped
        count(nbytes)

    def copy_one(item: Item) -> Result:
        nonlocal running
        with changed:
            if is_stopped:
                raise _Stopped
            running += 1
        try:
            return copy(item, count_or_stop)
        finally:
            with changed:
                running -= 1
                changed.notify_all()

    with ThreadPoolExecutor(tuning.PEER_THREADS, "mcore_ckpt copies") as pool:
        try:
            return [done.result() for done in as_completed([pool.submit(copy_one, item) for item in items])]
        except BaseException:
            with changed:
                is_stopped = True
            pool.shutdown(cancel_futures=True)
            # Ctrl-C while the pool starts a thread leaves a thread that the pool does not know, so the pool does not
            # wait for that thread's copy. Wait for the copy here.
            with changed:
                changed.wait_for(lambda: running == 0)
            raise
