"""Checks whether the ranks of a job see each other's files and locks, and compares their clocks.

The ranks use a trial folder that rank 0 has made. Every rank must call each function. A function takes one or two
rounds.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.io.files import claim_file, open_regular, write_file
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity, fine
from mcore_ckpt.tools.examine.doctor.probes import CLOCK_S, FLOCK

ONE = "one file system"
DELAY = "delay between hosts"
FLOCK_BETWEEN = f"{FLOCK} between hosts"
EXCLUSIVE_BETWEEN = "exclusive creation between hosts"
CLOCKS = "clocks"

# How many seconds a rank looks for another rank's file. On a network file system, the file may appear only after a few
# seconds.
_LOOK_S = 10.0
_PAUSE_S = 0.02
# If a file appears after more seconds than this, a finding reports the delay.
_LATE_S = 1.0


@dataclass(frozen=True)
class View:
    """The result of `look`. `apart` are the ranks that do not share rank 0's file system."""

    findings: tuple[Finding, ...]
    apart: frozenset[int]


def look(agreement: Agreement, trial: Path) -> View:
    """Lets every rank look for rank 0's file, and rank 0 look for every rank's file.

    Each file contains a random word. Otherwise a rank could mistake a file of the same name on another file system for
    the right file.
    """
    word = uuid.uuid4().hex

    def make() -> Record:
        if agreement.is_coordinator:
            write_file(trial / "word-0", [word.encode()])
        return {}

    told = decide(agreement, "making a file for all ranks", make, lambda _: {"word": word})
    found: list[Finding] = []

    def work() -> Record:
        if agreement.is_coordinator:
            return {"after_s": 0.0, "problem": ""}
        after_s = _seconds_until(trial / "word-0", told["word"].encode())
        if after_s is None:
            return {"after_s": None, "problem": "do not see rank 0's file"}
        try:
            write_file(trial / f"word-{agreement.rank}", [told["word"].encode()])
        except OSError as error:
            return {"after_s": after_s, "problem": f"see rank 0's file, but cannot write ({error.strerror})"}
        return {"after_s": after_s, "problem": ""}

    def combine(records: Sequence[Record]) -> Record:
        seen: dict[int, float] = {}
        problems = {rank: record["problem"] for rank, record in enumerate(records) if record["problem"]}
        until = time.monotonic() + _LOOK_S
        for rank, record in enumerate(records[1:], 1):
            if rank in problems:
                continue
            after_s = _seconds_until(trial / f"word-{rank}", word.encode(), until)
            if after_s is None:
                problems[rank] = "see rank 0's file, but rank 0 does not see theirs"
            else:
                seen[rank] = max(after_s, record["after_s"])
        found.extend(_of_view(trial.parent, problems, seen))
        return {"apart": sorted(problems)}

    timeout_s = agreement.timeout_s + 2 * _LOOK_S
    outcome = decide(agreement, "looking at the other ranks' files", work, combine, timeout_s=timeout_s)
    return View(tuple(found), frozenset(outcome["apart"]))


def _seconds_until(path: Path, content: bytes, until: float | None = None) -> float | None:
    """Returns the seconds after which a file has this content; None if it does not have the content in time."""
    begin = time.monotonic()
    until = begin + _LOOK_S if until is None else until
    while True:
        with suppress(OSError):
            descriptor = open_regular(path)
            try:
                if os.pread(descriptor, len(content) + 1, 0) == content:
                    return time.monotonic() - begin
            finally:
                os.close(descriptor)
        if time.monotonic() >= until:
            return None
        time.sleep(_PAUSE_S)


def _of_view(root: Path, problems: Mapping[int, str], seen: Mapping[int, float]) -> Iterable[Finding]:
    for problem, ranks in _by_value(problems).items():
        fact = f"these ranks {problem} below {root}, even after {_LOOK_S:g} s"
        advice = "mount the same shared file system at the same path on all hosts, writable for all"
        yield Finding(ONE, Severity.BAD, fact, "the first save fails on all ranks", advice, ranks=tuple(ranks))
    if not problems:
        yield fine(ONE, "all ranks see each other's files")
    late = {rank: after_s for rank, after_s in seen.items() if after_s > _LATE_S}
    if late:
        slowest = max(late, key=lambda rank: late[rank])
        fact = f"rank {slowest} and rank 0 see each other's new files only after {late[slowest]:.1f} s"
        cost = "a save fails if rank 0 does not see another rank's file at the commit"
        advice = "mount with shorter caching of attributes and names (NFS: actimeo, lookupcache=positive)"
        yield Finding(DELAY, Severity.SLOW, fact, cost, advice, {"seconds": late[slowest]}, tuple(sorted(late)))


def contend(agreement: Agreement, trial: Path, leaders: Sequence[int]) -> list[Finding]:
    """Lets some ranks try to take a lock that rank 0 holds. Then lets all these ranks try to make one file.

    `leaders` are these ranks, one of each host and mount, including rank 0.
    """
    if len(leaders) < 2:
        return []
    path, held = trial / "lock", -1
    found: list[Finding] = []

    def prepare() -> Record:
        nonlocal held
        if agreement.is_coordinator:
            write_file(path, [b"x"])
            held = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            with suppress(OSError):  # if this fails, locks do not work here, which another finding reports
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return {}

    def work() -> Record:
        if agreement.rank not in leaders:
            return {}
        lock = "held" if agreement.is_coordinator else _try_lock(path)
        return {"lock": lock, "made": _try_to_make(trial / "contended")}

    def combine(records: Sequence[Record]) -> Record:
        found.append(_of_locks({rank: records[rank]["lock"] for rank in leaders if rank != 0}))
        found.append(_of_winners([rank for rank in leaders if records[rank]["made"]]))
        return {}

    try:
        decide(agreement, "preparing a lock", prepare, lambda _: {})
        decide(agreement, "trying locks between hosts", work, combine)
    finally:
        if held >= 0:
            os.close(held)
    return found


def _try_lock(path: Path) -> str:
    """Returns "seen" if rank 0's lock keeps this process from taking the lock, otherwise "not seen" or the error."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        return f"cannot open the file: {error.strerror}"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "seen"
    except OSError as error:
        return f"not supported: {error.strerror}"
    finally:
        os.close(descriptor)
    return "not seen"


def _try_to_make(path: Path) -> bool:
    with suppress(OSError):
        claim_file(path, b"x")
        return True
    return False


def _of_locks(by_rank: Mapping[int, str]) -> Finding:
    others = {rank: text for rank, text in by_rank.items() if text != "seen"}
    if not others:
        return fine(FLOCK_BETWEEN, "a lock on one host is seen on all others")
    texts = _by_value(others)
    fact = "; ".join(
        f"rank 0's lock is {text}" if text == "not seen" else f"locks are {text}" for text in sorted(texts)
    )
    return Finding(
        FLOCK_BETWEEN,
        Severity.EMULATED,
        fact,
        "retention can delete a step while another host reads the step: the load then finds a file missing, and "
        "takes another step. A load never gets wrong bytes",
        "mount with locks that reach other hosts (NFS: local_lock=none; Lustre: flock; BeeGFS: "
        "tuneUseGlobalFileLocks=true)",
        ranks=tuple(sorted(others)),
    )


def _of_winners(winners: Sequence[int]) -> Finding:
    if len(winners) == 1:
        return fine(EXCLUSIVE_BETWEEN, "when all hosts tried to make one lock file at once, exactly one succeeded")
    fact = f"{len(winners)} ranks have made the same lock file"
    cost = "two trainers could save one role at once, and delete each other's checkpoints"
    return Finding(EXCLUSIVE_BETWEEN, Severity.BAD, fact, cost, "use another file system", ranks=tuple(winners))


def compare_clocks(agreement: Agreement, leaders: Sequence[int]) -> list[Finding]:
    """Compares the clocks of the hosts with rank 0's clock.

    The `leaders`, one rank of each host and mount, read their clocks between two readings of rank 0's clock. The clocks
    are compared with an error of at most half the time between these two readings.
    """
    if len(leaders) < 2:
        return []
    begin, found = 0.0, []

    def start(_: Sequence[Record]) -> Record:
        nonlocal begin
        begin = time.time()
        return {}

    def read() -> Record:
        return {"clock": time.time()} if agreement.rank in leaders else {}

    def combine(records: Sequence[Record]) -> Record:
        end = time.time()
        ahead = {rank: records[rank]["clock"] - (begin + end) / 2 for rank in leaders if rank != 0}
        found.append(_of_clocks(ahead, (end - begin) / 2))
        return {}

    decide(agreement, "comparing clocks", dict, start)
    decide(agreement, "comparing clocks", read, combine)
    return found


def _of_clocks(ahead: Mapping[int, float], error_s: float) -> Finding:
    most = max(ahead, key=lambda rank: abs(ahead[rank]))
    values = {"most_s": abs(ahead[most]), "error_s": error_s}
    apart = tuple(sorted(rank for rank, seconds in ahead.items() if abs(seconds) > CLOCK_S + error_s))
    if not apart:
        return fine(CLOCKS, f"at most {abs(ahead[most]):.1f} s from rank 0's clock (±{error_s:.1f} s)", **values)
    side = "ahead of" if ahead[most] > 0 else "behind"
    fact = f"rank {most}'s clock is {abs(ahead[most]):.0f} s {side} rank 0's clock (±{error_s:.1f} s)"
    cost = "dates in logs and manifests mislead people; this package itself does not compare the clocks of two hosts"
    return Finding(CLOCKS, Severity.RISK, fact, cost, "synchronise the clocks (NTP)", values, apart)


def _by_value(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        ranks.setdefault(text, []).append(rank)
    return ranks
