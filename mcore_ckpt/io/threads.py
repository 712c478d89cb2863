"""Work on threads that end with it, and that no interpreter waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def for_each(items: Iterable[Item], work: Callable[[Item], object], threads: int) -> None:
    """Does the work of every item, on up to `threads` threads, in their order. Raises what the first to fail raised,
    once none is under way; the others are not begun.

    Not an executor's threads: an interpreter that ends joins those, however long a store takes to answer.
    """
    left, lock, failures = iter(items), threading.Lock(), list[BaseException]()

    def run() -> None:
        while True:
            with lock:
                item = next(left, None) if not failures else None
            if item is None:
                return
            try:
                work(item)
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
