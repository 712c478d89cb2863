"""One save of all ranks, from an empty staging folder to a checkpoint in its place, or to the same error everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mcore_ckpt import layout
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CommitError
from mcore_ckpt.storage import commit
from mcore_ckpt.storage.agreement import Agreement, Record, decide, same_everywhere
from mcore_ckpt.storage.manifest import Manifest, encode_manifest
from mcore_ckpt.storage.reader import read_manifest


def commit_together(
    agreement: Agreement,
    topic: str,
    role_dir: Path,
    prepare: Callable[[], None],
    write: Callable[[Path], Record],
    describe: Callable[[Path, str, Sequence[Record]], Manifest],
    after: Callable[[], object],
) -> None:
    """Every rank writes its files, rank 0 commits them.

    Args:
        agreement: this rank's seat.
        topic: what is being saved, for messages.
        role_dir: where the checkpoint goes; what is there stays whole until then.
        prepare: a collective of the trainer. Called when all ranks are known to be there, and before anything that one
            of them may fail at alone.
        write: this rank's part: writes files below the staging folder it is given, durably, and reports to rank 0.
        describe: on rank 0, the manifest, from the staging folder, the attempt's id, and what all ranks told.
        after: on rank 0, once the checkpoint is in place, before the others are told. It must
            not raise: the checkpoint is there whatever happens to the tracker.

    Raises:
        CheckpointError: on all ranks the same type, a CommitError if nothing says otherwise. No checkpoint has come,
            and the one before is untouched.
    """
    attempt = _open_together(agreement, topic, role_dir)
    staging = layout.staging_dir(role_dir, attempt)

    def work() -> Record:
        prepare()
        if not staging.is_dir():
            raise CommitError(
                f"{staging}, made by rank 0, cannot be seen: all ranks must save to one shared file system"
            )
        return write(staging)

    def combine(records: Sequence[Record]) -> Record:
        commit.seal(staging, encode_manifest(describe(staging, attempt, records)))
        return {}

    def act() -> None:
        commit.publish(staging, role_dir, attempt)
        after()

    try:
        decide(agreement, topic, work, combine, CommitError, act)
    except Exception:
        # Rank 0 may have died, or this rank given up, between the rename and the word of it: the disk decides.
        if not _is_committed(role_dir, attempt):
            if agreement.is_coordinator:
                commit.discard(staging)
            raise


def _open_together(agreement: Agreement, topic: str, role_dir: Path) -> str:
    """The first round: rank 0 makes the staging folder, all learn the attempt's id."""
    attempt = commit.new_attempt()

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere(records, "the folder to save to", CommitError)
        commit.open_staging(role_dir, attempt)
        return {"attempt": attempt}

    try:
        return decide(agreement, topic, lambda: {"folder": str(role_dir)}, combine, CommitError)["attempt"]
    except Exception:
        # Another rank may have given up after rank 0 has made the folder.
        commit.discard(layout.staging_dir(role_dir, attempt))
        raise


def _is_committed(role_dir: Path, attempt: str) -> bool:
    try:
        return read_manifest(role_dir, layout.MANIFEST_FILE).attempt == attempt
    except (CheckpointNotFoundError, CheckpointCorruptError):
        return False
