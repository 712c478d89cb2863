"""Decides at which calls of `should_stop` the ranks ask each other, so that asking costs next to nothing.

Each time the ranks ask, rank 0 says how many calls they let pass until they ask again. So all ranks ask at the same
calls, without a clock in common. But a call that has been let pass can turn out to be long, and then the ranks cannot
ask earlier. So rank 0 expects calls as long as those before, and there are two kinds of calls, which are expected by
themselves: calls after a step, and calls within a step. After hundreds of quick calls within a rollout, the call after
the long step that follows is not let pass.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

# If calls follow each other within less than this (seconds), some are passed over. Otherwise the ranks ask in each
# call.
ASK_S = 0.5
# Asking may take this share of the time. If there is a deadline, the calls of one kind that pass take at most this
# share of the deadline.
_SHARE = 0.01
SHARE_OF_DEADLINE = 0.1
# At most this many calls of one kind are passed over, because the times between calls may become much longer.
MOST = 32
# How many rounds and calls are remembered.
_REMEMBERED = 100


class _Calls:
    """The calls of one kind.

    Attributes:
        left: how many calls pass until the next round.
        longest_s: the longest time between such a call and the call before, in seconds.
    """

    def __init__(self) -> None:
        self.left = 0
        self.longest_s = 0.0
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def longest_recent_s(self) -> float:
        return max(self._recent, default=0.0)

    def note(self, took_s: float) -> None:
        self._recent.append(took_s)
        self.longest_s = max(self.longest_s, took_s)

    def passes(self, pause_s: float, at_most_s: float) -> int:
        """Returns how many calls pass if they should take `pause_s`, and must not take longer than `at_most_s`."""
        if not self._recent:  # nothing is known
            return 0
        wanted = math.ceil(pause_s / max(self.longest_recent_s, 1e-6)) - 1
        # Recent calls may all be quick. Remember the longest one for ever, so that a long one is missed once at most.
        return min(MOST, wanted, math.floor(min(at_most_s / max(self.longest_s, 1e-6), MOST)))


class Pace:
    """Counts calls on each rank, and measures them on rank 0.

    Args:
        deadline_s: how long after a request the machine goes, in seconds; None if unknown.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._at_most_s = math.inf if deadline_s is None else deadline_s * SHARE_OF_DEADLINE
        self._last: float | None = None
        self._step: int | None = None
        self._after_steps, self._within_steps = self._kinds = _Calls(), _Calls()
        self._rounds: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def longest_gap_s(self) -> float:
        """How long it takes until the next round, in seconds, if the calls are like recent ones; 0.0 if none is known.

        It is the time of all calls that pass, and of the longest call after these.
        """
        passing_s = sum(kind.longest_recent_s * self._passes_of(kind) for kind in self._kinds)
        return passing_s + max(kind.longest_recent_s for kind in self._kinds)

    def asks_now(self, step: int) -> bool:
        """Notes a call. Returns True if the ranks ask each other in it.

        Args:
            step: the last step that was trained. It must be the same on all ranks.
        """
        now = time.monotonic()
        kind = self._within_steps if step == self._step else self._after_steps
        if self._last is not None:
            kind.note(now - self._last)
        self._last, self._step = now, step
        kind.left -= 1
        return kind.left < 0

    def asked(self, began: float, passes: Sequence[int]) -> None:
        """Notes a round.

        Args:
            began: when this rank began it (`time.monotonic()`).
            passes: how many calls rank 0 lets pass until the next round (`passes`).
        """
        self._last = time.monotonic()
        self._rounds.append(self._last - began)
        for kind, left in zip(self._kinds, passes, strict=True):
            kind.left = left

    def passes(self) -> list[int]:
        """Returns how many calls of each kind pass until the next round. Only rank 0 calls it."""
        return [self._passes_of(kind) for kind in self._kinds]

    def _passes_of(self, kind: _Calls) -> int:
        # Take the shortest round: longer rounds have waited for a slow rank, for which the training waits anyway.
        pause_s = max(ASK_S, min(self._rounds, default=0.0) / _SHARE)
        return kind.passes(min(pause_s, self._at_most_s), self._at_most_s)
