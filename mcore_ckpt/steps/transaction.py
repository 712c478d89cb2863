"""One save of all ranks, from an empty staging folder to a checkpoint in its place, or to the same error everywhere.

Two rounds: `open_together` on the trainer's thread, when all ranks are known to be there, and `commit_together`, when
all have written, on whatever thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import BusyError, CheckpointCorruptError, CheckpointNotFoundError, CommitError, from_record
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.steps import commit


@dataclass(frozen=True)
class Attempt:
    """One save of all ranks: its id, where it is written, and where it goes."""

    number: str
    staging: Path
    role_dir: Path


def open_together(
    agreement: Agreement,
    topic: str,
    role_dir: Path,
    busy: bool = False,
    failure: Record | None = None,
    prepare: Callable[[], object] = lambda: None,
) -> Attempt:
    """Rank 0 makes the staging folder, all learn of it.

    Args:
        agreement: this rank's seat on the trainer's thread.
        topic: what is being saved, for messages.
        role_dir: where the checkpoint goes; what is there stays whole until then.
        busy: on this rank an earlier save is still under way.
        failure: how an earlier save of this rank ended, if nobody was told yet (errors.to_record).
        prepare: on rank 0, what comes before the folder is made.

    Raises:
        BusyError: a rank is busy.
        EarlierSaveError: holds the failure that a rank was not told yet; on all ranks.
        CheckpointError: a rank is missing, or the folder cannot be made.
    """
    number = commit.new_attempt()

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere([{"folder": record["folder"]} for record in records], "the folder to save to", CommitError)
        for rank, record in enumerate(records):
            if record["busy"]:
                raise BusyError(f"{topic}: an earlier save is still under way on rank {rank}; wait for it first")
        failure = failure_among(records)
        if failure is not None:
            return {"failure": failure}
        prepare()
        commit.open_staging(role_dir, number)
        return {"attempt": number}

    told = {"folder": str(role_dir), "busy": busy, "failure": failure}
    try:
        outcome = decide(agreement, topic, lambda: told, combine, CommitError)
    except Exception:
        # Another rank may have given up after rank 0 has made the folder.
        commit.discard(file_names.staging_dir(role_dir, number))
        raise
    raise_failure(outcome)
    return Attempt(outcome["attempt"], file_names.staging_dir(role_dir, outcome["attempt"]), role_dir)


class EarlierSaveError(Exception):
    """A save that was under way has failed, and this is told now: on all ranks, instead of a new save."""

    def __init__(self, failure: Record) -> None:
        super().__init__(failure["message"])
        self.error = from_record(failure, CommitError)


def failure_among(records: Sequence[Record]) -> Record | None:
    """The first rank's whose earlier save has failed."""
    return next((record["failure"] for record in records if record["failure"]), None)


def raise_failure(outcome: Record) -> None:
    """Raises EarlierSaveError if that is what the ranks have agreed on."""
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
) -> None:
    """Every rank writes its files, rank 0 commits them.

    Args:
        agreement: this rank's seat, of the thread this is called on.
        topic: what is being saved, for messages.
        attempt: what was opened.
        write: this rank's part: writes files below the staging folder it is given, durably, and reports to rank 0.
            Where ranks may have several disks it begins with `check_seen`, in the first round that others wait in.
        describe: on rank 0, the manifest, from what all ranks told.
        after: on rank 0, once the checkpoint is in place, before the others are told. It must
            not raise: the checkpoint is there whatever happens to the tracker.

    Raises:
        CheckpointError: on all ranks the same type, a CommitError if nothing says otherwise. No checkpoint has come,
            and the one before is untouched.
    """

    def combine(records: Sequence[Record]) -> Record:
        commit.write_manifest(attempt.staging, describe(records))
        return {}

    def act() -> None:
        commit.publish(attempt.staging, attempt.role_dir, attempt.number)
        after()

    try:
        # By name: a rank that gave up alone in the opening round is not in this one, and must not be one behind after.
        decide(agreement, topic, lambda: write(attempt.staging), combine, CommitError, act, name=attempt.number)
    except Exception:
        # Rank 0 may have died, or this rank given up, between the rename and the word of it: the disk decides.
        if not _is_committed(attempt):
            if agreement.is_coordinator:
                commit.discard(attempt.staging)
            raise


def _is_committed(attempt: Attempt) -> bool:
    try:
        return read_manifest(attempt.role_dir).attempt == attempt.number
    except (CheckpointNotFoundError, CheckpointCorruptError):
        return False
