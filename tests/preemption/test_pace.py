"""At which calls the ranks ask each other: how often that is, and how long no rank asks."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.preemption import pace
from mcore_ckpt.preemption.pace import MOST, SHARE_OF_DEADLINE, SHARE_OF_LONG_CALL, Pace


@dataclass
class Ranks:
    """Rank 0 and another rank of a training, on a simulated clock.

    `rounds`: at which calls they have asked each other. `calls`: how long each call took, and whether it came after a
    step (and not within one). `longest_gap_s`: what rank 0 expects the time until the next round to be.
    """

    deadline_s: float | None
    now: float = 100.0
    round_s: float = 0.001
    step: int = 0
    calls: list[tuple[float, bool]] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pace, self.other = Pace(self.deadline_s), Pace(self.deadline_s)

    @property
    def longest_gap_s(self) -> float:
        return self.pace.longest_gap_s

    def call(self, seconds: float, is_after_step: bool = True) -> None:
        self.now += seconds
        self.step += is_after_step
        self.calls.append((seconds, is_after_step))
        asks = self.pace.asks_now(self.step)
        assert self.other.asks_now(self.step) == asks, "one rank would wait for the other"
        if asks:
            began, passes = self.now, self.pace.passes()
            self.now += self.round_s
            self.pace.asked(began, passes)
            self.other.asked(began, passes)
            self.rounds.append(len(self.calls) - 1)

    def asked_in(self, calls: int, seconds: float, is_after_step: bool = True) -> int:
        """How often the ranks ask each other in so many calls."""
        before = len(self.rounds)
        for _ in range(calls):
            self.call(seconds, is_after_step)
        return len(self.rounds) - before

    def longest_remembered_s(self, at: int, kind: bool) -> float:
        """The longest call of one kind until call `at` that is one of the last 100, or not yet paid for by rounds."""
        of_kind = [number for number in range(1, at + 1) if self.calls[number][1] == kind]
        asked = [number for number in self.rounds if number <= at and self.calls[number][1] == kind]
        long = [
            self.calls[number][0]
            for rank, number in enumerate(reversed(of_kind))
            if rank < 100
            or (len(asked) - bisect_left(asked, number)) * self.round_s
            < 0.99 * self.calls[number][0] * SHARE_OF_LONG_CALL
        ]
        return max(long, default=0.0)

    def gaps(self) -> Iterator[tuple[list[tuple[float, bool]], list[tuple[float, bool]]]]:
        """For each two rounds, one after the other: all calls before, and the calls since up to the second round."""
        for first, second in zip(self.rounds, self.rounds[1:], strict=False):
            yield self.calls[1 : first + 1], self.calls[first + 1 : second + 1]


@pytest.fixture(scope="module", autouse=True)
def clock() -> Iterator[list[Ranks]]:
    """The clock is that of the last ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace.time, "monotonic", lambda: _now[-1].now)
        yield _now


_now: list[Ranks] = []


def ranks(deadline_s: float | None, round_s: float = 0.001) -> Ranks:
    _now[:] = [Ranks(deadline_s, round_s=round_s)]
    return _now[0]


@pytest.mark.parametrize("is_after_step", [True, False])
@pytest.mark.parametrize(
    ("call_s", "round_s", "deadline_s", "wanted"),
    [
        (0.5, 0.001, None, 100),
        (30.0, 0.25, None, 100),
        (0.26, 0.001, None, 51),
        (0.05, 0.001, None, 11),
        (0.0001, 0.001, None, 5),  # at most 32 pass
        (0.06, 0.001, 1.0, 51),
        (5.0, 0.25, None, 22),  # asking costs a twentieth of a call
        (5.0, 0.25, 60.0, 51),
    ],
)
def test_ranks_ask_in_each_call_that_is_long_enough(
    call_s: float, round_s: float, deadline_s: float | None, wanted: int, is_after_step: bool
) -> None:
    found = ranks(deadline_s, round_s)
    assert found.asked_in(100, call_s, is_after_step) == pytest.approx(wanted, abs=2)


def test_after_one_long_call_no_call_passes() -> None:
    found = ranks(None)
    found.asked_in(50, 0.001)
    found.call(60.0)
    assert found.asked_in(32, 0.001) >= 1
    assert found.asked_in(50, 0.001) == 50, "the next call may be as long"


@pytest.mark.parametrize("deadline_s", [120.0, None])
def test_after_the_quick_calls_of_a_rollout_the_ranks_ask_in_the_next_step(deadline_s: float | None) -> None:
    found = ranks(deadline_s)
    for _ in range(3):
        assert found.asked_in(300, 0.01, is_after_step=False) < 30, "asking costs little in a rollout"
        assert found.asked_in(10, 60.0) == 10


@pytest.mark.parametrize("is_after_step", [True, False])
def test_with_a_deadline_a_long_call_of_long_ago_is_expected_again(is_after_step: bool) -> None:
    found = ranks(120.0)
    found.call(60.0, is_after_step)
    found.asked_in(1 + MOST, 0.01, is_after_step)
    found.call(60.0, is_after_step)
    found.asked_in(1000, 0.01, is_after_step)
    assert found.asked_in(10, 60.0, is_after_step) == 10


def test_with_a_deadline_a_single_long_call_makes_rounds_frequent_only_for_a_while() -> None:
    """It is longer than what may pass, a tenth of the deadline, as an evaluation is."""
    found = ranks(120.0, round_s=0.15)
    found.call(0.3)
    found.call(15.0)
    assert found.asked_in(100, 0.3) == 100, "the next call may be as long"
    assert found.asked_in(1000, 0.3) < 40


def test_the_expected_gap_is_that_of_calls_that_go_on_as_before() -> None:
    found = ranks(None, round_s=0.25)
    assert found.longest_gap_s == 0.0
    found.asked_in(50, 5.0)
    found.asked_in(300, 0.01, is_after_step=False)
    assert found.longest_gap_s >= 25.0, "asking would cost more than a hundredth of the time"
    found = ranks(None)
    found.asked_in(50, 60.0)
    found.asked_in(300, 0.01, is_after_step=False)
    assert 60.0 <= found.longest_gap_s <= 61.0, "the last step lies far back"


RUNS = st.tuples(st.integers(1, 150), st.floats(1e-4, 300.0), st.booleans())


@given(st.lists(RUNS, min_size=1, max_size=6), st.sampled_from([1.0, 30.0, 120.0, 3600.0]), st.floats(1e-4, 1.0))
@settings(max_examples=200, deadline=None)
def test_calls_pass_only_as_long_as_the_deadline_allows(
    runs: list[tuple[int, float, bool]], deadline_s: float, round_s: float
) -> None:
    """Where a call takes longer than all of its kind that are remembered, the part that could be expected counts."""
    found = ranks(deadline_s, round_s)
    for count, seconds, is_after_step in runs:
        found.asked_in(count, seconds, is_after_step)
    for before, (*passed, _) in found.gaps():
        for kind in (True, False):
            times = [seconds for seconds, is_kind in passed if is_kind == kind]
            if not times:
                continue
            longest_s = found.longest_remembered_s(len(before), kind)
            assert len(times) <= MOST
            assert longest_s > 0.0, "nothing was known of such calls"
            expected = math.fsum(min(seconds, longest_s) for seconds in times)
            assert expected <= deadline_s * SHARE_OF_DEADLINE * (1 + 1e-6)
