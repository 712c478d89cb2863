"""When a save is due: against a model that remembers all, with a clock in hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.errors import AgreementError, CheckpointError
from mcore_ckpt.ranks.rounds import Agreement, agree
from mcore_ckpt.schedule import Frequency, RoleSchedules, Schedule


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


COUNTS = st.none() | st.integers(1, 5)
FREQUENCIES = st.builds(Frequency, COUNTS, COUNTS, st.none() | st.integers(1, 50))
# (an epoch ends, seconds since the step before, the process is started anew before it and is away so long)
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.none() | st.integers(0, 10_000)), max_size=60)


@given(FREQUENCIES, STEPS)
def test_any_fires_and_a_restart_changes_nothing(frequency: Frequency, steps: list[tuple[bool, int, Any]]) -> None:
    clock = Clock()
    schedule = Schedule(frequency, clock)
    epochs = number = seconds = 0
    for ends_epoch, passed, away in steps:
        if away is not None:
            state = json.loads(json.dumps(schedule.state_dict()))
            clock = Clock(away)  # another machine's
            schedule = Schedule(frequency, clock)
            schedule.load_state_dict(state)
        clock.now += passed
        epochs, number, seconds = epochs + ends_epoch, number + 1, seconds + passed
        reasons = (
            frequency.epochs is not None and epochs >= frequency.epochs,
            frequency.steps is not None and number >= frequency.steps,
            frequency.secs is not None and seconds >= frequency.secs,
        )
        assert schedule.due(int(ends_epoch)) == any(reasons)
        epochs, number, seconds = (
            0 if fired else count for count, fired in zip((epochs, number, seconds), reasons, strict=True)
        )


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 8))
def test_a_changed_frequency_wins_over_the_saved_one(before: int, after: int, done: int) -> None:
    old = Schedule(Frequency(steps=before))
    for _ in range(done):
        old.due()
    new = Schedule(Frequency(steps=after))
    new.load_state_dict(old.state_dict())
    waited = done % before
    wanted = max(1, after - waited)
    assert [new.due() for _ in range(wanted)] == [False] * (wanted - 1) + [True]
    # From there on it is the new one alone.
    assert [new.due() for _ in range(after)] == [False] * (after - 1) + [True]


def test_downtime_is_no_time_of_training() -> None:
    clock = Clock(50.0)
    schedule = Schedule(Frequency(secs=100), clock)
    clock.now = 110.0
    assert not schedule.due()
    state = schedule.state_dict()
    later = Clock(1_000_000.0)
    resumed = Schedule(Frequency(secs=100), later)
    later.now += 5.0  # loading
    resumed.load_state_dict(state)
    later.now += 39.0
    assert not resumed.due()
    later.now += 1.0
    assert resumed.due()
    assert not resumed.due()


def test_roles_count_apart() -> None:
    clock = Clock()
    schedules = RoleSchedules(Frequency(steps=2), clock)
    found = [(schedules.due("actor"), schedules.due("critic")) for _ in range(4)]
    assert found == [(False, False), (True, True), (False, False), (True, True)]
    schedules.due("actor")
    resumed = RoleSchedules(Frequency(steps=2), clock)
    resumed.load_state_dict(json.loads(json.dumps(schedules.state_dict())))
    assert resumed.due("actor")
    assert not resumed.due("critic")


def test_a_role_that_comes_late_has_waited_as_long() -> None:
    clock = Clock()
    schedules = RoleSchedules(Frequency(secs=10), clock)
    clock.now += 10.0
    assert schedules.due("critic")


class Handle:
    """A save: skipped or refused, under way, or done; with a fast tier, its copies may follow later."""

    def __init__(self, has_begun: bool = True, done: bool = True, copied: bool | None = None) -> None:
        self.has_begun, self.done = has_begun, done
        self.copies = None if copied is None else Handle(done=copied)


def test_minutes_are_seconds() -> None:
    clock = Clock()
    schedule = Schedule(Frequency(minutes=2), clock)
    clock.now += 119.0
    assert not schedule.due()
    clock.now += 1.0
    assert [schedule.due(), schedule.due()] == [True, False]
    with pytest.raises(ValueError, match="freq_secs is 5 and freq_minutes is 1"):
        Frequency(secs=5, minutes=1)


@pytest.mark.parametrize("handle", [Handle(has_begun=False), None])
def test_a_save_that_was_not_made_is_due_again(handle: Any) -> None:
    clock = Clock()
    schedule = Schedule(Frequency(steps=3, secs=100), clock)
    assert [schedule.due() for _ in range(3)] == [False, False, True]
    schedule.saved(handle)
    assert schedule.due()
    schedule.saved(Handle())
    assert [schedule.due() for _ in range(3)] == [False, False, True]
    clock.now += 100.0
    assert schedule.due()
    schedule.saved(handle)
    assert schedule.due()
    state = schedule.state_dict()
    schedule.saved(Handle())
    assert schedule.state_dict() == state


def test_a_continuous_schedule_saves_when_the_last_save_is_done() -> None:
    schedule = Schedule(Frequency(continuous=True))
    assert schedule.due()
    under_way = Handle(done=False, copied=False)
    schedule.saved(under_way)
    assert not schedule.due()
    under_way.done = True
    assert not schedule.due()
    assert under_way.copies is not None
    under_way.copies.done = True
    assert schedule.due()
    schedule.saved(Handle(has_begun=False))
    assert schedule.due()
    roles = RoleSchedules(Frequency(continuous=True))
    roles.saved("actor", Handle(done=False))
    assert [roles.due("actor"), roles.due("critic")] == [False, True]


def test_the_ranks_agree_on_when_the_last_save_is_done() -> None:
    def work(seat: Agreement) -> list[bool]:
        schedule = Schedule(Frequency(continuous=True))
        schedule.saved(Handle(done=seat.rank == 0))  # rank 1 has not heard of the commit yet
        return [schedule.due(agree=lambda topic, request, answer: agree(seat, topic, request, answer))]

    assert on_ranks(work) == [[True], [True]]


@pytest.mark.parametrize("arguments", [(0,), (None, -1), (None, None, 0), (True,), (1.5,), (None, None, float("nan"))])
def test_a_frequency_that_is_none(arguments: Any) -> None:
    with pytest.raises(ValueError, match="freq_"):
        Frequency(*arguments)


@pytest.mark.parametrize(
    "state",
    [{}, {"epochs": 1, "steps": 1}, {"epochs": -1, "steps": 0, "secs": 0.0}, {"epochs": 0, "steps": 0, "secs": "1"}],
)
def test_a_state_that_is_none_changes_nothing(state: dict[str, Any]) -> None:
    schedule = Schedule(Frequency(steps=2), Clock())
    schedule.due()
    before = schedule.state_dict()
    with pytest.raises(ValueError, match="not the state of a schedule"):
        schedule.load_state_dict(state)
    assert schedule.state_dict() == before
    with pytest.raises(ValueError, match=r"actor|not the state"):
        RoleSchedules(Frequency()).load_state_dict({"actor": state or 1})


def on_ranks(work: Callable[[Agreement], Any]) -> list[Any]:
    """What `work` returns or raises on each of two ranks."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = work(Agreement(store, rank, 2, "schedule", 20.0))
        except CheckpointError as error:
            results[rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_one_rank_decides_for_all() -> None:
    """Rank 1's clock is far ahead, and alone it would save at every step."""

    def work(seat: Agreement) -> list[bool]:
        clock = Clock()
        schedule = Schedule(Frequency(steps=3, secs=100), clock)

        def together(topic: str, request: dict, answer: Callable[[], dict]) -> dict:
            return agree(seat, topic, request, answer)

        found = []
        for _ in range(6):
            clock.now += 1000.0 if seat.rank else 40.0
            found.append(schedule.due(agree=together))
        return found

    first, second = on_ranks(work)
    assert first == [False, False, True, False, False, True]
    assert second == first


def test_ranks_at_different_steps_are_told() -> None:
    def work(seat: Agreement) -> bool:
        schedule = Schedule(Frequency(steps=3))
        return schedule.due(
            steps=1 + seat.rank, agree=lambda topic, request, answer: agree(seat, topic, request, answer)
        )

    for error in on_ranks(work):
        assert isinstance(error, AgreementError)
        assert "rank 1" in str(error)
