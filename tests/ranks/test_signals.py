"""An exception that a signal handler raises in the midst of a call: this rank gets it, and the others are told at once.

No rank may wait for its deadline: it is far beyond the time that `on_threads` gives the ranks.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CommitError
from mcore_ckpt.interrupts import interrupts_as_themselves, is_interrupt
from mcore_ckpt.ranks.one_round import Round
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from tests.support.rank_threads import on_threads

WORLD = 3
FAR_S = 600.0


class PreemptedError(Exception):
    """What a trainer's handler raises."""


KINDS = [
    PreemptedError("SIGUSR1"),
    TimeoutError("SIGALRM"),
    RuntimeError("SIGTERM"),
    KeyboardInterrupt(),
    SystemExit(3),
]


def interrupt(error: BaseException) -> None:
    """Raises as a handler does that Python calls: with the frame that it has interrupted."""

    def handler(number: int, frame: object) -> None:
        raise error

    handler(signal.SIGUSR1, sys._getframe())


@pytest.fixture
def agreements() -> Iterator[list[Agreement]]:
    host: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield [Agreement(host.clone(), rank, WORLD, "test", FAR_S) for rank in range(WORLD)]
    del host


class Interrupted:
    """In place of a method, on one rank and once: is interrupted before or after the method does its work."""

    def __init__(self, function: Callable[..., Any], rank: int, error: BaseException, is_after: bool) -> None:
        self._function, self._rank, self._error, self._is_after = function, rank, error, is_after
        self.is_over = False

    def __get__(self, owner: Any, kind: type) -> Callable[..., Any]:
        return functools.partial(self, owner)

    def __call__(self, owner: Any, *args: Any) -> Any:
        rank = owner.rank if isinstance(owner, Agreement) else owner._rank
        hits, self.is_over = rank == self._rank and not self.is_over, self.is_over or rank == self._rank
        if hits and not self._is_after:
            interrupt(self._error)
        result = self._function(owner, *args)
        if hits:
            interrupt(self._error)
        return result


def call_of(agreement: Agreement) -> Record:
    """A call of two rounds, of which the second one has a name, as that of a commit."""
    with agreement.call("a call"):
        first = decide(agreement, "first", lambda: {"rank": agreement.rank}, lambda records: {"id": "x"}, CommitError)
        return decide(agreement, "second", dict, lambda records: {"of": first["id"]}, CommitError)


def together(agreements: list[Agreement], call: Callable[[Agreement], Record] = call_of) -> list[Any]:
    results = on_threads({each.rank: functools.partial(call, each) for each in agreements})
    return [results[rank] for rank in range(WORLD)]


PLACES = [
    *((Agreement, "begin", rank) for rank in (0, 1)),
    *((Round, name, rank) for name in ("submit", "_wait") for rank in (0, 1)),
    *((Round, name, 0) for name in ("collect", "claim", "announce")),
    (Round, "outcome", 2),
]


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize(("owner", "method", "rank"), PLACES)
def test_it_comes_out_as_itself_and_the_others_are_told_at_once(
    agreements: list[Agreement],
    owner: type,
    method: str,
    rank: int,
    is_after: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in KINDS:
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, Interrupted(getattr(owner, method), rank, error, is_after))
            results = together(agreements)
        assert results[rank] is error
        for other in {*range(WORLD)} - {rank}:
            assert type(results[other]) is CommitError
            assert f"rank {rank}" in str(results[other])
            assert type(error).__name__ in str(results[other])
        assert together(agreements) == [{"of": "x"}] * WORLD  # all are at the same round again


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("error", KINDS)
def test_it_interrupts_the_work_of_a_rank(agreements: list[Agreement], rank: int, error: BaseException) -> None:
    def part(agreement: Agreement) -> Record:
        def work() -> Record:
            if agreement.rank == rank:
                try:
                    interrupt(error)
                except OSError as failure:  # a TimeoutError is one
                    raise CommitError("the disk has failed") from failure
            return {}

        return decide(agreement, "a round", work, lambda records: {}, CommitError)

    results = together(agreements, part)
    assert results[rank] is error
    assert all(type(results[other]) is CommitError for other in {*range(WORLD)} - {rank})
    assert together(agreements) == [{"of": "x"}] * WORLD


@pytest.mark.parametrize("rank", [0, 1])
def test_between_two_rounds(agreements: list[Agreement], rank: int) -> None:
    error = PreemptedError("between")

    def part(agreement: Agreement) -> Record:
        with agreement.call("a call"):
            decide(agreement, "first", dict, lambda records: {})
            if agreement.rank == rank:
                interrupt(error)
            return decide(agreement, "second", dict, lambda records: {})

    results = together(agreements, part)
    assert results[rank] is error
    assert all(f"rank {rank}: PreemptedError: between" in str(results[other]) for other in {*range(WORLD)} - {rank})
    assert together(agreements) == [{"of": "x"}] * WORLD


def test_after_the_last_round_the_others_have_all_they_want(agreements: list[Agreement]) -> None:
    error = PreemptedError("after")

    def part(agreement: Agreement) -> Record:
        with agreement.call("a call"):
            told = decide(agreement, "first", dict, lambda records: {"all": 1})
            if agreement.rank == 1:
                interrupt(error)
            return told

    assert together(agreements, part) == [{"all": 1}, error, {"all": 1}]
    assert together(agreements) == [{"of": "x"}] * WORLD


def test_what_signal_handlers_raise_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(number: int, frame: object) -> None:
        raise PreemptedError

    def all_in_one(*args: object) -> None:
        plain(*args)  # type: ignore[arg-type]

    before = signal.getsignal(signal.SIGUSR1)
    try:
        for handler in (plain, all_in_one, functools.partial(lambda extra, *args: plain(*args), 1)):
            signal.signal(signal.SIGUSR1, handler)
            with pytest.raises(PreemptedError) as caught:
                os.kill(os.getpid(), signal.SIGUSR1)
            assert is_interrupt(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(PreemptedError) as caught:
        plain(1, None)
    assert not is_interrupt(caught.value)


def save_while_handling() -> None:
    try:
        interrupt(PreemptedError())
    except PreemptedError:
        with interrupts_as_themselves():
            raise CommitError("the disk is full") from None


def test_an_interrupt_that_the_caller_is_handling_is_not_raised_again() -> None:
    """A trainer that saves because it was interrupted is to see why that save has failed."""
    with pytest.raises(CommitError):
        save_while_handling()


def test_a_child_that_is_forked_in_a_round_says_nothing_in_it() -> None:
    """As one that `extra_state` forks, and that ends by an exception through our frames."""
    host: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    parent = os.getpid()

    def work() -> Record:
        pid = os.fork()
        if pid == 0:
            raise SystemExit
        assert os.waitpid(pid, 0)[1] == 0
        return {"work": "done"}

    try:
        result = decide(Agreement(host, 0, 1, "test", FAR_S), "a round", work, lambda records: records[0])
    except SystemExit:
        os._exit(1 if os.getpid() == parent else 0)
    assert result == {"work": "done"}


def test_the_last_rank_that_closes_deletes_what_is_left() -> None:
    host: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    keys = host.num_keys()
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        agreements = [Agreement(host.clone(), rank, WORLD, f"test{order}", FAR_S) for rank in range(WORLD)]
        together(agreements)
        beside = [each.for_thread("more") for each in agreements]
        together(beside)
        agreements[1].fail_next_round("a round that nobody comes to", CommitError("bad"))
        for rank in order:
            agreements[rank].close()
            agreements[rank].close()
            beside[rank].close()
        assert host.num_keys() == keys
