"""How ranks agree: over a key-value store, with a deadline on every wait, never by a collective.

One *round* is: every rank submits its record or its error, rank 0 decides, all get the same outcome. What is decided
is a single key that is set once (compare-and-set), so a rank that gives up waiting and a coordinator that goes on
cannot both be right.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcore_ckpt.errors import AgreementError, CheckpointError, CommitError, from_record, to_record
from mcore_ckpt.ranks import deadlines

Record = dict[str, Any]

# Before what is compressed. What is not begins with a brace.
_PACKED = b"z"


@dataclass
class Limit:
    """A point of time (of `time.monotonic()`) that no wait goes beyond, whatever its own deadline."""

    at: float = math.inf


class Agreement:
    """This rank's seat among `world_size` ranks.

    Args:
        store: a `torch.distributed` store that all ranks share and nobody else on this rank waits on: a wait blocks
            its client.
        rank, world_size: of the processes that save together.
        namespace: the same on all ranks, and used by no other group of ranks on this store.
        timeout_s: how long any wait may take, in seconds.
        host: kept alive as long as this is: what `store` is a client of. `destroy_process_group()` drops the job's own
            reference, and with the last one the server goes, under a save that may still be ending.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, namespace: str, timeout_s: float, host: Any = None
    ) -> None:
        self._store = store
        self._host = host
        self.rank = rank
        self.world_size = world_size
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._rounds = 0
        self._begun: list[str] = []  # prefixes of the last round, and on rank 0 of those whose keys are still there
        self._given: list[str] = []
        self._take_until = math.inf
        self._limit = Limit()

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def begin(self, topic: str, name: str | None = None) -> Round:
        """The next round.

        All ranks must begin the same rounds in the same order; a round with a name of its own may be missed by a rank.
        """
        self._rounds += name is None
        # Whoever begins this round has left the last one, and so have those who had taken this.
        while self._given:
            self._store.delete_key(self._given.pop())
        if self.is_coordinator:
            self._forget_left_rounds()
        else:
            self._begun.clear()
        self._take_until = math.inf
        self._begun.append(f"{self._namespace}/{self._rounds if name is None else name}")
        return Round(self._store, self.rank, self.world_size, self._begun[-1], topic, self._timeout_s, self._limit)

    def give(self, key: str, record: Record) -> None:
        """Tells the rank that will `take` it something within the present round, before this rank submits."""
        path = self._given_key(key, self.rank)
        self._store.set(path, pack(record))
        self._given.append(path)

    def take(self, key: str, rank: int) -> Record:
        """What `rank` gives within the present round.

        Raises CommitError if it does not: it has failed, died, or is late.
        """
        given, submitted = self._given_key(key, rank), _submission_keys(self._begun[-1], rank + 1)[-1]
        # One for all that is taken in a round: the others give up when it has passed once.
        self._take_until = min(self._take_until, time.monotonic() + self._timeout_s)
        waiting = _waiting_key(self._begun[-1], self.rank)
        self._store.set(waiting, str(rank))
        self._given.append(waiting)
        ready = partial(_any_of, self._store, given, submitted)
        if not poll(ready, self.world_size, self._take_until, self._limit):
            raise CommitError(f"{key}: no word from rank {rank} within {self._timeout_s:g} s: dead or stuck")
        if not self._store.check([given]):
            error = unpack(self._store.get(submitted)).get("error")
            raise from_record(error, CommitError) if error else CommitError(f"{key}: rank {rank} has no part of it")
        return unpack(self._store.get(given))

    def shorten(self, seconds: float) -> None:
        """From now on no wait, the present ones included, lasts longer than this; for an interpreter that ends."""
        self._limit.at = time.monotonic() + seconds

    def _given_key(self, key: str, rank: int) -> str:
        return f"{self._begun[-1]}/given/{rank}/{key}"

    def withdraw(self, topic: str, error: BaseException) -> None:
        """This rank cannot take part in the next round: the others learn why, and all stay in step."""
        round_ = self.begin(topic)
        round_.fail(error)
        if self.is_coordinator:
            round_.announce_failure(error)

    def _forget_left_rounds(self) -> None:
        """Deletes the keys of rounds that all ranks have left: whoever has submitted to a round has left those before.

        Of the one round within another (`exporting.py`) that is not so, but the next begins when all have left both; a
        second one within the same would delete what was submitted to the outer.
        Rank 0 may be several rounds ahead, having failed each of them at once: the others have yet to hear of those.
        """

        def all_came(round_: int) -> bool:
            return self._store.check(_submission_keys(self._begun[round_], self.world_size))

        reached = next(filter(all_came, reversed(range(len(self._begun)))), 0)
        for prefix in self._begun[:reached]:
            for key in [*_submission_keys(prefix, self.world_size), f"{prefix}/outcome", f"{prefix}/done"]:
                self._store.delete_key(key)
        del self._begun[:reached]


def _submission_keys(prefix: str, world_size: int) -> list[str]:
    return [f"{prefix}/rank/{rank}" for rank in range(world_size)]


def _waiting_key(prefix: str, rank: int) -> str:
    return f"{prefix}/waiting/{rank}"


class Round:
    """One decision. Call `submit` or `fail` once, then `collect` and `announce` on rank 0, `outcome` on the others."""

    def __init__(
        self, store: Any, rank: int, world_size: int, prefix: str, topic: str, timeout_s: float, limit: Limit
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = prefix
        self._topic = topic
        self._limit = limit
        self._timeout_s = patience(rank, timeout_s)
        self._deadline = time.monotonic() + self._timeout_s

    def shorten(self, seconds: float) -> None:
        """The deadline is in `seconds` at the latest."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def extend(self) -> None:
        """Starts the deadline anew: for a rank that has just finished work of its own (writing its files)."""
        self._deadline = time.monotonic() + self._timeout_s

    def submit(self, record: Record) -> None:
        self._put(f"{self._prefix}/rank/{self._rank}", {"record": record})

    def fail(self, error: BaseException) -> None:
        self._put(f"{self._prefix}/rank/{self._rank}", {"error": to_record(error, self._rank)})

    def collect(self, default: type[CheckpointError]) -> list[Record]:
        """Rank 0: all ranks' records.

        Raises the first failed rank's error, or `default` if a rank is silent until the deadline.
        """
        keys = _submission_keys(self._prefix, self._world_size)
        all_there = self._wait(lambda: self._store.check(keys))
        absent = set() if all_there else set(missing(self._store, keys))
        there = [key for key in keys if key not in absent]
        # In one request: thousands, one by one, would hold up all ranks for a second.
        messages = [unpack(message) for message in self._store.multi_get(there)]
        failed = [message["error"] for message in messages if "error" in message]
        if failed:
            more = f" ({len(failed) - 1} more failed too)" if len(failed) > 1 else ""
            raise from_record({**failed[0], "message": failed[0]["message"] + more}, default)
        if not all_there:
            raise default(self._silence(keys))
        return [message["record"] for message in messages]

    def _why_nothing_came(self) -> str:
        keys = _submission_keys(self._prefix, self._world_size)
        knows = self._store.check(keys[:1]) or self._store.check([_waiting_key(self._prefix, 0)])
        if knows and not self._store.check(keys):
            return self._silence(keys)
        return f"{self._topic}: rank {self._rank} waited {self._timeout_s:g} s for rank 0, which is dead or stuck"

    def _silence(self, keys: Sequence[str]) -> str:
        absent = set(missing(self._store, keys))
        silent = [rank for rank, key in enumerate(keys) if key in absent]
        # Who waits for another is not dead; unless all that are silent do, when nobody knows better.
        waiting = [rank for rank in silent if self._store.check([_waiting_key(self._prefix, rank)])]
        silent = [rank for rank in silent if rank not in waiting] or silent
        return no_word(self._topic, silent, self._timeout_s)

    def claim(self, default: type[CheckpointError]) -> None:
        """Rank 0: from here on it is decided that rank 0 goes on. Raises `default` if a rank has already given up."""
        outcome = self._set_outcome({"going_on": True})
        if "error" in outcome:
            raise from_record(outcome["error"], default)

    def announce(self, record: Record) -> None:
        """Rank 0: the outcome is good, and this is it."""
        self._put(f"{self._prefix}/done", {"record": record})

    def announce_failure(self, error: BaseException) -> Record | None:
        """Rank 0: the outcome is this error, whatever was claimed before.

        Returns another one, if a rank had given up before: then that is what all others raise.
        """
        message = {"error": to_record(error, self._rank)}
        settled: Record | None = self._set_outcome(message).get("error")
        self._put(f"{self._prefix}/done", message)
        return None if settled == message["error"] else settled

    def outcome(self, default: type[CheckpointError]) -> Record:
        """Other ranks: what rank 0 announced.

        Raises:
            CheckpointError: the announced error; or `default`, when rank 0 is silent until the deadline. If rank 0
                had claimed the outcome before it fell silent, it gets one deadline more, and after that only what
                it did on disk is the truth.
        """
        done = f"{self._prefix}/done"
        if not self._wait(lambda: self._store.check([done])):
            outcome = self._outcome_so_far() or self._set_outcome(
                {"error": {"type": default.__name__, "message": self._why_nothing_came()}}
            )
            if "error" in outcome:
                raise from_record(outcome["error"], default)
            self.extend()
            if not self._wait(lambda: self._store.check([done])):
                raise default(f"{self._why_nothing_came()}, after it had begun to act")
        message = unpack(self._store.get(done))
        if "error" in message:
            first: Record = (self._outcome_so_far() or message).get("error") or message["error"]
            raise from_record(first, default)
        return message["record"]

    def _outcome_so_far(self) -> Record | None:
        key = f"{self._prefix}/outcome"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _set_outcome(self, message: Record) -> Record:
        """Sets the outcome if nobody has; returns what it is."""
        key = f"{self._prefix}/outcome"
        return json.loads(self._store.compare_set(key, "", _encode(message).decode()))

    def _put(self, key: str, message: Record) -> None:
        self._store.set(key, pack(message))

    def _wait(self, ready: Callable[[], bool]) -> bool:
        return poll(ready, self._world_size, self._deadline, self._limit)


def patience(rank: int, timeout_s: float) -> float:
    """How long a rank waits (seconds). Rank 0 knows who is silent: the others wait a little longer, to hear it from
    there.
    """
    return timeout_s if rank == 0 else timeout_s + min(timeout_s / 2, deadlines.HEAR_OUT_S)


def _encode(message: Record) -> bytes:
    """JSON without NaN, which other ranks could not parse. Raises ValueError."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def pack(message: Record) -> bytes:
    """What goes into the store. Raises ValueError for what is no JSON, and for more than it takes."""
    data = _encode(message)
    if len(data) <= deadlines.PLAIN_MESSAGE_BYTES:
        return data
    packed = _PACKED + zlib.compress(data, 1)
    if len(packed) > deadlines.MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes, {len(packed)} compressed, is more than the store takes")
    return packed


def unpack(data: bytes) -> Record:
    """The inverse of `pack`."""
    return json.loads(zlib.decompress(data[len(_PACKED) :]) if data.startswith(_PACKED) else data)


def missing(store: Any, keys: Sequence[str]) -> list[str]:
    """Those that are not there. Asked for one by one, thousands would hold up the store when it is asked by all."""
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    return [*missing(store, keys[:half]), *missing(store, keys[half:])]


def no_word(topic: str, ranks: Sequence[int], timeout_s: float) -> str:
    """What is said of ranks that are silent."""
    return (
        f"{topic}: no word from rank {', '.join(map(str, ranks))} within {timeout_s:g} s: dead or stuck. "
        "Look at its log; raise timeout_s if it was only slow"
    )


def _any_of(store: Any, *keys: str) -> bool:
    return any(store.check([key]) for key in keys)


def poll(ready: Callable[[], bool], world_size: int, deadline: float, limit: Limit) -> bool:
    """False if the deadline passes first.

    Asking again and again, not store.wait(): a timed-out wait leaves noise on stderr, and its client blocked.
    """
    started = time.monotonic()
    # The answer is late by a tenth of what it took, at most; and thousands of ranks leave the store time to answer.
    least = max(deadlines.POLL_FIRST_S, world_size * deadlines.POLL_PER_RANK_S)
    while not ready():
        now = time.monotonic()
        left = min(deadline, limit.at) - now
        if left <= 0:
            return False
        time.sleep(min(max(least, (now - started) / 10), deadlines.POLL_MOST_S, left))
    return True


@contextmanager
def store_failures(topic: str, error: type[CheckpointError]) -> Iterator[None]:
    """Turns a lost store (the process that hosts it died) into one of our errors."""
    try:
        yield
    except RuntimeError as failure:
        # torch.distributed raises it and its subclasses (DistStoreError, DistNetworkError) for a lost connection.
        raise error(f"{topic}: the key-value store is gone ({failure}): its host, mostly rank 0, has died") from failure


def decide(
    agreement: Agreement,
    topic: str,
    work: Callable[[], Record],
    combine: Callable[[Sequence[Record]], Record],
    error: type[CheckpointError] = AgreementError,
    act: Callable[[], None] | None = None,
    name: str | None = None,
) -> Record:
    """One whole round: every rank does `work`, rank 0 combines the results, every rank gets the same record.

    Args:
        agreement: this rank's seat.
        topic: what is being agreed, for messages.
        work: this rank's part; returns plain JSON values.
        combine: on rank 0, the records of all ranks, by rank, to the one all get.
        error: the type of everything that is not of this package's family: foreign exceptions, a silent rank, a lost
            store.
        act: on rank 0, what must happen only if no rank has given up, and after which none can: a rename.
        name: of the round, unique, if a rank may miss it.

    Raises:
        CheckpointError: on all ranks the same type.
    """
    with store_failures(topic, error):
        round_ = agreement.begin(topic, name)
        try:
            own = _run(round_, work)
        except BaseException as interrupt:
            if agreement.is_coordinator:
                round_.announce_failure(interrupt)
            raise
        if not agreement.is_coordinator:
            try:
                return round_.outcome(error)
            except CheckpointError as failure:
                raise failure from own
        if own is not None:
            # The others may have more to say of it, but it is over; and they must hear so before they give up.
            round_.shorten(deadlines.HEAR_OUT_S / 2)
        try:
            record = combine(round_.collect(error))
            pack(record)  # before the claim: who has heard of that waits for this word
            round_.claim(error)
            if act is not None:
                act()
        except (Exception, KeyboardInterrupt, SystemExit) as failure:
            settled = round_.announce_failure(failure)
            if not isinstance(failure, Exception):
                raise
            told = _as_family(failure, error) if settled is None else from_record(settled, error)
            raise told from (own or failure)
        round_.announce(record)
        return record


def agree(
    agreement: Agreement, topic: str, request: Record | Callable[[], Record], answer: Callable[[], Record]
) -> Record:
    """What rank 0 answers, on every rank. Every rank calls it, with the same request, of plain JSON values, or a
    function that returns it.

    Raises:
        AgreementError: the requests differ, a rank is missing, or a function failed with a foreign exception.
        CheckpointError: what `request` raised on any rank, or `answer`; the same on all ranks.
    """

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere(records, topic)
        return answer()

    return decide(agreement, topic, lambda: request() if callable(request) else request, combine)


def same_everywhere(records: Sequence[Record], what: str, error: type[CheckpointError] = AgreementError) -> Record:
    """For `combine`: the record all ranks have submitted. Raises `error` naming the first rank whose is another."""
    for rank, record in enumerate(records):
        if record != records[0]:
            raise error(f"{what}: rank 0 has {records[0]}, rank {rank} has {record}: they must be the same")
    return records[0]


def _run(round_: Round, work: Callable[[], Record]) -> Exception | None:
    """Does this rank's part and submits its result or its error."""
    try:
        record = work()
        pack(record)
    except BaseException as failure:
        round_.extend()
        round_.fail(failure)
        if not isinstance(failure, Exception):
            raise  # Ctrl-C: the others need not wait for the deadline
        return failure
    round_.extend()
    round_.submit(record)
    return None


def _as_family(failure: Exception, default: type[CheckpointError]) -> CheckpointError:
    return failure if isinstance(failure, CheckpointError) else from_record(to_record(failure, 0), default)
