"""Decides at which calls of `should_stop` the ranks ask each other whether to stop, so that asking costs little.

In each round, which is a call in which the ranks ask, rank 0 says how many calls are passed over until the next round.
So all ranks ask at the same calls, without a clock in common. Once the number is fixed, the ranks cannot ask earlier,
even if the calls that are passed over turn out to be long. So rank 0 plans with the lengths of earlier calls. The
length of a call means the time from the end of the previous call to this call. Rank 0 plans separately for two kinds of
calls: calls after a step, and calls within a step. Otherwise, hundreds of quick calls within a step would make the
ranks pass over the call after a long step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

# If calls follow each other within less than this (seconds), some calls are passed over. Otherwise the ranks ask in
# each call.
ASK_S = 0.5
# Asking may take _SHARE of the time. If there is a deadline, the calls of one kind that are passed over until the next
# round should together last at most SHARE_OF_DEADLINE of the time from a request to the deadline.
_SHARE = 0.01
SHARE_OF_DEADLINE = 0.1
# At most this many calls of one kind are passed over, because the times between calls may become much longer.
MOST = 32
# How many rounds and calls are remembered.
_REMEMBERED = 100
# With a deadline, a long call is remembered for longer: until later rounds in calls of its kind have together taken
# this share of its length.
SHARE_OF_LONG_CALL = 0.1


class _Calls:
    """The calls of one kind.

    Attributes:
        left: how many calls are passed over until the next round.
    """

    def __init__(self) -> None:
        self.left = 0
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self._rounds = 0
        # The long calls that are remembered, the longest first: for each call, its length in seconds and the number of
        # rounds before the call. If a later call is at least as long, the earlier call is not needed any more.
        self._long: deque[tuple[float, int]] = deque()

    @property
    def longest_recent_s(self) -> float:
        return max(self._recent, default=0.0)

    def note(self, took_s: float) -> None:
        self._recent.append(took_s)
        while self._long and self._long[-1][0] <= took_s:
            self._long.pop()
        self._long.append((took_s, self._rounds))

    def asked(self, round_s: float) -> None:
        """Notes a round in a call of this kind. A round takes `round_s` seconds."""
        self._rounds += 1
        while self._long and (self._rounds - self._long[0][1]) * round_s > self._long[0][0] * SHARE_OF_LONG_CALL:
            self._long.popleft()

    def passes(self, pause_s: float, at_most_s: float) -> int:
        """Returns how many calls are passed over.

        If calls are as long as the longest recent call, the next round comes in the first call after `pause_s` seconds,
        or earlier. If calls are as long as the longest remembered call, the calls that are passed over together last at
        most `at_most_s` seconds.
        """
        if not self._recent:  # no call is known
            return 0
        recent_s = max(self.longest_recent_s, 1e-6)
        # Recent calls may all be quick, so a long call is remembered for longer. If a long call were remembered for
        # ever, the ranks would ask in each quick call after a single long call, such as an evaluation.
        longest_s = max(recent_s, self._long[0][0] if self._long else 0.0)
        return min(MOST, math.ceil(pause_s / recent_s) - 1, math.floor(min(at_most_s / longest_s, MOST)))


class Pace:
    """Counts and measures calls on each rank. Only rank 0 uses what it has measured.

    Args:
        deadline_s: how long after a request the machine goes, in seconds; None if unknown.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._at_most_s = math.inf if deadline_s is None else deadline_s * SHARE_OF_DEADLINE
        self._last: float | None = None
        self._step: int | None = None
        self._after_steps, self._within_steps = self._kinds = _Calls(), _Calls()
        self._present = self._after_steps
        self._rounds: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def longest_gap_s(self) -> float:
        """The longest time until the next round, in seconds, if calls are like recent calls; 0.0 if no call is known.

        The result is the time of all calls that are passed over, plus the length of the call in which the ranks then
        ask. That call is taken to be as long as the longest recent call.
        """
        passing_s = sum(kind.longest_recent_s * self._passes_of(kind) for kind in self._kinds)
        return passing_s + max(kind.longest_recent_s for kind in self._kinds)

    def asks_now(self, step: int) -> bool:
        """Notes a call. Returns True if the ranks ask each other in this call.

        Args:
            step: the last step that was trained. It must be the same on all ranks.
        """
        now = time.monotonic()
        kind = self._present = self._within_steps if step == self._step else self._after_steps
        if self._last is not None:
            kind.note(now - self._last)
        self._last, self._step = now, step
        kind.left -= 1
        return kind.left < 0

    def asked(self, began: float, passes: Sequence[int]) -> None:
        """Notes a round.

        Args:
            began: when this rank began the round (`time.monotonic()`).
            passes: for each kind, how many calls are passed over until the next round. `Pace.passes` returned these
                numbers on rank 0.
        """
        self._last = time.monotonic()
        self._rounds.append(self._last - began)
        self._present.asked(self._round_s)
        for kind, left in zip(self._kinds, passes, strict=True):
            kind.left = left

    def passes(self) -> list[int]:
        """Returns how many calls of each kind are passed over until the next round. Only rank 0 calls this method."""
        return [self._passes_of(kind) for kind in self._kinds]

    @property
    def _round_s(self) -> float:
        """The time of the shortest round, in seconds.

        Longer rounds have waited for a slow rank. The training would wait for that rank anyway.
        """
        return min(self._rounds, default=0.0)

    def _passes_of(self, kind: _Calls) -> int:
        pause_s = max(ASK_S, self._round_s / _SHARE)
        return kind.passes(min(pause_s, self._at_most_s), self._at_most_s)
