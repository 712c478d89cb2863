"""Runs work on threads that an exiting interpreter does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

Item = TypeVar("Item")


def for_each(items: Iterable[Item], work: Callable[[Item], object], threads: int) -> None:
    """Calls `work` on every item, on up to `threads` threads, and returns when all calls are done.

    The calls start in the order of the items. After a failure no further call starts. The first failure is raised when
    the running calls have ended.

    This function uses no executor, because an exiting interpreter waits for an executor's threads, however long a store
    takes to answer.
    """
    left, lock, failures = iter(items), threading.Lock(), list[BaseException]()
    end = object()

    def run() -> None:
        while True:
            with lock:
                item = next(left, end) if not failures else end
            if item is end:
                return
            try:
                work(cast(Item, item))
            except BaseException as error:
                failures.append(error)
                return

    workers = [threading.Thread(target=run, name="mcore_ckpt remote", daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
