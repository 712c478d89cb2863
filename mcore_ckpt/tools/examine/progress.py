"""Tells how far a tool has got."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of bytes that are done, and the number in all."""


def summed(progress: Progress, total: int) -> Callable[[int], None]:
    """Returns a function that takes the bytes of each part of the work when it is done, and passes on their sum.

    The sum is at most `total`, which may be a lower bound.

    Example:
        >>> add = summed(lambda done, total: print(done, total), 5)
        >>> add(3), add(3)
        3 5
        5 5
        (None, None)
    """
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done = min(total, done + nbytes)
        progress(done, total)

    return add
