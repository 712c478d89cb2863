"""Commits a checkpoint in the root, and finds what follows: the upload, and the steps that are too old now.

`root.py` commits files that the ranks write. `drain.py` commits files that the ranks copy from the nodes. If
`save_contents` asks for a HuggingFace model, the model is exported before the commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile
from mcore_ckpt.errors import HungDiskError
from mcore_ckpt.events import Deleted
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.save.hf_export import completed, export_together
from mcore_ckpt.save.save_times import SaveTimes, with_export
from mcore_ckpt.steps.listing import StepStatus, heads_at, list_steps
from mcore_ckpt.steps.retention import (
    PreservationPolicy,
    RetentionDecision,
    delete_step,
    judge_together,
    remove_optimizers,
)
from mcore_ckpt.steps.role_rules import note_rules, rules_of_others
from mcore_ckpt.steps.space_watch import Saved, Saving
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
    """Lets every rank write its files, and commits the files if the root's lock is still held.

    Every rank calls this function.

    Args:
        context: what the saves of the manager share.
        agreement, topic, attempt, write, describe: see `transaction.commit_together`. This function raises the errors
            of `commit_together`.
        move_tracker: runs on rank 0 once the checkpoint is in place.
        times: notes when the export has ended, for the manifest's timeline; None to leave the timeline unchanged.

    Returns the files of the HuggingFace model that this rank has written.
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
            record["exported"] = times.in_us()["export"][1]
        return record

    def describe_if_held(records: Sequence[Record]) -> Manifest:
        keep_lock()
        return describe(records)

    def describe_export(records: Sequence[Record]) -> Manifest:
        keep_lock()
        manifest = completed(context.trainer, attempt.staging, records)
        if times is None or manifest.save_timeline is None:
            return manifest
        timeline = with_export(manifest.save_timeline, records, times.in_us()["commit"])
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
    """Finds the steps that a commit has made too old. Ends the protection of the step that the training went on from.

    Returns None on all ranks except rank 0, if a disk hangs, and if the checkpoint is not part of a step.
    """
    if not agreement.is_coordinator:
        return None
    try:
        return agreement.runner.run(partial(_find_old_steps, context, saving))
    except HungDiskError as error:
        logger.warning("old steps stay until the next save to the root: %s", error)
        return None


@dataclass(frozen=True, eq=False)
class OldSteps:
    """The steps to delete after one commit.

    Attributes:
        found: the decisions for the steps that will be deleted, or lose their optimizer. Another process may delete or
            pin these steps meanwhile.
        saved: the argument for `SpaceWatch.foresee`, which is called after the deletion; None if no call is needed.
    """

    context: SaveContext
    found: tuple[RetentionDecision[StepStatus], ...]
    saved: Saved | None

    def delete(self) -> None:
        """Deletes steps and optimizers. Then a thread of `SpaceWatch` checks whether the next save will fit."""
        for status in (decision.status for decision in self.found if not decision.stays):
            started = time.perf_counter()
            obstacle = delete_step(status)
            if obstacle is not None:
                logger.info("step %d is too old, but stays for now: %s", status.step, obstacle)
            else:
                self._tell(status, time.perf_counter() - started)
        remove_optimizers(self.found)
        if self.saved is not None:
            self.context.space_watch.foresee(self.saved)

    def _tell(self, status: StepStatus, seconds: float) -> None:
        trainer = self.context.trainer
        self.context.delivery.post(
            Deleted(
                step=status.step,
                role=trainer.role,
                rank=trainer.agreement.rank,
                path=status.path,
                time=time.time(),
                seconds=seconds,
            )
        )


def _find_old_steps(context: SaveContext, saving: Saving) -> OldSteps | None:
    """Finds the steps to delete after a commit. Warns if there are no such steps and the next save will not fit.

    This search runs right after the commit. It cannot wait until the deletion begins, because a later save with another
    policy may be committed by then.
    """
    role_dir, step, policy = saving.role_dir, saving.step, saving.policy
    with suppress(OSError):  # the next save tries this again
        for head in heads_at(role_dir):
            context.history.in_root(head)
            if policy is not None and len(head.roles) > 1:
                note_rules(context.trainer.root, head.role, policy)
    if policy is None:
        return None
    found: tuple[RetentionDecision[StepStatus], ...] = ()
    deletes = False
    if policy.max_to_keep is not None or policy.optimizer_for_last is not None:
        try:
            # The commit has just looked at all files of this role, so `having_seen` marks the role as seen, which saves
            # a second look.
            statuses = [status.having_seen(role_dir) for status in list_steps(context.trainer.root)]
            others = rules_of_others(context.trainer.root, context.trainer.role)
            found = _to_do(statuses, policy, others, step)
            deletes = bool(_to_do(_with_whole(statuses, step), policy, others, step))
        except OSError as error:
            logger.warning("the checkpoint is committed, but old steps could not be deleted: %s", error)
            deletes = True  # the next save, or another process, deletes them
    return OldSteps(context, found, context.space_watch.committed(role_dir, step, deletes))


def _to_do(
    statuses: Sequence[StepStatus], policy: PreservationPolicy, others: Mapping[str, PreservationPolicy], step: int
) -> tuple[RetentionDecision[StepStatus], ...]:
    return tuple(each for each in judge_together(statuses, policy, others, step) if not each.stays or each.loses)


def _with_whole(statuses: Sequence[StepStatus], step: int) -> list[StepStatus]:
    """Returns the statuses as they will be when all roles of a step are committed."""
    return [_whole(status) if status.step == step else status for status in statuses]


def _whole(status: StepStatus) -> StepStatus:
    says = {role: head for role, head in status.says.items() if role not in status.missing}
    return replace(status, committed=status.committed | status.declared, seen=status.declared, says=says)
