"""Finds the steps that are too old after a commit, and deletes them later, beside the next save. Only for rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.events import Deleted
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.steps.listing import StepStatus, list_steps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_step, too_old
from mcore_ckpt.steps.space_watch import Saved

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class OldSteps:
    """The steps to delete after one commit.

    Attributes:
        context: what the saves of the manager share.
        found: the steps. Another process may delete or pin them meanwhile.
        saved: what `SpaceWatch` needs once they are deleted; None if it need not look.
    """

    context: SaveContext
    found: tuple[StepStatus, ...]
    saved: Saved | None

    def delete(self) -> None:
        """Deletes the steps. Then `SpaceWatch` looks, on a thread of its own, whether the next save will fit."""
        for status in self.found:
            started = time.perf_counter()
            obstacle = delete_step(status)
            if obstacle is not None:
                logger.info("step %d is too old, but stays for now: %s", status.step, obstacle)
            else:
                self._tell(status, time.perf_counter() - started)
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


def find_old_steps(context: SaveContext, role_dir: Path, step: int, policy: PreservationPolicy) -> OldSteps:
    """Finds the steps to delete after a commit, and warns if there are none and the next save will not fit.

    Call it at the commit and not when the deletion begins, because a later save with another policy may be committed
    by then.

    Args:
        context: what the saves of the manager share.
        role_dir, step: what has been committed.
        policy: which steps stay.
    """
    found: tuple[StepStatus, ...] = ()
    deletes = False
    if policy.max_to_keep is not None:
        try:
            # The commit has just looked at all files of this role.
            statuses = [status.having_seen(role_dir) for status in list_steps(context.trainer.root)]
            found = tuple(too_old(statuses, policy, step))
            deletes = bool(too_old(_with_whole(statuses, step), policy, step))
        except OSError as error:
            logger.warning("the checkpoint is committed, but old steps could not be deleted: %s", error)
            deletes = True  # by the next save, or by another process
    return OldSteps(context, found, context.space_watch.committed(role_dir, step, deletes))


def _with_whole(statuses: Sequence[StepStatus], step: int) -> list[StepStatus]:
    """Returns the statuses as they will be when all roles of a step are committed."""
    return [_whole(status) if status.step == step else status for status in statuses]


def _whole(status: StepStatus) -> StepStatus:
    says = {role: head for role, head in status.says.items() if role not in status.missing}
    return replace(status, committed=status.committed | status.declared, seen=status.declared, says=says)
