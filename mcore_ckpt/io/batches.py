"""Divides a sequence into batches of a limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], nbytes_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yields batches of at most `most` bytes, in order. An item with more bytes is a batch by itself.

    >>> list(batches("abcd", {"a": 2, "b": 3, "c": 9, "d": 1}.__getitem__, 5))
    [['a', 'b'], ['c'], ['d']]
    """
    batch: list[T] = []
    used = 0
    for item in items:
        nbytes = nbytes_of(item)
        if batch and used + nbytes > most:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += nbytes
    if batch:
        yield batch
