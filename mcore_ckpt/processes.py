"""Keeps a forked child away from its parent's objects.

A child (a data loader's worker, or a process made by `multiprocessing` or `os.fork`) has a copy of every object, but
none of the threads. A lock that a thread held at the fork is held for ever in the child. Sockets, locks on files and
keys in the job's key-value store still belong to the parent. So the child must not use these objects, not even at its
end, when it runs our exit handlers. Therefore the lists of unfinished work are empty in the child, locks are new, and
the parent's objects refuse to be used.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol, TypeVar

from mcore_ckpt.errors import InvalidStateError


class Home:
    """The process that has made an object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a forked child of the process."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Raises InvalidStateError in a forked child. `what` names the object."""
        if not self.is_here:
            raise InvalidStateError(
                f"{what} belongs to process {self._pid}, and this is its forked child {os.getpid()}, which has none of "
                "its threads and no place among the ranks: call it in that process. Nothing has been done"
            )


class OwnEvent(threading.Event):
    """An event that a thread of this process sets.

    Args:
        what: the object that waits for the event, for messages.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._home, self._what = Home(), what

    def wait(self, timeout: float | None = None) -> bool:
        """Waits as `threading.Event` does. Raises InvalidStateError in a forked child, where nobody sets the event."""
        if self.is_set():  # `is_set` does not take the event's lock, which may have been held at a fork
            return True
        self._home.check(self._what)
        return super().wait(timeout)


class _Clearable(Protocol):
    def clear(self) -> Any: ...


Kept = TypeVar("Kept", bound=_Clearable)


def emptied_in_child(kept: Kept) -> Kept:
    """Empties `kept`, a collection of objects with threads or locks, in each forked child. Returns `kept`.

    So exit handlers, which also run in a child, wait only for objects that the child itself has made.
    """
    os.register_at_fork(after_in_child=kept.clear)
    return kept
