"""Seats at a store that has outlived other processes: nobody takes a dead rank's word for an answer."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import AgreementError
from mcore_ckpt.ranks.key_value_store import WaitLimit, poll
from mcore_ckpt.ranks.meeting import rendezvous_at
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from tests.ranks.test_rounds import LONG_S, SHORT_S, messages, together

WORLD = 3
NAME = "mcore_ckpt/actor"


@pytest.fixture
def store() -> Any:
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def seats(store: Any, timeout_s: float = LONG_S) -> list[Callable[[], Agreement]]:
    """Each rank's, with a client of its own, as processes of one life take them."""
    clients = [store.clone() for _ in range(WORLD)]
    return [
        lambda rank=rank: rendezvous_at(clients[rank], rank, WORLD, NAME, timeout_s, "taking a seat")  # type: ignore[misc]
        for rank in range(WORLD)
    ]


def say(seat: Agreement, word: str) -> Record:
    return decide(seat, "a round", lambda: {"rank": seat.rank, "word": word}, lambda records: {"all": list(records)})


def said(word: str) -> list[Record]:
    """What each rank must hear."""
    return [{"all": [{"rank": rank, "word": word} for rank in range(WORLD)]}] * WORLD


def test_a_life_after_another_hears_its_own_words(store: Any) -> None:
    """As `torchrun --max-restarts` starts the workers anew, which take the same seats in the same order."""
    for life in ("first", "second", "third"):
        for manager in range(2):
            taken = together(seats(store))
            for number in range(3):
                word = f"{life} life, manager {manager}, round {number}"
                assert together([lambda seat=seat, word=word: say(seat, word) for seat in taken]) == said(word)  # type: ignore[misc]


@pytest.mark.parametrize("first", range(WORLD))
def test_whoever_comes_first_waits_for_those_of_its_own_life(store: Any, first: int) -> None:
    """Before rank 0 calls, what is there is a dead one's call, and all that was answered to it."""
    together(seats(store))
    taking = seats(store)
    taken: list[Any] = [None] * WORLD

    def take(rank: int) -> None:
        taken[rank] = taking[rank]()

    ahead = threading.Thread(target=take, args=(first,), daemon=True)
    ahead.start()
    ahead.join(SHORT_S)
    assert ahead.is_alive()
    together([lambda rank=rank: take(rank) for rank in range(WORLD) if rank != first])  # type: ignore[misc]
    ahead.join(LONG_S)
    assert together([lambda seat=seat: say(seat, "hello") for seat in taken]) == said("hello")  # type: ignore[misc]


def test_a_rank_that_does_not_come_is_named_and_can_come_the_next_time(store: Any) -> None:
    without_one = together(seats(store, SHORT_S)[:-1])
    assert "no word from rank 2 within 0.5 s" in messages(without_one[:1], AgreementError)[0]
    assert "rank 1 waited 0.75 s for rank 0" in messages(without_one[1:], AgreementError)[0]
    without_zero = together(seats(store, SHORT_S)[1:])
    messages(without_zero, AgreementError)
    taken = together(seats(store))
    assert together([lambda seat=seat: say(seat, "hello") for seat in taken]) == said("hello")  # type: ignore[misc]


def test_seats_taken_at_once_one_after_the_other_are_the_same_ones_on_all_ranks(store: Any) -> None:
    """Rank 0 has called for the next when another rank has not yet seen that it was heard."""

    def many(rank: int) -> list[Agreement]:
        client = store.clone()
        return [rendezvous_at(client, rank, WORLD, NAME, LONG_S, "taking a seat") for _ in range(50)]

    taken = together([lambda rank=rank: many(rank) for rank in range(WORLD)])  # type: ignore[misc]
    names = [[seat._namespace for seat in of_rank] for of_rank in taken]
    assert names[0] == names[1] == names[2]
    assert len({*names[0]}) == 50


def test_a_rank_alone_waits_for_nobody(store: Any) -> None:
    seat = rendezvous_at(store.clone(), 0, 1, NAME, LONG_S, "taking a seat")
    assert decide(seat, "a round", lambda: {"a": 1}, lambda records: {"all": list(records)}) == {"all": [{"a": 1}]}


@pytest.mark.parametrize("rank_0_is_late", [False, True])
def test_what_was_said_to_take_seats_is_deleted(store: Any, rank_0_is_late: bool) -> None:
    """Also what a rank answered to a dead rank 0 before the new one called."""
    together(seats(store))
    count = store.num_keys()
    for _ in range(3):
        first, *others = seats(store)
        if rank_0_is_late:
            store.set(f"{NAME}/call", "of a dead one")

        def take_first(first: Callable[[], Agreement] = first) -> Agreement:
            assert not rank_0_is_late or answered(store, count + WORLD)
            return first()

        taken = together([take_first, *others])
        assert all(isinstance(seat, Agreement) for seat in taken)
        assert store.num_keys() == count


def answered(store: Any, keys: int) -> bool:
    """True once the store has as many keys, and False if it does not get them."""
    return poll(lambda: store.num_keys() == keys, WORLD, time.monotonic() + LONG_S, WaitLimit())
