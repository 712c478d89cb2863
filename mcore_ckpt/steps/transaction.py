"""Leads all ranks through one save, which ends with a committed checkpoint or with the same error on every rank.

A save has two rounds. `open_together` runs on the trainer's thread and makes the staging folder once all ranks have
called it. `commit_together` runs on any thread, lets each rank write, and commits once all ranks have written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import (
    BusyError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CommitError,
    HungDiskError,
    InvalidArgumentError,
    from_record,
)
from mcore_ckpt.interrupts import is_interrupt
from mcore_ckpt.io.disk_space import NOTHING, Need
from mcore_ckpt.ranks.rounds import Agreement, Record, Started, decide, same_everywhere
from mcore_ckpt.steps import commit


@dataclass(frozen=True)
class Attempt:
    """One save of all ranks.

    Attributes:
        number: the id of the save (`commit.new_attempt`).
        staging: the folder that ranks write into.
        role_dir: the role's folder, where the checkpoint is after the commit.
        is_late: true if the trainer went on before the disk had answered. Then `await_opening` must be called next.
        opening: on rank 0, the work that makes the staging folder while the trainer goes on.
    """

    number: str
    staging: Path
    role_dir: Path
    is_late: bool = False
    opening: Started[object] | None = None


def open_together(
    agreement: Agreement,
    topic: str,
    role_dir: Path,
    busy: bool = False,
    failure: Record | None = None,
    prepare: Callable[[Need], object] = lambda need: None,
    need: Need = NOTHING,
    parts: Sequence[str] = (),
    number: str | None = None,
    folder_mode: Callable[[], int | None] = lambda: None,
    patience_s: float = math.inf,
    skips: bool = False,
) -> Attempt:
    """Waits for all ranks, then makes the staging folder on rank 0. Every rank must call this function.

    Args:
        agreement: connects this rank with the other ranks that save, on the trainer's thread.
        topic: what is being saved, for messages.
        role_dir: the role's folder. If the folder already holds a checkpoint, that checkpoint stays intact until the
            commit.
        busy: true if an earlier save is still under way on this rank.
        failure: the error of an earlier save that has failed on this rank, as `errors.to_record` returns it; None if no
            save has failed, or if the trainer knows the error already.
        prepare: runs on rank 0 before the folder is made. Its argument is the sum of the `need` of all ranks.
        need: the files that this rank will write.
        parts: the names of the parts of the step that this rank will save.
        number: the id of the save, on all ranks; None for a new id. If an id is given, the round is named after this
            id. So a rank that has failed earlier can fail the round by its name (`Agreement.fail_next_round`), and need
            not call this function.
        folder_mode: returns, on rank 0, the mode of new folders, as in `commit.open_staging`.
        patience_s: for how long one call to the file system may hold up the ranks, in seconds. After this time, the
            ranks go on without the folder, and rank 0 makes the folder meanwhile. If the folder cannot be made,
            `await_opening` raises the error.
        skips: whether this save is skipped if an earlier save is under way. All ranks must pass the same value.

    Raises:
        BusyError: an earlier save is still under way on some rank, and `skips` is false.
        SkippedSave: an earlier save is still under way on some rank, and `skips` is true.
        EarlierSaveError: an earlier save failed on some rank. All ranks raise it.
        InvalidArgumentError: parts of two ranks differ only in upper and lower case.
        CheckpointError: a rank is missing, or the folder cannot be made.
    """
    name = number and opening_of(number)
    number = number or commit.new_attempt()
    openings: list[Started[object]] = []
    begun: list[Need] = []

    def open_now() -> None:
        prepare(begun[0])
        commit.open_staging(role_dir, number, folder_mode())

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere([{"folder": record["folder"]} for record in records], "the folder to save to", CommitError)
        refusal = refusal_among(topic, records, skips)
        if refusal is not None:
            return refusal
        begun.append(Need.sum(_need_of(record["need"]) for record in records))
        openings.append(agreement.runner.start(open_now))
        if not openings[0].wait(patience_s):
            return {"attempt": number, "late": True}
        openings[0].result()
        return {"attempt": number, "late": False}

    request = {"folder": str(role_dir), "busy": busy, "failure": failure, "need": record_of(need), "parts": list(parts)}
    try:
        outcome = decide(agreement, topic, lambda: request, combine, CommitError, name=name)
    except BaseException as error:
        # Rank 0 may have made the folder before the round failed, so remove the folder.
        if begun and not isinstance(error, HungDiskError):
            agreement.runner.run(lambda: commit.discard(file_names.staging_dir(role_dir, number)))
        raise
    raise_refusal(outcome)
    staging, is_late = file_names.staging_dir(role_dir, outcome["attempt"]), outcome["late"]
    return Attempt(outcome["attempt"], staging, role_dir, is_late, openings[0] if openings and is_late else None)


def await_opening(agreement: Agreement, topic: str, attempt: Attempt) -> None:
    """Every rank waits here until rank 0 has made the staging folder, if `open_together` has gone on without it.

    Raises the errors that `open_together` would have raised.
    """
    if not attempt.is_late:
        return

    def work() -> Record:
        if attempt.opening is not None:
            attempt.opening.result()
        return {}

    decide(agreement, topic, work, lambda _: {}, CommitError, name=late_opening_of(attempt.number))


def opening_of(number: str) -> str:
    """Returns the name of the round in which `open_together` opens a save with this id."""
    return f"{number}-opening"


def late_opening_of(number: str) -> str:
    """Returns the name of the round in which `await_opening` waits for a save with this id."""
    return f"{number}-opened"


def record_of(need: Need) -> Record:
    """Returns a need as JSON values, which a rank can send."""
    return {"sizes": list(need.sizes), "folders": sorted(need.folders), "loose": need.loose}


def _need_of(record: Record) -> Need:
    return Need(tuple(record["sizes"]), frozenset(record["folders"]), record["loose"])


class EarlierSaveError(Exception):
    """An earlier save failed in the background. All ranks raise this error instead of beginning a new save.

    Attributes:
        error: the error of that save.
    """

    def __init__(self, failure: Record) -> None:
        super().__init__(failure["message"])
        self.error = from_record(failure, CommitError)


class SkippedSave(Exception):
    """An earlier save is under way, so all ranks skip the new save.

    Attributes:
        reason: says on which rank the earlier save is under way.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def refusal_among(topic: str, records: Sequence[Record], skips: bool) -> Record | None:
    """Returns the outcome of an opening round in which no save begins; None if a save begins.

    Args:
        topic: what is being saved, for messages.
        records: what each rank has submitted: `busy` says whether an earlier save is under way, `failure` is the error
            of an earlier save that failed, and `parts` has the names of the parts to save.
        skips: whether the save is skipped if an earlier save is under way.

    Raises BusyError if an earlier save is under way on some rank and `skips` is false; the error names the first such
    rank. Raises InvalidArgumentError if parts of two ranks differ only in upper and lower case.
    """
    busy = next((rank for rank, record in enumerate(records) if record["busy"]), None)
    if busy is not None and skips:
        return {"skipped": f"an earlier save is still under way on rank {busy}"}
    if busy is not None:
        raise BusyError(f"{topic}: an earlier save is still under way on rank {busy}; wait for it first")
    failure = failure_among(records)
    if failure is not None:
        return {"failure": failure}
    _check_parts(topic, records)
    return None


def _check_parts(topic: str, records: Sequence[Record]) -> None:
    """Checks across ranks what `AttachedParts.attach` checks on each rank. Raises InvalidArgumentError."""
    seen: dict[str, tuple[str, int]] = {}
    for rank, record in enumerate(records):
        for part in record["parts"]:
            other, of_rank = seen.setdefault(part.lower(), (part, rank))
            if other != part:
                raise InvalidArgumentError(
                    f"{topic}: part {part!r} of rank {rank} differs from part {other!r} of rank {of_rank} only in "
                    "upper and lower case, and some file systems treat both names as one: use the same name on both "
                    "ranks, or another name on one of them"
                )


def raise_refusal(outcome: Record) -> None:
    """Raises EarlierSaveError or SkippedSave if the ranks agreed that no save begins."""
    raise_failure(outcome)
    if "skipped" in outcome:
        raise SkippedSave(outcome["skipped"])


def failure_among(records: Sequence[Record]) -> Record | None:
    """Returns the failure of the first rank whose earlier save failed, or None."""
    return next((record["failure"] for record in records if record["failure"]), None)


def raise_failure(outcome: Record) -> None:
    """Raises EarlierSaveError if the ranks agreed that an earlier save failed."""
    if "failure" in outcome:
        raise EarlierSaveError(outcome["failure"])


def check_seen(staging: Path) -> None:
    """Raises CommitError if this rank does not see the staging folder."""
    if not staging.is_dir():
        raise CommitError(f"{staging}, made by rank 0, cannot be seen: all ranks must save to one shared file system")


def commit_together(
    agreement: Agreement,
    topic: str,
    attempt: Attempt,
    write: Callable[[Path], Record],
    describe: Callable[[Sequence[Record]], Manifest],
    after: Callable[[], object],
    may_commit: Callable[[], object] = lambda: None,
) -> None:
    """Lets every rank write its files, then commits the files on rank 0. Every rank must call this function.

    Args:
        agreement: connects this rank with the other ranks that save, on the calling thread.
        topic: what is being saved, for messages.
        attempt: the result of `open_together`.
        write: writes this rank's files below the staging folder, durably, and returns a record for rank 0. If the ranks
            might have different disks, `write` must call `check_seen` first, so that the error makes this round fail.
        describe: runs on rank 0 and makes the manifest from the records of all ranks.
        after: runs on rank 0 once the checkpoint is in place, before the other ranks continue. It must not raise,
            because the checkpoint is committed even if, for instance, the tracker cannot be moved.
        may_commit: runs on rank 0 right before the rename, and raises if this process does not hold the lock any more.

    Raises:
        CheckpointError: the save failed. All ranks raise the same type: CommitError, or the CheckpointError that a rank
            raised. There is no new checkpoint, and the previous checkpoint is untouched.
    """

    def combine(records: Sequence[Record]) -> Record:
        commit.write_manifest(attempt.staging, describe(records))
        return {}

    def act() -> None:
        may_commit()
        commit.publish(attempt.staging, attempt.role_dir, attempt.number)
        after()

    try:
        # The ranks match their rounds by counting them, except for rounds with a name. This round needs a name: if
        # `open_together` fails on one rank only, that rank misses this round and would count one round less than the
        # other ranks.
        decide(agreement, topic, lambda: write(attempt.staging), combine, CommitError, act, name=attempt.number)
    except HungDiskError:
        raise  # do not look at the disk, because that would hang, too
    except BaseException as error:
        # Rank 0 may have renamed the folder and then died, or announced the rename too late for this rank. So look at
        # the disk to see whether the checkpoint is committed.
        committed = agreement.runner.run(lambda: is_committed(attempt))
        if not committed and agreement.is_coordinator:
            agreement.runner.run(lambda: commit.discard(attempt.staging))
        if not committed or is_interrupt(error):
            raise


def is_committed(attempt: Attempt) -> bool:
    """Returns True if the role's folder holds the checkpoint of this save."""
    try:
        return read_manifest(attempt.role_dir).attempt == attempt.number
    except (CheckpointNotFoundError, CheckpointCorruptError):
        return False
