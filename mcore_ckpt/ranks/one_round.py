"""One round of ranks that agree (`rounds.py`). Keys of the store contain each rank's submission, and the outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from mcore_ckpt.errors import CheckpointError, from_record, to_record
from mcore_ckpt.processes import Home
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.key_value_store import (
    WaitLimit,
    all_there,
    encode,
    has_any,
    missing,
    pack,
    poll,
    silence_of,
    silence_of_rank_0,
    timeout_of,
    unpack,
)

# A record that a rank submits, or that all ranks get. It consists of plain JSON values.
Record = dict[str, Any]


def submission_key(prefix: str, rank: int) -> str:
    """Returns the key of a rank's record or error in the round with this prefix."""
    return f"{prefix}/rank/{rank}"


def _submission_keys(prefix: str, world_size: int) -> list[str]:
    return [submission_key(prefix, rank) for rank in range(world_size)]


def waiting_key(prefix: str, rank: int) -> str:
    """Returns the key that says that a rank waits for another rank in the round with this prefix."""
    return f"{prefix}/waiting/{rank}"


class Round:
    """One decision of all ranks. Call `submit` or `fail` once.

    Then call `collect`, `claim` and `announce` on rank 0, and `outcome` on the other ranks.

    Attributes:
        is_at_work: whether this rank does its own work for the round. Rounds that this rank begins meanwhile are inside
            this round.
        has_submitted: whether this rank has submitted its record or its error.
        has_all_submissions: whether rank 0 has seen that all ranks have submitted.
        is_over: whether this rank has read what rank 0 announced.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        prefix: str,
        topic: str,
        timeout_s: float,
        limit: WaitLimit,
        name: str | None = None,
        outer: Round | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.prefix, self.name = prefix, name
        self.is_at_work = self.has_submitted = self.has_all_submissions = self.is_over = False
        self._topic = topic
        self._limit = limit
        self._home = Home()
        self._timeout_s = timeout_of(rank, timeout_s)
        self._deadline = time.monotonic() + self._timeout_s
        self._outer, self._is_cut = outer, False
        self._submitted_at = math.inf

    @property
    def is_here(self) -> bool:
        """False in a child that was forked during the round."""
        return self._home.is_here

    def all_keys(self) -> tuple[str, str, str]:
        """Returns the keys that this rank may have set, as rank 0 or as a rank that gave up."""
        return submission_key(self.prefix, self._rank), f"{self.prefix}/outcome", f"{self.prefix}/done"

    def shorten_deadline(self, seconds: float) -> None:
        """Moves the deadline to `seconds` from now, unless the deadline is earlier already."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def wait(self, ready: Callable[[], bool], pollers: int, deadline: float) -> bool:
        """Calls `ready` until it returns True. Returns False if the deadline or the limit of waits passes first.

        For `pollers` see `poll`. If the limit has ended a wait of this round or of an outer round, all further waits of
        this round last at most LAST_WAIT_S seconds. Otherwise these waits might not be limited, because they begin
        after the time of the limit.
        """
        if self._has_been_cut():
            return poll(ready, pollers, min(deadline, time.monotonic() + deadlines.LAST_WAIT_S), WaitLimit())
        there = poll(ready, pollers, deadline, self._limit)
        if not there and time.monotonic() < deadline:
            self.cut()
        return there

    def cut(self) -> None:
        """Notes that a limit of waits has ended a wait of this round."""
        self._is_cut = True
        if self._outer is not None:
            self._outer.cut()

    def _has_been_cut(self) -> bool:
        return self._is_cut or (self._outer is not None and self._outer._has_been_cut())

    def _waited(self) -> tuple[float, bool]:
        """Returns how many seconds this rank has waited since its work ended, and whether a limit ended the wait."""
        if self._has_been_cut():
            return round(max(0.0, time.monotonic() - self._submitted_at), 1), True
        return self._timeout_s, False

    def restart_deadline(self) -> None:
        """Restarts the deadline. A rank calls this when it has finished its own work, such as writing its files."""
        self._deadline = time.monotonic() + self._timeout_s

    def submit(self, record: Record) -> None:
        """Submits this rank's record."""
        self._submit({"record": record})

    def fail(self, error: BaseException) -> None:
        """Submits this rank's error instead of a record."""
        self._submit({"error": to_record(error, self._rank)})

    def _submit(self, message: Record) -> None:
        self._put(submission_key(self.prefix, self._rank), message)
        self.has_submitted, self._submitted_at = True, time.monotonic()

    def leave(self, error: BaseException) -> Record | None:
        """Fails the round, because `error` has interrupted this rank. All ranks except rank 0 may call this method.

        If rank 0 has already claimed the outcome, returns the record that the other ranks get, otherwise None.
        """
        if not self.is_over:
            self.fail(error)  # replaces the record, which rank 0 may have read already
            outcome = self._give_up(to_record(error, self._rank))
            self.restart_deadline()
            if "error" in outcome or not self._wait(self._is_done):
                return None
        return self._read_done().get("record")

    def collect(self, default: type[CheckpointError]) -> list[Record]:
        """Returns the records of all ranks, in the order of the ranks. Only rank 0 calls this method.

        Raises the error of the failed rank with the lowest number, or `default` if a rank is silent until the deadline.
        If a rank gives up before the deadline, raises that rank's error at once.
        """
        keys = _submission_keys(self.prefix, self._world_size)
        messages: list[Record] = []

        def receive(there: Sequence[str]) -> None:
            # Ask for many messages in one request, because thousands of requests would delay all ranks by a second.
            messages.extend(map(unpack, self._store.multi_get(list(there))))

        # Most messages are read and decoded while rank 0 waits for the last rank.
        has_all = all_there(self._store, keys, receive)
        self._wait(lambda: has_all() or self.given_up() is not None)
        self.has_all_submissions = has_all()
        if not self.has_all_submissions:
            left = keys[len(messages) :]
            absent = set(missing(self._store, left))
            receive([key for key in left if key not in absent])
        failed = [message["error"] for message in messages if "error" in message]
        if failed:
            more = f" ({len(failed) - 1} more failed too)" if len(failed) > 1 else ""
            raise from_record({**failed[0], "message": failed[0]["message"] + more}, default)
        if not self.has_all_submissions:
            if error := self.given_up():
                raise from_record(error, default)
            raise default(self._silence(keys))
        return [message["record"] for message in messages]

    def _why_nothing_came(self) -> str:
        keys = _submission_keys(self.prefix, self._world_size)
        rank_0_lives = has_any(self._store, keys[0], waiting_key(self.prefix, 0))
        if rank_0_lives and not self._store.check(keys):
            return self._silence(keys)
        return silence_of_rank_0(self._topic, self._rank, *self._waited())

    def _silence(self, keys: Sequence[str]) -> str:
        absent = set(missing(self._store, keys))
        silent = [rank for rank, key in enumerate(keys) if key in absent]
        # A rank that waits for another rank is alive, so the error does not name it. If all silent ranks wait, the
        # error names all.
        waiting = [rank for rank in silent if self._store.check([waiting_key(self.prefix, rank)])]
        silent = [rank for rank in silent if rank not in waiting] or silent
        return silence_of(self._topic, silent, *self._waited())

    def claim(self, default: type[CheckpointError]) -> None:
        """Sets the outcome to "rank 0 continues". From then on no rank can give up. Only rank 0 calls this method.

        If a rank has already given up, raises the error that the rank has recorded.
        """
        outcome = self._set_outcome({"going_on": True})
        if "error" in outcome:
            raise from_record(outcome["error"], default)

    def announce(self, record: Record) -> None:
        """Announces the record that all ranks get. Only rank 0 calls this method."""
        self._put(f"{self.prefix}/done", {"record": record})

    def announce_failure(self, error: BaseException) -> Record | None:
        """Announces that the round has failed with `error`, even after `claim`. Only rank 0 calls this method.

        If a rank had given up before, the error of that rank stays the outcome, and all other ranks raise that error.
        Then this method returns the error of that rank, otherwise None.
        """
        message = {"error": to_record(error, self._rank)}
        earlier: Record | None = self._set_outcome(message).get("error")
        self._put(f"{self.prefix}/done", message)
        self.has_submitted = True  # even if an interrupt came while this rank submitted
        return None if earlier == message["error"] else earlier

    def outcome(self, default: type[CheckpointError], own: BaseException | None = None) -> Record:
        """Waits for the record that rank 0 announces, and returns it. All ranks except rank 0 call this method.

        If rank 0 is silent until the deadline but has called `claim`, this rank waits until a second deadline. If
        rank 0 stays silent, only the disk shows what rank 0 did. Raises the error that rank 0 announces, or `default`
        if rank 0 is silent. If this rank has failed with `own` and has no time to wait, `own` is the outcome.
        """
        if not self._wait(self._is_done):
            outcome = self._outcome_so_far() or self._give_up(
                to_record(own, self._rank)
                if own is not None and self._waited()[1]
                else {"type": default.__name__, "message": self._why_nothing_came()}
            )
            if "error" in outcome:
                raise from_record(outcome["error"], default)
            self.restart_deadline()
            if not self._wait(self._is_done):
                raise default(
                    f"{self._why_nothing_came()}. Rank 0 had begun to act, so only the disk shows what it did"
                )
        message = self._read_done()
        if "error" in message:
            first: Record = (self._outcome_so_far() or message).get("error") or message["error"]
            raise from_record(first, default)
        return message["record"]

    def _is_done(self) -> bool:
        there: bool = self._store.check([f"{self.prefix}/done"])
        return there

    def _read_done(self) -> Record:
        """Returns what was announced. Waits if nothing has been announced yet."""
        message = unpack(self._store.get(f"{self.prefix}/done"))
        # If another rank has given up, rank 0 may still have to read this rank's submission, so the round is not over.
        self.is_over = not message.get("is_given_up", False)
        return message

    def given_up(self) -> Record | None:
        """Returns the error of the rank that has given up, or rank 0's error if rank 0 has failed; None otherwise."""
        return (self._outcome_so_far() or {}).get("error")

    def _give_up(self, error: Record) -> Record:
        """Sets the outcome to `error`, unless the outcome is set already. Rank 0 does not call this method.

        If the outcome is an error, announces the error. Otherwise the other ranks could wait much longer, because
        perhaps only this rank knows that its machine goes soon. Returns the outcome.
        """
        outcome = self._set_outcome({"error": error})
        if "error" in outcome and not self._is_done():
            self._put(f"{self.prefix}/done", outcome | {"is_given_up": True})
        return outcome

    def _outcome_so_far(self) -> Record | None:
        key = f"{self.prefix}/outcome"
        return unpack(self._store.get(key)) if self._store.check([key]) else None

    def _set_outcome(self, message: Record) -> Record:
        """Sets the outcome if no rank has set it yet. Returns the outcome that was set first."""
        key = f"{self.prefix}/outcome"
        return unpack(self._store.compare_set(key, "", encode(message).decode()))

    def _put(self, key: str, message: Record) -> None:
        self._store.set(key, pack(message))

    def _wait(self, ready: Callable[[], bool]) -> bool:
        # Only rank 0 waits for submissions. All other ranks wait for rank 0's outcome at the same time.
        pollers = 1 if self._rank == 0 else self._world_size
        return self.wait(ready, pollers, self._deadline)
