"""What is saved in the time that is left, and how often ranks ask each other."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt import preemption
from mcore_ckpt.preemption import pace
from mcore_ckpt.preemption.last_save import DURABLE, ON_NODES, Choice, Times, _why_not_durable, choose
from mcore_ckpt.preemption.pace import Pace

UNKNOWN = Times(None, None, None)
ROOT = Times(10.0, 0.0, None)
FAST = Times(2.0, 10.0, None)


@pytest.mark.parametrize(
    ("left_s", "times", "saved", "places", "how", "is_new"),
    [
        (math.inf, UNKNOWN, None, (False, True), DURABLE, True),
        (5.0, UNKNOWN, None, (False, True), DURABLE, True),  # it is tried
        (5.0, Times(None, 0.0, 10.0), None, (False, True), None, False),  # bench has predicted it
        (13.0, Times(10.0, 0.0, 1.0), None, (False, True), DURABLE, True),  # what was measured counts
        (13.0, ROOT, None, (False, True), DURABLE, True),
        (12.0, ROOT, None, (False, True), None, False),
        (0.0, ROOT, DURABLE, (False, True), DURABLE, False),
        (16.0, FAST, None, (True, True), DURABLE, True),
        (14.0, FAST, None, (True, True), ON_NODES, True),
        (2.0, FAST, None, (True, True), None, False),
        (math.inf, FAST, None, (True, False), ON_NODES, True),
        (16.0, FAST, ON_NODES, (True, True), DURABLE, True),
        (14.0, FAST, ON_NODES, (True, True), ON_NODES, False),
        (math.inf, FAST, ON_NODES, (True, False), ON_NODES, False),
        (0.0, FAST, DURABLE, (True, True), DURABLE, False),
        (5.0, Times(2.0, None, None), None, (True, True), DURABLE, True),  # no step was copied yet
        (5.0, Times(2.0, None, 9.0), None, (True, True), ON_NODES, True),
        (5.0, Times(9.0, None, None), None, (True, True), None, False),
    ],
)
def test_what_fits_is_saved(
    left_s: float, times: Times, saved: str | None, places: tuple[bool, bool], how: str | None, is_new: bool
) -> None:
    found = choose(left_s, times, saved, *places)
    assert (found.how, found.is_new) == (how, is_new)
    assert (found.reason == "") == (how == DURABLE)
    assert ("durable_every=None" in found.reason) == (how is not None and not places[1])
    assert isinstance(found, Choice)


@pytest.mark.parametrize(
    ("drain", "reason"),
    [
        (None, "was not to be copied"),
        (SimpleNamespace(done=False, committed=False, exception=None), "no time is left"),
        (SimpleNamespace(done=True, committed=False, exception=OSError("disk full")), "has failed: disk full"),
        (SimpleNamespace(done=True, committed=True, exception=None), "was not over in time, but is now"),
    ],
)
def test_the_reason_why_a_step_is_only_on_the_nodes_is_the_true_one(drain: Any, reason: str) -> None:
    handle: Any = SimpleNamespace(drain=drain)
    assert reason in _why_not_durable(handle)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = 100.0

    def go_on(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    return go_on


def asked(of: Pace, clock: Callable[[float], None], calls: int, call_s: float, round_s: float = 0.001) -> int:
    """How often the ranks ask each other in so many calls."""
    count = 0
    for _ in range(calls):
        clock(call_s)
        if of.asks_now():
            began, passes = pace.time.monotonic(), of.passes()
            clock(round_s)
            of.asked(began, passes)
            count += 1
    return count


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
    call_s: float, round_s: float, deadline_s: float | None, wanted: int, clock: Callable[[float], None]
) -> None:
    assert asked(Pace(deadline_s), clock, 100, call_s, round_s) == pytest.approx(wanted, abs=2)


def test_after_one_long_call_no_call_passes(clock: Callable[[float], None]) -> None:
    found = Pace(None)
    asked(found, clock, 50, 0.001)
    asked(found, clock, 1, 60.0)
    assert asked(found, clock, 32, 0.001) >= 1
    assert asked(found, clock, 50, 0.001) == 50, "the next call may be as long"


def test_the_guard_uses_no_private_fields_of_the_manager() -> None:
    texts = [path.read_text() for path in Path(preemption.__path__[0]).glob("*.py")]
    assert len(texts) > 1
    assert not [found for text in texts for found in re.findall(r"manager\._\w+", text)]
