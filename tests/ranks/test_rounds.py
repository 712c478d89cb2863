"""One round of ranks over a real key-value store: one outcome for all, by the deadline."""

import errno
import functools
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from mcore_ckpt.errors import AgreementError, CheckpointCorruptError, CheckpointError, CommitError, UnsupportedError
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.key_value_store import WaitLimit, all_there
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, missing, same_everywhere
from tests.support.rank_threads import SLACK_S, on_threads
from tests.support.waiting import LONG_S

LOCALHOST = "127.0.0.1"
WORLD = 3
TOPIC = "saving step 7"

# For rounds in which somebody is.
SHORT_S = 0.5


Seats = Callable[[float], list[Agreement]]


@pytest.fixture(params=["hash", "tcp"])
def seats(request: pytest.FixtureRequest) -> Iterator[Seats]:
    """The ranks' seats, each with a client of its own of one store."""
    # The name keeps the host alive: with it the store would go.
    host: Any = dist.HashStore()  # type: ignore[attr-defined]
    stores: list[Any] = [host] * WORLD
    if request.param == "tcp":
        host = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        stores = [host.clone() for _ in range(WORLD)]
    yield lambda timeout_s: [Agreement(stores[rank], rank, WORLD, "test", timeout_s) for rank in range(WORLD)]
    del host


# For tests that wait for a deadline or send much: in CI over TCP alone, as ranks of several processes talk. The others
# run over both stores.
mostly_tcp = pytest.mark.parametrize("seats", ["tcp", pytest.param("hash", marks=pytest.mark.full)], indirect=True)


def together(parts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Each rank's part in a thread of its own: its result or what it raised."""
    results = on_threads(dict(enumerate(parts)))
    return [results[rank] for rank in range(len(parts))]


def round_of(
    agreements: Sequence[Agreement],
    work: Callable[[int], Record],
    combine: Callable[[Sequence[Record]], Record] = lambda records: {"all": list(records)},
    error: type[CheckpointError] = CommitError,
    act: Callable[[], None] | None = None,
) -> list[Any]:
    def part(agreement: Agreement) -> Callable[[], Record]:
        return lambda: decide(agreement, TOPIC, lambda: work(agreement.rank), combine, error, act)

    return together([part(agreement) for agreement in agreements])


def raising(rank: int, error: Exception) -> Callable[[int], Record]:
    def work(at: int) -> Record:
        if at == rank:
            raise error
        return {}

    return work


def messages(results: Sequence[Any], kind: type[CheckpointError]) -> list[str]:
    """What the ranks raised, if all raised exactly this type."""
    assert [type(result) for result in results] == [kind] * len(results), results
    return [str(result) for result in results]


def test_all_get_what_rank_0_made_of_all_records(seats: Seats) -> None:
    results = round_of(seats(LONG_S), lambda rank: {"rank": rank, "text": "ä\n"})
    assert results == [{"all": [{"rank": rank, "text": "ä\n"} for rank in range(WORLD)]}] * WORLD


def add(number: int, rank: int) -> Record:
    return {"sum": number + rank}


def test_rounds_follow_each_other(seats: Seats) -> None:
    agreements = seats(LONG_S)
    for number in range(6):
        results = round_of(agreements, functools.partial(add, number))
        assert results == [{"all": [{"sum": rank + number} for rank in range(WORLD)]}] * WORLD


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("kind", [CommitError, UnsupportedError, CheckpointCorruptError])
def test_a_rank_s_error_is_everybody_s(seats: Seats, rank: int, kind: type[CheckpointError]) -> None:
    results = round_of(seats(LONG_S), raising(rank, kind("a/b.pt: is bad")), error=AgreementError)
    assert messages(results, kind) == [f"rank {rank}: a/b.pt: is bad"] * WORLD


def test_an_error_is_named_once_through_two_rounds(seats: Seats) -> None:
    """An error that came from one round and fails the next has its rank already."""
    agreements = seats(LONG_S)
    first = round_of(agreements, raising(1, CommitError("is bad")))
    again = round_of(agreements, raising(0, first[0]))
    assert messages(again, CommitError) == ["rank 1: is bad"] * WORLD


def test_an_error_of_rank_0_s_own_part(seats: Seats) -> None:
    def combine(records: Sequence[Record]) -> Record:
        return same_everywhere(records, "the folder", CommitError)

    results = round_of(seats(LONG_S), lambda rank: {"at": "a" if rank < 2 else "b"}, combine)
    for message in messages(results, CommitError):
        assert "rank 2 has {'at': 'b'}" in message
        assert "rank 0: rank" not in message


def test_an_error_while_acting(seats: Seats) -> None:
    """After the claim nobody can have given up: the others wait for this word."""

    def act() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "x")

    for message in messages(round_of(seats(LONG_S), lambda rank: {}, act=act), CommitError):
        assert "rank 0: OSError" in message
        assert os.strerror(errno.EIO) in message


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", [CommitError, AgreementError])
def test_foreign_errors_become_the_default(seats: Seats, rank: int, kind: type[CheckpointError]) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.pt")
    results = round_of(seats(LONG_S), raising(rank, error), error=kind)
    assert len(set(messages(results, kind))) == 1
    assert str(results[1]) == f"rank {rank}: OSError: {error}"
    # Where it happened, the traceback leads to it.
    assert results[rank].__cause__ is error


def test_two_failed_ranks_are_counted(seats: Seats) -> None:
    def work(rank: int) -> Record:
        if rank:
            raise CommitError(f"bad {rank}")
        return {}

    assert messages(round_of(seats(LONG_S), work), CommitError) == ["rank 1: bad 1 (1 more failed too)"] * WORLD


@mostly_tcp
@pytest.mark.parametrize("kind", [CommitError, AgreementError])
def test_a_silent_rank_is_named_by_the_deadline(seats: Seats, kind: type[CheckpointError]) -> None:
    """All that speak must say who does not: on a rank that only says that rank 0 is silent, a person looks there."""
    started = time.monotonic()
    results = round_of(seats(SHORT_S)[:2], lambda rank: {}, error=kind)
    assert time.monotonic() - started < 2 * SHORT_S + SLACK_S
    for message in messages(results, kind):
        assert "no word from rank 2" in message, message
        assert TOPIC in message


@mostly_tcp
def test_a_silent_rank_is_named_even_if_rank_0_is_slow(seats: Seats) -> None:
    """Rank 0 may have more to write than others, whose deadline passes first: the store knows who has spoken."""
    agreements = seats(SHORT_S)
    busy = threading.Event()

    def work(rank: int) -> Record:
        if rank == 0:
            busy.wait(0.8 * SHORT_S)
        return {}

    for message in messages(round_of(agreements[:2], work), CommitError):
        assert "rank 2" in message, message


@mostly_tcp
def test_a_silent_rank_0_is_named_by_the_deadline(seats: Seats) -> None:
    started = time.monotonic()
    results = round_of(seats(SHORT_S)[1:], lambda rank: {})
    assert time.monotonic() - started < 2 * SHORT_S + SLACK_S
    for message in messages(results, CommitError):
        assert "for rank 0" in message


@pytest.mark.parametrize("timeout_s", [0.5, 4.0, 600.0])
def test_who_is_not_rank_0_waits_two_seconds_longer_at_most(timeout_s: float) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    started = time.monotonic()
    deadlines = [Agreement(store, rank, WORLD, "test", timeout_s).begin(TOPIC)._deadline for rank in range(WORLD)]
    assert deadlines[0] - started == pytest.approx(timeout_s, abs=0.1)
    assert deadlines[0] < deadlines[1] < deadlines[0] + 2.0


@mostly_tcp
def test_the_deadline_starts_after_a_rank_s_own_work(seats: Seats) -> None:
    """Writing may take longer than any wait: a slow rank must not find its own deadline over."""
    agreements = seats(SHORT_S)
    busy = threading.Event()

    def work(rank: int) -> Record:
        # All are as slow as each other, so nobody waits for long.
        busy.wait(2 * SHORT_S)
        return {"rank": rank}

    results = round_of(agreements, work)
    assert results == [{"all": [{"rank": rank} for rank in range(WORLD)]}] * WORLD


@mostly_tcp
def test_a_rank_that_gave_up_prevents_the_act(seats: Seats) -> None:
    """Rank 0 comes to the claim when another has left: it must not rename what the other takes for failed."""
    agreements = seats(SHORT_S)
    gone = threading.Event()
    acted: list[bool] = []

    def combine(records: Sequence[Record]) -> Record:
        assert gone.wait(LONG_S)
        return {}

    def rank_0() -> Record:
        return decide(agreements[0], TOPIC, dict, combine, CommitError, lambda: acted.append(True))

    def rank_1() -> Record:
        try:
            return decide(agreements[1], TOPIC, dict, combine, CommitError)
        finally:
            gone.set()

    def rank_2() -> Record:
        return decide(agreements[2], TOPIC, dict, combine, CommitError)

    messages(together([rank_0, rank_1, rank_2]), CommitError)
    assert acted == []


@mostly_tcp
@pytest.mark.parametrize("where", ["work", "combine", "act"])
def test_rank_0_that_fails_after_others_gave_up_raises_what_they_raise(seats: Seats, where: str) -> None:
    """With another type it would go on to an older checkpoint, say, alone."""
    agreements = seats(SHORT_S)
    gone = [threading.Event() for _ in agreements[1:]]

    def fail() -> None:
        for rank in gone:
            assert rank.wait(LONG_S)
        raise CheckpointCorruptError("is bad")

    def part(agreement: Agreement) -> Record:
        if agreement.rank > 0:
            try:
                return decide(agreement, TOPIC, dict, lambda records: {}, CommitError)
            finally:
                gone[agreement.rank - 1].set()
        return decide(
            agreement,
            TOPIC,
            lambda: fail() or {} if where == "work" else {},
            lambda records: fail() or {} if where == "combine" else {},
            CommitError,
            fail if where == "act" else None,
        )

    results = together([functools.partial(part, agreement) for agreement in agreements])
    if where == "act":
        # Claimed, it is rank 0's to say what has come of it; the others give up after one more deadline.
        messages(results[1:], CommitError)
        assert "is bad" in str(results[0])
        return
    assert "rank 0, which is dead or stuck" in messages(results, CommitError)[0]


@mostly_tcp
def test_who_waits_for_another_is_not_the_one_to_look_at(seats: Seats) -> None:
    """Rank 0 takes a part from rank 2, which is dead, and has not submitted when rank 1 gives up."""
    rank_0, rank_1, _ = seats(2 * SHORT_S)[0], *seats(SHORT_S)[1:]
    taking = threading.Event()

    def take() -> Record:
        taking.set()
        return rank_0.take("a part", 2)

    def late() -> Record:
        assert taking.wait(LONG_S)
        return decide(rank_1, TOPIC, dict, dict, CommitError)

    results = together([lambda: decide(rank_0, TOPIC, take, dict, CommitError), late])
    assert "no word from rank 2" in str(results[1])


@mostly_tcp
@pytest.mark.parametrize(("hurried", "dead"), [(0, 2), (1, 2), (1, 0)])
def test_if_one_rank_has_no_time_nobody_waits_longer_than_that_rank(seats: Seats, hurried: int, dead: int) -> None:
    """The machine of one rank goes soon, and another rank is dead. The third rank knows of neither."""
    agreements = seats(LONG_S)
    agreements[hurried].limit_waits(SHORT_S)
    started = time.monotonic()
    found = messages(round_of([each for each in agreements if each.rank != dead], lambda rank: {}), CommitError)
    assert time.monotonic() - started < SHORT_S + SLACK_S
    for message in found:
        if dead == 0:
            assert "rank 1 waited 0.5 s for rank 0, and has no time left" in message
        else:
            assert re.search(r"no word from rank 2 within 0\.[235] s, and a rank that waits has no time left", message)
    # The dead rank was only slow: it hears of the failure, and the next round is as usual.
    messages(round_of([agreements[dead]], lambda rank: {}), CommitError)
    agreements[hurried]._limit.at = math.inf
    everyone = {"all": [{"rank": rank} for rank in range(WORLD)]}
    assert round_of(agreements, lambda rank: {"rank": rank}) == [everyone] * WORLD


@pytest.fixture
def short_waits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "SHORTEST_WAIT_S", 0.0)


@mostly_tcp
def test_a_round_does_not_begin_to_wait_again_when_the_time_is_over(seats: Seats, short_waits_count: None) -> None:
    """Rank 1, whose machine goes soon, waits for the part of a dead rank, and then for the outcome."""
    rank_0, rank_1, _ = seats(LONG_S)
    rank_1.limit_waits(SHORT_S, even_later=False)
    started = time.monotonic()
    works: dict[Agreement, Callable[[], Record]] = {rank_0: dict, rank_1: lambda: rank_1.take("a part", 2)}
    results = together([functools.partial(decide, each, TOPIC, work, dict) for each, work in works.items()])
    assert time.monotonic() - started < SHORT_S + SLACK_S
    for message in messages(results, CommitError):
        assert "a part: no word from rank 2 within 0.5 s, and a rank that waits has no time left" in message
    started = time.monotonic()
    rank_1._timeout_s = 2 * SHORT_S
    messages(round_of([rank_1], lambda rank: {}), CommitError)
    assert time.monotonic() - started > 2 * SHORT_S, "the machine is still there"


@mostly_tcp
def test_a_round_ends_when_the_time_is_over_while_this_rank_waits_for_another_node(
    seats: Seats, short_waits_count: None
) -> None:
    rank_1 = seats(LONG_S)[1]
    rank_1.limit_waits(SHORT_S, even_later=False)

    def work() -> Record:
        with rank_1.limited(LONG_S) as seconds:
            assert not threading.Event().wait(seconds)
        raise CommitError("the other node is silent")

    started = time.monotonic()
    with pytest.raises(CommitError, match="the other node is silent"):
        decide(rank_1, TOPIC, work, dict)
    assert time.monotonic() - started < SHORT_S + SLACK_S


@mostly_tcp
def test_a_wait_that_ended_well_does_not_make_the_next_one_an_early_one(seats: Seats, short_waits_count: None) -> None:
    """Rank 1 writes until the machine should be gone, after a round of all ranks for an export."""
    agreements = seats(LONG_S)
    agreements[1].limit_waits(SHORT_S, even_later=False)
    written = threading.Event()

    def part(agreement: Agreement) -> Record:
        def work() -> Record:
            decide(agreement, "exporting", dict, lambda records: {})
            if agreement.rank == 1:
                written.wait(1.2 * SHORT_S)
            return {}

        return decide(agreement, TOPIC, work, lambda records: {})

    assert together([functools.partial(part, each) for each in agreements]) == [{}] * WORLD


def test_a_later_request_counts_if_the_machine_has_outlived_the_first(seats: Seats) -> None:
    limit = seats(LONG_S)[1]
    limit.limit_waits(100.0, even_later=False)
    limit.limit_waits(200.0, even_later=False)
    assert limit.shortened(1000.0) == pytest.approx(100.0, abs=SLACK_S)
    limit.limit_waits(-1.0, even_later=False)
    assert limit.shortened(1000.0) == 1000.0
    limit.limit_waits(200.0, even_later=False)
    assert limit.shortened(1000.0) == pytest.approx(200.0, abs=SLACK_S)


@mostly_tcp
def test_a_round_around_another_ends_with_it_when_the_time_is_over(seats: Seats, short_waits_count: None) -> None:
    rank_1 = seats(LONG_S)[1]
    rank_1.limit_waits(SHORT_S, even_later=False)

    def inner() -> Record:
        return decide(rank_1, "exporting", dict, dict)

    started = time.monotonic()
    with pytest.raises(AgreementError, match=r"exporting: rank 1 waited 0\.5 s for rank 0, and has no time left"):
        decide(rank_1, TOPIC, inner, dict)
    assert time.monotonic() - started < SHORT_S + SLACK_S


@mostly_tcp
def test_who_waits_for_what_rank_0_did_waits_only_once_when_the_time_is_over(
    seats: Seats, short_waits_count: None
) -> None:
    agreements = seats(LONG_S)
    left = threading.Event()

    def part(agreement: Agreement) -> Record:
        if agreement.rank == 0:
            return decide(agreement, TOPIC, dict, lambda records: {}, act=lambda: None if left.wait(LONG_S) else fail())
        agreement.limit_waits(SHORT_S, even_later=False)
        try:
            return decide(agreement, TOPIC, dict, lambda records: {})
        finally:
            if agreement.rank == 1:
                left.set()

    def fail() -> None:
        raise AssertionError("nobody gave up")

    started = time.monotonic()
    results = together([functools.partial(part, each) for each in agreements])
    assert time.monotonic() - started < SHORT_S + SLACK_S
    assert results[0] == {}
    assert "Rank 0 had begun to act, so only the disk shows what it did" in str(results[1])


@mostly_tcp
def test_who_takes_a_part_hears_that_another_rank_has_given_up(seats: Seats) -> None:
    rank_0, rank_1, _ = seats(LONG_S)
    rank_1.limit_waits(SHORT_S)
    take = functools.partial(rank_0.take, "a part", 2)
    started = time.monotonic()
    results = together(
        [functools.partial(decide, each, TOPIC, work, dict) for each, work in ((rank_0, take), (rank_1, dict))]
    )
    assert time.monotonic() - started < SHORT_S + SLACK_S
    assert "no word from rank 2" in messages(results, AgreementError)[1]


def test_a_wait_that_begins_after_the_expected_end_is_not_limited() -> None:
    """The machine is still there, so the time that was given for it was too short."""
    limit = WaitLimit()
    assert limit.end_of(began=7.0) == math.inf
    limit.expected_at = 10.0
    assert [limit.end_of(began) for began in (0.0, 8.9, 9.1, 11.0)] == [10.0, 10.0, math.inf, math.inf]
    limit.at = 12.0
    assert [limit.end_of(began) for began in (0.0, 9.1, 11.0)] == [10.0, 12.0, 12.0]


def test_parts_are_taken_until_one_deadline(seats: Seats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of the round give up when it has passed once."""
    seat = seats(LONG_S)[0]
    deadlines = []

    def never(ready: Any, world_size: int, deadline: float, limit: Any) -> bool:
        deadlines.append(deadline)
        return False

    monkeypatch.setattr("mcore_ckpt.ranks.one_round.poll", never)
    monkeypatch.setattr("mcore_ckpt.ranks.one_round.Round.cut", lambda self: None)
    for _ in range(2):
        seat.begin(TOPIC)
        for rank in (1, 2):
            with pytest.raises(CommitError, match="no word from rank"):
                seat.take("a part", rank)
    assert deadlines[0] == deadlines[1] < deadlines[2] == deadlines[3]


@pytest.mark.parametrize("where", ["work", "combine"])
def test_what_cannot_be_sent_is_an_error_of_all(seats: Seats, where: str) -> None:
    """At once: who has heard that rank 0 goes on would wait for its word."""
    bad = {"loss": float("nan")}
    work = (lambda rank: bad if rank == 1 else {}) if where == "work" else (lambda rank: {})
    results = round_of(seats(LONG_S), work, (lambda records: bad) if where == "combine" else (lambda records: {}))
    assert f"rank {int(where == 'work')}: ValueError" in messages(results, CommitError)[0]


@mostly_tcp
def test_words_longer_than_the_store_takes_come_through(seats: Seats) -> None:
    """The names of all tensors of a mixture of experts. torch's store hangs up on who sends more than 8 MiB at once."""
    names = [f"model.layers.{number % 61}.mlp.experts.{number}.down_proj.weight" for number in range(180_000)]

    def part(agreement: Agreement) -> Record:
        def work() -> Record:
            if agreement.rank == 1:
                agreement.give("a part", {"names": names})
            return {"names": names if agreement.rank == 2 else agreement.take("a part", 1)["names"][:1]}

        return decide(agreement, TOPIC, work, lambda records: records[2], CommitError)

    agreements = seats(LONG_S)
    assert together([functools.partial(part, agreement) for agreement in agreements]) == [{"names": names}] * WORLD


@mostly_tcp
def test_what_is_too_long_for_the_store_is_an_error_of_all(seats: Seats) -> None:
    noise = random.Random(1).randbytes(9 << 20).hex()
    results = round_of(seats(LONG_S), lambda rank: {"noise": noise} if rank == 1 else {})
    assert "rank 1: ValueError: a message of 18874380 bytes" in messages(results, CommitError)[0]


def test_an_error_that_names_a_file_whose_name_is_no_text(seats: Seats) -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file", os.fsdecode(b"/data/\xff.pt"))
    assert "\\udcff.pt" in messages(round_of(seats(LONG_S), raising(1, error)), CommitError)[0]


@given(st.sets(st.integers(0, 4095), max_size=5))
@example(set(range(300)))
def test_few_questions_find_who_is_missing(gone: set[int]) -> None:
    """Thousands of ranks ask at once, of thousands."""
    keys = [f"rank/{rank}" for rank in range(4096)]
    there, asked = {*keys} - {keys[rank] for rank in gone}, []

    class Store:
        def check(self, wanted: list[str]) -> bool:
            asked.append(wanted)
            return there.issuperset(wanted)

    assert missing(Store(), keys) == [keys[rank] for rank in sorted(gone)]
    assert len(asked) <= 1 + 2 * 12 * len(gone)


def test_keys_that_were_there_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for thousands of keys at each poll would hold up the training of rank 0."""
    monkeypatch.setattr(deadlines, "RANKS_AT_ONCE", 2)
    there, asked, found = {"a", "b", "c"}, [], []

    class Store:
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            return there.issuperset(keys)

    ready = all_there(Store(), list("abcde"), found.extend)
    assert not ready()
    assert asked == [["a", "b"], ["c", "d"]]
    there.update("de")
    assert ready()
    assert asked[2:] == [["c", "d"], ["e"]]
    assert found == list("abcde")
    assert ready()
    assert len(asked) == 4


@mostly_tcp
def test_a_claim_then_silence(seats: Seats) -> None:
    """Rank 0 died while it acted: the others give it one deadline more, then say so, and never settle it themselves."""
    agreements = seats(SHORT_S)

    def rank_0() -> None:
        round_ = agreements[0].begin(TOPIC)
        round_.submit({})
        round_.collect(CommitError)
        round_.claim(CommitError)

    def other(rank: int) -> Callable[[], Record]:
        return lambda: decide(agreements[rank], TOPIC, dict, lambda records: {}, CommitError)

    started = time.monotonic()
    results = together([rank_0, other(1), other(2)])
    took = time.monotonic() - started
    assert 2 * SHORT_S <= took < 3 * SHORT_S + SLACK_S
    for message in messages(results[1:], CommitError):
        assert "Rank 0 had begun to act" in message


@mostly_tcp
def test_word_that_comes_in_the_second_deadline(seats: Seats) -> None:
    """Between claim and word rank 0 may take longer than one deadline: a slow rename is not a failed save."""
    deadline_s = 1.0
    agreements = seats(deadline_s)
    late = threading.Event()

    def act() -> None:
        late.wait(1.75 * deadline_s)

    assert round_of(agreements, lambda rank: {}, lambda records: {"ok": 1}, act=act) == [{"ok": 1}] * WORLD


def test_keys_of_old_rounds_are_deleted(seats: Seats) -> None:
    agreements = seats(LONG_S)
    store = agreements[0]._store
    before = store.num_keys()
    counts = []
    for _ in range(10):
        round_of(agreements, lambda rank: {})
        counts.append(store.num_keys() - before)
    # Two rounds of WORLD submissions, an outcome and a word.
    assert counts[-1] == counts[3] <= 2 * (WORLD + 2)


def test_keys_of_failed_rounds_are_deleted(seats: Seats) -> None:
    agreements = seats(LONG_S)
    store = agreements[0]._store
    before = store.num_keys()
    for rank in range(6):
        round_of(agreements, raising(rank % WORLD, CommitError("bad")))
    assert store.num_keys() - before <= 2 * (WORLD + 2)


@mostly_tcp
def test_a_round_after_a_failed_one(seats: Seats) -> None:
    """Training goes on after a failed save, and so do rounds, even if a rank came to the failed one too late."""
    agreements = seats(SHORT_S)
    round_of(agreements[:2], lambda rank: {})
    late = together([lambda: decide(agreements[2], TOPIC, dict, lambda records: {}, CommitError)])
    messages(late, CommitError)
    assert round_of(agreements, lambda rank: {"rank": rank})[2] == {"all": [{"rank": rank} for rank in range(WORLD)]}


def test_who_comes_late_to_several_failed_rounds_hears_of_each(seats: Seats) -> None:
    """Rank 0 fails at once and goes on, again and again, before the others have come or while they still listen."""
    agreements = seats(SHORT_S)
    store = agreements[0]._store
    before = store.num_keys()
    good = functools.partial(round_of, agreements, lambda rank: {"rank": rank})
    good()
    reasons = [f"bad argument {number}" for number in range(5)]
    for reason in reasons:
        agreements[0].fail_next_round(TOPIC, CommitError(reason))
    for reason in reasons:
        late = together([functools.partial(decide, a, TOPIC, dict, dict, CommitError) for a in agreements[1:]])
        assert messages(late, CommitError) == [f"rank 0: {reason}"] * (WORLD - 1)
    for _ in range(2):
        assert good() == [{"all": [{"rank": rank} for rank in range(WORLD)]}] * WORLD
    # And is then forgotten, as any round is.
    assert store.num_keys() - before <= 2 * (WORLD + 2)


@pytest.mark.parametrize("namespaces", [("a", "b"), ("a", "a/1")])
def test_namespaces_do_not_meet(namespaces: tuple[str, str]) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    groups = [[Agreement(store, rank, WORLD, namespace, LONG_S) for rank in range(WORLD)] for namespace in namespaces]
    for number, agreements in enumerate(groups):
        results = round_of(agreements, functools.partial(add, number))
        assert results == [{"all": [{"sum": rank + number} for rank in range(WORLD)]}] * WORLD


@pytest.mark.parametrize("kind", [CommitError, AgreementError])
def test_a_lost_store_is_an_error_of_ours(kind: type[CheckpointError]) -> None:
    class Lost:
        """As a TCPStore is when its host has died (seen with real ones in test_crash.py)."""

        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("Connection reset by peer")

    for rank in range(2):
        seat = Agreement(Lost(), rank, 2, "x", LONG_S)
        (result,) = together([functools.partial(decide, seat, TOPIC, dict, lambda records: {}, kind)])
        assert type(result) is kind
        assert "the key-value store is gone" in str(result)
