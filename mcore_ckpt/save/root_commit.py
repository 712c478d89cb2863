"""Commits a checkpoint in the root, with the export of its HuggingFace model if `save_contents` asks for one.

`root.py` does it with what the ranks write, `drain.py` with what they copy from the nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile
from mcore_ckpt.errors import HungDiskError
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.save.hf_export import completed, export_together
from mcore_ckpt.save.old_steps import OldSteps, find_old_steps
from mcore_ckpt.save.save_times import SaveTimes, with_export
from mcore_ckpt.steps.space_watch import Saving
from mcore_ckpt.steps.transaction import Attempt, commit_together
from mcore_ckpt.steps.upload_queue import UploadHandle

logger = logging.getLogger(__name__)


def commit_to_root(
    context: SaveContext,
    agreement: Agreement,
    topic: str,
    attempt: Attempt,
    write: Callable[[Path], Record],
    describe: Callable[[Sequence[Record]], Manifest],
    move_tracker: Callable[[], None],
    times: SaveTimes | None = None,
) -> list[WrittenFile]:
    """Lets every rank write its files, and commits them if the root's lock is still held. Every rank calls it.

    Args:
        context: what the saves of the manager share.
        agreement: connects this rank with the other ranks, on the calling thread.
        topic, attempt, write, describe: see `transaction.commit_together`.
        move_tracker: runs on rank 0 once the checkpoint is in place.
        times: notes when the export has ended, for the manifest's timeline. None: the timeline stays as it is.

    Returns:
        The files of the HuggingFace model that this rank has written.

    Raises what `commit_together` raises.
    """
    exported: list[WrittenFile] = []
    keep_lock = partial(context.lock.take, patience_s=0)

    def write_and_export(staging: Path) -> Record:
        exported.extend(
            export_together(
                agreement, context.trainer, staging, attempt.number, partial(write, staging), describe_if_held
            )
        )
        record: Record = {"files": [asdict(file) for file in exported]}
        if times is not None:
            times.mark("exported")
            record["exported"] = times.since_call("exported")
        return record

    def describe_if_held(records: Sequence[Record]) -> Manifest:
        keep_lock()
        return describe(records)

    def describe_export(records: Sequence[Record]) -> Manifest:
        keep_lock()
        manifest = completed(context.trainer, attempt.staging, records)
        if times is None or manifest.save_timeline is None:
            return manifest
        timeline = with_export(manifest.save_timeline, records, times.commit_span("exported"))
        return replace(manifest, save_timeline=timeline)

    exports = "hf_model" in context.trainer.config.save_contents
    commit_together(
        agreement,
        topic,
        attempt,
        write_and_export if exports else write,
        describe_export if exports else describe_if_held,
        move_tracker,
        keep_lock,
    )
    return exported


def upload(context: SaveContext, saving: Saving) -> UploadHandle | None:
    """Queues the upload of a committed checkpoint to the remote store.

    Returns None without a store, on all ranks except rank 0, and if the checkpoint is not part of a step.
    """
    if context.uploads is None or saving.policy is None:
        return None
    return context.uploads.committed(saving.step, saving.policy if context.trainer.config.prune_remote else None)


def old_steps(context: SaveContext, agreement: Agreement, saving: Saving) -> OldSteps | None:
    """Finds the steps that a commit has made too old. Returns None on all ranks except rank 0, and if a disk hangs."""
    if not agreement.is_coordinator or saving.policy is None:
        return None
    try:
        return agreement.runner.run(partial(find_old_steps, context, saving.role_dir, saving.step, saving.policy))
    except HungDiskError as error:
        logger.warning("old steps stay until the next save to the root: %s", error)
        return None
