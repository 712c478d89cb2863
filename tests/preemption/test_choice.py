"""What is saved in the time that is left."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt import preemption
from mcore_ckpt.preemption.choice import DURABLE, ON_NODES, Choice, Times, choose, patience_before
from mcore_ckpt.preemption.last_save import _why_not_durable
from mcore_ckpt.ranks import deadlines

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
    ("done", "saved", "how", "is_new", "words"),
    [
        ((False, True), None, ON_NODES, True, "an earlier step is still being copied to the root"),
        ((False, True), ON_NODES, ON_NODES, False, "an earlier step is still being copied to the root"),
        ((False, False), DURABLE, DURABLE, False, ""),
        ((True, False), ON_NODES, ON_NODES, False, "an earlier save of this step is still being copied"),
        ((True, False), None, None, False, "an earlier save of this step is still being copied"),
    ],
)
def test_no_save_is_begun_that_waits_for_copies(
    done: tuple[bool, bool], saved: str | None, how: str | None, is_new: bool, words: str
) -> None:
    assert choose(60.0, FAST, saved, True, True, *done) == Choice(how, is_new, words)


@pytest.mark.parametrize("left_s", [3.0, 30.0, 114.0, math.inf])
@pytest.mark.parametrize(
    "times", [FAST, UNKNOWN, Times(2.0, None, None), Times(None, 10.0, None), Times(2.0, 0.0, None)]
)
def test_after_the_longest_wait_the_step_still_fits_on_the_nodes(left_s: float, times: Times) -> None:
    waited_s = patience_before(left_s, times.durable_s, times.is_known)
    if left_s == math.inf:
        assert waited_s == math.inf
        return
    rest_s = left_s - waited_s - deadlines.EXTRA_WAIT_S  # on rank 0
    assert waited_s == 0.0 or choose(rest_s, times, None, True, True, is_drained=False).how == ON_NODES
    assert times.is_known or waited_s <= left_s / 2, "nobody knows how long the save takes"
    assert waited_s > 0.0 or left_s < 30.0


@pytest.mark.parametrize(
    ("times", "reserve_s"),
    [
        (UNKNOWN, 60.0),
        (ROOT, 12.5),
        (FAST, 15.0),
        (Times(2.0, None, None), 62.5),  # no step was copied yet, and the copy may take much longer than the commit
        (Times(2.0, None, 40.0), 50.0),
        (Times(None, None, 40.0), 50.0),
    ],
)
def test_before_the_end_of_the_time_a_durable_save_fits(times: Times, reserve_s: float) -> None:
    assert times.reserve_s == reserve_s


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
    there: Any = SimpleNamespace(drain=SimpleNamespace(done=True, committed=True, exception=None))
    handle: Any = SimpleNamespace(drain=drain)
    assert reason in _why_not_durable([handle])
    assert reason in _why_not_durable([there, handle]), "the role that is not in the root has the reason"


def test_the_guard_uses_no_private_fields_of_the_manager() -> None:
    texts = [path.read_text() for path in Path(preemption.__path__[0]).glob("*.py")]
    assert len(texts) > 1
    assert not [found for text in texts for found in re.findall(r"manager\._\w+", text)]
