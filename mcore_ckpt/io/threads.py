"""Runs work on several threads, so that waits for a disk or a store overlap.

An exiting interpreter does not wait for these threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")

# At most one thread is started for this many short items, because starting a thread takes longer than a few calls to a
# local file system.
_SHORT_ITEMS_OF_A_THREAD = 8

_this_thread = threading.local()


def for_each(items: Iterable[Item], work: Callable[[Item], object], threads: int) -> None:
    """Calls `work` on every item, on up to `threads` threads, and returns when all calls are done.

    The calls start in the order of the items. After a failure no further call starts. The first failure is raised when
    the running calls have ended.

    If the system allows fewer threads, the threads that run do all of the work. If it allows no thread, the calling
    thread does the work.

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

    def run_as_worker() -> None:
        _this_thread.is_worker = True
        try:
            run()
        except BaseException as error:  # `disk_watch.Work.give_up` raises an exception at any place
            failures.append(error)

    workers: list[threading.Thread] = []
    try:
        _start(run_as_worker, threads, workers)
    except BaseException as error:  # the calling thread was interrupted (`_join`), and some threads run already
        failures.append(error)
        if threading.current_thread() is threading.main_thread():
            raise
    if not workers:
        run()
    for worker in workers:
        _join(worker, failures)
    if failures:
        raise failures[0]


def _join(worker: threading.Thread, failures: list[BaseException]) -> None:
    """Waits for a worker. If the calling thread is interrupted meanwhile, no further call starts.

    Ctrl-C must end the main thread even if a call hangs. Any other thread is interrupted by `disk_watch.Work.give_up`.
    That thread still waits until the calls have ended, because its work ends only then.
    """
    while worker.is_alive():
        try:
            worker.join()
        except BaseException as error:
            failures.append(error)
            if threading.current_thread() is threading.main_thread():
                raise


def _start(run: Callable[[], None], threads: int, workers: list[threading.Thread]) -> None:
    """Starts `run` on up to `threads` threads, as many as the system allows, and adds these threads to `workers`."""
    for _ in range(threads):
        worker = threading.Thread(target=run, name="mcore_ckpt files", daemon=True)
        worker.started_by = threading.current_thread()  # type: ignore[attr-defined]  # for `disk_watch.Look`
        workers.append(worker)  # before the start, because the start may be interrupted when the thread runs already
        try:
            worker.start()
        except (RuntimeError, MemoryError):  # a limit of threads or memory: the threads that run do all of the work
            workers.remove(worker)
            break


def results_of(
    items: Sequence[Item], work: Callable[[Item], Result], threads: int, are_long: bool = False
) -> list[Result]:
    """Calls `work` on every item, on up to `threads` threads, and returns the results in the order of the items.

    Starts no threads if this module has started the calling thread. Starts threads for a few items only if the calls
    `are_long`: each call takes much longer than the start of a thread. Raises failures as `for_each` does.

    Example:
        >>> results_of([1, 2], lambda number: 10 * number, threads=2)
        [10, 20]
    """
    threads = min(threads, len(items) // (1 if are_long else _SHORT_ITEMS_OF_A_THREAD))
    if threads < 2 or getattr(_this_thread, "is_worker", False):
        return [work(item) for item in items]
    results: dict[int, Result] = {}

    def run(numbered: tuple[int, Item]) -> None:
        number, item = numbered
        results[number] = work(item)

    for_each(enumerate(items), run, threads)
    return [results[number] for number in range(len(items))]
