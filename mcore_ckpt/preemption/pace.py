"""Decides at which calls of `should_stop` the ranks ask each other, so that asking costs next to nothing.

Each time the ranks ask, rank 0 says at which call they ask next. So all ranks ask at the same calls, without a clock in
common.
"""

from __future__ import annotations

import math
import time
from collections import deque

# If calls follow each other within less than this (seconds), some are passed over. Otherwise the ranks ask in each
# call.
ASK_S = 0.5
# Asking may take this share of the time. If a deadline is short, the ranks ask after this share of the deadline at the
# latest.
_SHARE = 0.01
_SHARE_OF_DEADLINE = 0.1
# At most this many calls in a row are passed over, because the times between calls may become much longer.
_MOST = 32
# How many rounds and calls are remembered.
_REMEMBERED = 100


class Pace:
    """Counts calls on each rank, and measures them on rank 0.

    Args:
        deadline_s: how long after a request the machine goes, in seconds; None if unknown.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._deadline_s = deadline_s
        self._left = 0
        self._last: float | None = None
        self._calls: deque[float] = deque(maxlen=_REMEMBERED)
        self._rounds: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def longest_call_s(self) -> float:
        """The longest recent time between two calls, in seconds; 0.0 before the second call."""
        return max(self._calls, default=0.0)

    def asks_now(self) -> bool:
        """Notes a call. Returns True if the ranks ask each other in it."""
        now = time.monotonic()
        if self._last is not None:
            self._calls.append(now - self._last)
        self._last = now
        self._left -= 1
        return self._left < 0

    def asked(self, began: float, passes: int) -> None:
        """Notes a round.

        Args:
            began: when this rank began it (`time.monotonic()`).
            passes: how many calls rank 0 lets pass until the next round (`passes`).
        """
        self._last = time.monotonic()
        self._rounds.append(self._last - began)
        self._left = passes

    def passes(self) -> int:
        """Returns how many calls pass until the next round. Only rank 0 calls it."""
        if not self._calls:
            return 0
        # Take the shortest round: longer rounds have waited for a slow rank, for which the training waits anyway.
        pause_s = max(ASK_S, min(self._rounds, default=0.0) / _SHARE)
        if self._deadline_s is not None:
            pause_s = min(pause_s, self._deadline_s * _SHARE_OF_DEADLINE)
        return min(_MOST, math.ceil(pause_s / max(self.longest_call_s, 1e-6)) - 1)
