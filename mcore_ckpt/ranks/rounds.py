"""Lets ranks agree over a key-value store, with a deadline on every wait and without collectives.

In one *round*, every rank submits its record or its error, rank 0 decides, and all ranks get the same outcome. The
outcome is one key that is set only once (compare-and-set). So either a rank gives up waiting or rank 0 continues, but
never both.

Calls (`Agreement.call`) are counted, and rounds are numbered within their call. So a rank may leave a call at any
moment with an exception, such as an exception of a signal handler. The rank then fails the round that the other ranks
come to next, and in the next call all ranks begin with the same round. The opening of a save is a round of one
agreement, and the commit is a round of another agreement. A rank that is interrupted between these two rounds must fail
the round of the commit. So the round of the commit has a name, by which the rank can fail this round. If rank 0 fails
in a round that another rank has given up, rank 0 raises the error of that rank. So all ranks raise an error of the same
type. This matters in a load, which tries an older checkpoint only after a CheckpointCorruptError: with an error of its
own, rank 0 could try an older checkpoint alone.

A waiting rank asks the store again and again, with pauses that grow with time and with the number of ranks. The rank
does not use `store.wait()`: a wait that times out leaves C++ warnings on stderr and an unusable client.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from mcore_ckpt.errors import AgreementError, CheckpointError, CommitError, from_record, to_record
from mcore_ckpt.interrupts import chain_of, interrupts_as_themselves, is_interrupt
from mcore_ckpt.processes import Home
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.key_value_store import (
    WaitLimit,
    has_any,
    is_shared,
    missing,
    pack,
    silence_of,
    store_failures,
    unpack,
)
from mcore_ckpt.ranks.one_round import Record as Record  # for modules that use `decide`
from mcore_ckpt.ranks.one_round import Round, submission_key, waiting_key
from mcore_ckpt.ranks.own_store import OwnStore

# Each rank that closes adds 1 to a number in the store. If the rank has keys left, it adds _HAS_KEYS, too.
_HAS_KEYS = 1 << 32

T = TypeVar("T")


Result = TypeVar("Result", covariant=True)


class Started(Protocol[Result]):
    """Work that has been started."""

    @property
    def ended(self) -> bool: ...
    def wait(self, patience_s: float = math.inf, total_s: float = math.inf) -> bool: ...
    def result(self) -> Result: ...
    def give_up(self) -> None: ...


class Runner(Protocol):
    """Does the work of a rank in a round. `io.disk_watch.DiskWatch` gives the work up if the disk hangs."""

    def run(self, work: Callable[[], T]) -> T: ...
    def start(self, work: Callable[[], T]) -> Started[T]: ...
    def leave(self, work: Any) -> None: ...


class _Over(Generic[T]):
    ended = True

    def __init__(self, result: T) -> None:
        self.result = lambda: result

    def wait(self, patience_s: float = math.inf, total_s: float = math.inf) -> bool:
        return True

    def give_up(self) -> None:
        pass


class _Here:
    """Does work on the thread that asks for it."""

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def start(self, work: Callable[[], T]) -> _Over[T]:
        return _Over(work())

    def leave(self, work: Any) -> None:
        raise AssertionError("`leave` was called for work that `start` had already finished")


class Agreement:
    """A rank's membership in a group of `world_size` ranks. Through this object, the rank takes part in rounds.

    Args:
        store: a `torch.distributed` store that all ranks share, or the `OwnStore` of the only rank. Nothing else on
            this rank may wait on this store, because a wait blocks the store's client.
        rank: this rank's number in the group.
        world_size: the number of ranks in the group.
        namespace: the prefix of all keys. It is the same on all ranks, and no other group on this store uses it.
        timeout_s: the timeout of each wait, in seconds.
        host: the store that `store` is a client of. This object keeps a reference to that store, because the store's
            server stops when the last reference is dropped. `destroy_process_group()` drops the job's own reference,
            perhaps while a save is still finishing.

    Attributes:
        runner: the Runner that does this rank's work in each round.
        decided: the record that all ranks got in the last round of the present call, even if this rank was interrupted
            meanwhile.
        is_closed: True once this rank has deleted its keys.
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
        self._home = Home()
        self._calls = 0
        self._rounds: int | None = None  # how many rounds the present call has had; None outside of calls
        # The last round that this rank has begun, and earlier rounds of which this rank still has keys.
        self._begun: list[Round] = []
        # The error that all ranks have learned of in the present call. The error of an earlier call is not kept,
        # because its traceback keeps the callers' objects, such as the tensors of a training.
        self._told: BaseException | None = None
        self.is_closed = False
        self.decided: Record = {}
        self._given: list[str] = []
        self._take_until = math.inf
        self._limit = WaitLimit()
        self.runner: Runner = _Here()

    @property
    def is_coordinator(self) -> bool:
        """True on rank 0, which decides in each round."""
        return self.rank == 0

    @property
    def timeout_s(self) -> float:
        """The timeout of each wait, in seconds."""
        return self._timeout_s

    def begin(self, topic: str, name: str | None = None, timeout_s: float | None = None) -> Round:
        """Begins the next round.

        All ranks must begin the same rounds in the same order. A rank may skip a round that has a `name`. `timeout_s`
        replaces the agreement's timeout in this round.

        Raises InvalidStateError in a forked child: the store cannot tell the child's messages from its parent's.
        """
        if is_shared(self._store):
            self._home.check("this Agreement")
        number, calls = (self._rounds or 0) + 1, self._calls + (self._rounds is None)
        prefix = f"{self._namespace}/{f'{calls}-{number}' if name is None else name}"
        wait = self._timeout_s if timeout_s is None else timeout_s
        outer = next((each for each in self._begun if each.is_at_work), None)
        round_ = Round(self._store, self.rank, self.world_size, prefix, topic, wait, self._limit, name, outer)
        # Add the round first, so that `fail_next_round` finds it if a signal handler raises below.
        self._begun.append(round_)
        if name is None and self._rounds is None:
            self._calls = calls
        elif name is None:
            self._rounds = number
        # Delete the records that this rank gave in the previous round. The ranks that took the records have left that
        # round, so nobody needs the records any more.
        while self._given:
            self._store.delete_key(self._given.pop())
        if self.is_coordinator:
            self._delete_left_rounds()
        else:
            self._delete_submissions()
        self._take_until = math.inf
        return round_

    @contextmanager
    def call(self, topic: str) -> Iterator[None]:
        """Makes all rounds of the `with` block, however many, belong to one call of all ranks.

        A rank may leave the block with its own exception, such as an exception of a signal handler. The other ranks get
        the exception in the round that they come to next, and in the next call all ranks begin with the same round. An
        exception of a signal handler is raised unchanged.
        """
        outer, is_outermost = sys.exc_info()[1], self._rounds is None
        try:
            if is_outermost:
                self._calls, self._rounds, self.decided = self._calls + 1, 0, {}
            with interrupts_as_themselves():
                yield
        except BaseException as error:
            was_told = any(each is self._told for each in chain_of(error, outer))
            if self._home.is_here and not was_told:
                with suppress(RuntimeError):  # the store is gone, so nobody can be told
                    self.fail_next_round(topic, error)
                self._told = error
            raise
        finally:
            if is_outermost:
                self._rounds = self._told = None

    def give(self, key: str, record: Record) -> None:
        """Publishes a record that another rank will `take` in the present round. Call this before the rank submits."""
        path = self._given_key(key, self.rank)
        self._store.set(path, pack(record))
        self._given.append(path)

    def take(self, key: str, rank: int) -> Record:
        """Waits for the record that `rank` gives in the present round, and returns the record.

        Raises CommitError if `rank` has failed, has died, is late, or submits without having given the record. Raises
        CommitError also if another rank has given up.
        """
        round_ = self._begun[-1]
        given, submitted = self._given_key(key, rank), submission_key(round_.prefix, rank)
        # All calls of `take` in a round share one deadline, because the other ranks give up after one timeout.
        self._take_until = min(self._take_until, time.monotonic() + self._timeout_s)
        waiting = waiting_key(round_.prefix, self.rank)
        self._store.set(waiting, str(rank))
        self._given.append(waiting)

        def ready() -> bool:
            return has_any(self._store, given, submitted) or round_.given_up() is not None

        if not round_.wait(ready, self.world_size, self._take_until):
            left_s = self._take_until - time.monotonic()
            raise CommitError(silence_of(key, [rank], round(self._timeout_s - max(0.0, left_s), 1), left_s > 0))
        if not has_any(self._store, given, submitted) and (error := round_.given_up()):
            raise from_record(error, CommitError)
        if not self._store.check([given]):
            if error := unpack(self._store.get(submitted)).get("error"):
                raise from_record(error, CommitError)
            raise CommitError(f"{key}: rank {rank} has submitted without giving its part: look at its log")
        return unpack(self._store.get(given))

    def for_thread(self, name: str) -> Agreement:
        """Returns an agreement of the same ranks with its own client, for rounds on another thread."""
        place = f"{self._namespace}/{name}"
        return Agreement(self._store.clone(), self.rank, self.world_size, place, self._timeout_s, self._host)

    def close(self) -> None:
        """Deletes the keys of this rank. Every rank calls this method after its last round.

        This method waits for nobody and raises nothing. It does not delete keys that other ranks may still have to
        read: the last rank that closes deletes them. In a forked child this method does nothing.
        """
        if self.is_closed or not self._home.is_here:
            return
        self.is_closed = True
        over = [] if self.is_coordinator else [each for each in self._begun if each.is_over]
        gone = [submission_key(each.prefix, self.rank) for each in over]
        kept = [key for each in self._begun if each not in over for key in each.all_keys()]
        (gone if self._begun and self._begun[-1] in over else kept).extend(self._given)
        with suppress(RuntimeError):  # the store is gone, and all keys with it
            for key in gone:
                self._store.delete_key(key)
            self._hand_over(kept)

    def _hand_over(self, keys: Sequence[str]) -> None:
        """Leaves keys to the last rank that closes, which deletes them."""
        left = f"{self._namespace}/left"
        names = [f"{left}/{rank}" for rank in range(self.world_size)]
        if keys:
            self._store.set(names[self.rank], pack({"keys": keys}))
        owners, closed = divmod(self._store.add(left, _HAS_KEYS + 1 if keys else 1), _HAS_KEYS)
        if closed < self.world_size:
            return
        if owners == 1 and self._store.check(names[:1]):  # usually only rank 0 has keys left
            names = names[:1]
        absent = set(missing(self._store, names)) if owners else set(names)
        for name in (each for each in names if each not in absent):
            for key in (*unpack(self._store.get(name))["keys"], name):
                self._store.delete_key(key)
        self._store.delete_key(left)

    def limit_waits(self, seconds: float, even_later: bool = True) -> None:
        """Ends all present and future waits within `seconds` from now, or earlier if a previous call says so.

        This method is called when the interpreter exits, and when the machine is about to be taken from the training. A
        signal handler may call this method, because the method takes no lock.

        The other ranks may have the same limit, so rank 0 stops waiting a little earlier. Then rank 0 asks the store
        which rank is silent, and the other ranks, perhaps thousands, need not ask.

        Args:
            seconds: how long waits may last from now.
            even_later: whether waits that begin more than `seconds` from now are limited, too.
        """
        head_start_s = min(seconds / 2, deadlines.EXTRA_WAIT_S) if self.is_coordinator else 0.0
        at = time.monotonic() + seconds - head_start_s
        if even_later:
            self._limit.at = min(self._limit.at, at)
        elif self._limit.expected_at > time.monotonic():
            self._limit.expected_at = min(self._limit.expected_at, at)
        else:  # the machine was expected to be gone by `expected_at`, but is still there
            self._limit.expected_at = at

    def shortened(self, seconds: float, began: float | None = None) -> float:
        """Returns how many seconds a wait of `seconds` may last from now on, under the limit of `limit_waits`.

        Args:
            seconds: how long the wait would last without a limit.
            began: when the wait began (`time.monotonic()`); None: now.
        """
        now = time.monotonic()
        began = now if began is None else began
        return max(0.0, min(began + seconds, self._limit.end_of(began)) - now)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[float]:
        """Yields how many seconds the `with` block may wait for something other than a rank's message.

        If a limit ends that wait, each later wait of the present round lasts at most LAST_WAIT_S seconds.
        """
        began, patience_s = time.monotonic(), self.shortened(seconds)
        try:
            yield patience_s
        finally:
            is_over = time.monotonic() >= began + patience_s
            if is_over and patience_s < seconds:
                self._begun[-1].cut()

    def _given_key(self, key: str, rank: int) -> str:
        return f"{self._begun[-1].prefix}/given/{rank}/{key}"

    def fail_next_round(self, topic: str, error: BaseException, name: str | None = None) -> None:
        """Fails the next round because this rank cannot take part in it.

        The other ranks get the error. This rank begins the round like the other ranks, so all ranks stay at the same
        round. `name` is the name of the round; see `begin`. A round that this rank has begun, but not submitted to,
        counts as the next round.
        """
        last = self._begun[-1] if self._begun else None
        is_next = last is not None and last.name == name and not last.has_submitted
        round_ = last if last is not None and is_next else self.begin(topic, name)
        round_.fail(error)
        if self.is_coordinator:
            round_.announce_failure(error)

    def has_begun(self, name: str) -> bool:
        """True if this rank has begun the round of this name, and has not deleted its keys of the round since."""
        return any(each.name == name for each in self._begun)

    def told(self, error: BaseException) -> None:
        """Notes that this rank raises `error` because the present round has failed, as all ranks know."""
        if self._rounds is not None:
            self._told = error

    def _delete_submissions(self) -> None:
        """Deletes this rank's submissions to rounds that are over. All ranks except rank 0 call this method.

        Each rank deletes its own submissions, because requests of rank 0 for thousands of ranks would hold up the
        training. A round in which this rank has given up is over when a later round is over. An outer round, to which
        this rank has not submitted yet, stays in the list.
        """
        over = max((number for number, round_ in enumerate(self._begun) if round_.is_over), default=-1)
        for round_ in [each for each in self._begun[: over + 1] if each.has_submitted]:
            self._store.delete_key(submission_key(round_.prefix, self.rank))
            self._begun.remove(round_)

    def _delete_left_rounds(self) -> None:
        """Deletes the keys of rank 0 in rounds that all ranks have left.

        A rank that has submitted to a round has left all earlier rounds.

        A round inside another round (the HuggingFace export of a save) is an exception: a rank that has submitted to
        the inner round has not left the outer round. One inner round is safe, because the next round begins only after
        all ranks have left both rounds. A second inner round would delete the outcome of the outer round.

        Rank 0 can be several rounds ahead if it failed immediately in each of these rounds. The other ranks still need
        the keys of these rounds.
        """
        reached = max((number for number, round_ in enumerate(self._begun) if round_.has_all_submissions), default=0)
        for round_ in self._begun[:reached]:
            for key in round_.all_keys():
                self._store.delete_key(key)
        del self._begun[:reached]


class Alone(Agreement):
    """The agreement of a process that works alone. `decide` does the work at once, and raises errors unchanged."""

    def __init__(self) -> None:
        super().__init__(OwnStore(), 0, 1, "mcore_ckpt/alone", 0.0)


class Done(Generic[T]):
    """Work that a rank has done before a round, with the result or the error of the work."""

    def __init__(self, results: Sequence[T], error: Exception | None) -> None:
        self._results, self._error = results, error

    def record(self) -> Record:
        """Returns an empty record for the round.

        If the work has failed, the first call raises the work's error instead.
        """
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return {}
        finally:
            del self, error  # else the error and this frame keep each other and the callers' objects alive

    def result(self) -> T:
        """Returns the result. Call this method after the round has succeeded."""
        return self._results[0]


def done_before(agreement: Agreement, work: Callable[[], T]) -> Done[T]:
    """Does long work before a round, while the disk is watched, and returns the result or the error as a `Done`.

    Raises only what signal handlers raise.
    """
    return done_here(partial(agreement.runner.run, work))


def done_here(work: Callable[[], T]) -> Done[T]:
    """Does work on this thread before a round, and returns the result or the error as a `Done`.

    If the work has failed, all ranks learn of the error in the round. Raises only what signal handlers raise.
    """
    try:
        return Done([work()], None)
    except Exception as error:
        if is_interrupt(error):
            raise
        return Done([], error)


def decide(
    agreement: Agreement,
    topic: str,
    work: Callable[[], Record],
    combine: Callable[[Sequence[Record]], Record],
    error: type[CheckpointError] = AgreementError,
    act: Callable[[], None] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
) -> Record:
    """Runs one whole round: every rank does `work`, rank 0 combines the results, every rank gets the same record.

    Args:
        agreement: connects this rank with the other ranks.
        topic: what the ranks agree on, for messages.
        work: a function that does this rank's part, and returns plain JSON values.
        combine: a function that rank 0 calls with the records of all ranks, in the order of the ranks. The function
            returns the record that every rank gets.
        error: the type to raise for every failure that is not a CheckpointError: another exception, a silent rank, a
            lost store.
        act: an action that must not happen if the round fails, such as a rename. Rank 0 calls this function if no rank
            has given up. From then on no rank can give up.
        name: a unique name of the round, if a rank may skip the round.
        timeout_s: the timeout of each wait in this round, in seconds; None for the agreement's timeout. Set a longer
            timeout for work that takes some ranks much longer than other ranks.

    Raises:
        CheckpointError: the round has failed. All ranks raise an error of the same type.
        BaseException: what a signal handler has raised on this rank. The other ranks raise a CheckpointError. If rank 0
            had acted before, the other ranks return a record instead, and this rank's `Agreement.decided` has that
            record.
    """
    if isinstance(agreement, Alone):
        record = combine([work()])
        if act is not None:
            act()
        return record
    scope = nullcontext() if name is not None else agreement.call(topic)
    with scope, interrupts_as_themselves(), store_failures(topic, error):
        try:
            round_ = agreement.begin(topic, name, timeout_s)
        except BaseException as interrupt:
            # If the round has no name, `call` tells the other ranks. A CheckpointError or RuntimeError means that this
            # is a forked child, or that the store is lost. Then nobody can be told.
            if name is not None and not isinstance(interrupt, (CheckpointError, RuntimeError)):
                agreement.fail_next_round(topic, interrupt, name)
            raise
        if agreement.is_coordinator:
            return _lead(agreement, round_, work, combine, error, act)
        return _follow(agreement, round_, work, error)


def _follow(agreement: Agreement, round_: Round, work: Callable[[], Record], error: type[CheckpointError]) -> Record:
    """Takes part in a round. All ranks except rank 0 call this function."""
    own: BaseException | None = None
    try:
        own = _work_and_submit(round_, partial(agreement.runner.run, work))
        agreement.decided = record = round_.outcome(error, own)
        return record
    except CheckpointError as failure:
        agreement.told(failure)
        raise failure from own
    except BaseException as interrupt:
        if round_.is_here:
            with suppress(RuntimeError):  # the store is gone
                others = round_.leave(interrupt)
                agreement.decided = others or {}
                if others is None:
                    agreement.told(interrupt)
        raise
    finally:
        del own  # else the error and this frame keep each other and the callers' objects alive


def _lead(
    agreement: Agreement,
    round_: Round,
    work: Callable[[], Record],
    combine: Callable[[Sequence[Record]], Record],
    error: type[CheckpointError],
    act: Callable[[], None] | None,
) -> Record:
    """Takes part in a round, and decides. Only rank 0 calls this function."""
    own: BaseException | None = None
    told: BaseException | None = None
    record: Record | None = None
    try:
        own = _work_and_submit(round_, partial(agreement.runner.run, work))
        if own is not None:
            # Rank 0 has failed, so the round has failed. Rank 0 still collects the errors of other ranks, but must
            # announce the failure before the other ranks give up.
            round_.shorten_deadline(deadlines.EXTRA_WAIT_S / 2)
        records = round_.collect(error)
        result = agreement.runner.run(lambda: combine(records))
        # A record that cannot be sent must fail here. After the claim, the other ranks would wait for the record in
        # vain.
        pack(result)
        round_.claim(error)
        if act is not None:
            agreement.runner.run(act)
        agreement.decided = record = result
        round_.announce(record)
        return record
    except BaseException as failure:
        if not round_.is_here:
            raise
        if record is not None:  # some ranks may have got the record already
            round_.announce(record)
            raise
        earlier = round_.announce_failure(failure)
        told = failure
        if isinstance(failure, Exception):
            told = _as_checkpoint_error(failure, error) if earlier is None else from_record(earlier, error)
        agreement.told(told)
        if told is failure:
            raise failure from (own or failure.__cause__)
        raise told from (own or failure)
    finally:
        del own, told  # else the error and this frame keep each other and the callers' objects alive


def agree(
    agreement: Agreement, topic: str, request: Record | Callable[[], Record], answer: Callable[[], Record]
) -> Record:
    """Returns, on every rank, what `answer` returns on rank 0.

    Every rank calls this function with the same `request`: plain JSON values, or a function that returns them. Raises
    AgreementError if the requests differ, if a rank is missing, or if a rank raises an exception that is not a
    CheckpointError. If a rank raises a CheckpointError, all ranks raise an error of the same type.
    """

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere(records, topic)
        return answer()

    return decide(agreement, topic, lambda: request() if callable(request) else request, combine)


def same_everywhere(records: Sequence[Record], what: str, error: type[CheckpointError] = AgreementError) -> Record:
    """Returns the record that all ranks have submitted.

    Raises `error` if the records differ. The message names the first rank whose record differs from rank 0's record.
    """
    for rank, record in enumerate(records):
        if record != records[0]:
            raise error(f"{what}: rank 0 has {records[0]}, rank {rank} has {record}: they must be the same")
    return records[0]


def _work_and_submit(round_: Round, work: Callable[[], Record]) -> BaseException | None:
    """Does this rank's work and submits the record. If the work fails, submits the error and returns it."""
    try:
        round_.is_at_work = True
        try:
            record = work()
        finally:
            round_.is_at_work = False
        pack(record)
    except BaseException as failure:
        if not round_.is_here:
            raise
        round_.restart_deadline()
        round_.fail(failure)
        if is_interrupt(failure):
            raise  # Ctrl-C ends this rank immediately. The other ranks see the failure before the deadline.
        return failure
    round_.restart_deadline()
    round_.submit(record)
    return None


def _as_checkpoint_error(failure: Exception, default: type[CheckpointError]) -> CheckpointError:
    return failure if isinstance(failure, CheckpointError) else from_record(to_record(failure, 0), default)
