"""Deletes old steps and the leftovers of dead processes, in the same way as a trainer with the same policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io import tuning
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.steps import leftovers
from mcore_ckpt.steps.listing import StepStatus, list_steps, read_tracker
from mcore_ckpt.steps.node_files import as_in_folder
from mcore_ckpt.steps.optimizer_files import drop_or_raise, find_dropped, remove_dropped
from mcore_ckpt.steps.retention import PreservationPolicy, RetentionDecision, delete_or_raise, judge
from mcore_ckpt.steps.runs import read_root_run
from mcore_ckpt.tools.examine.progress import Progress, no_progress


@dataclass(frozen=True)
class PrunedFolder:
    """A step or a leftover of a dead process, and whether it was deleted. The `step` of a leftover is None.

    `stays` is True if the folder was kept; in a dry run, if it would be kept. `failed` is True if the folder, or an
    optimizer in it, stays because it cannot be deleted. The roles in `loses` have lost (or would lose) their
    optimizers, `lost_bytes` bytes in all. `nbytes` is the size of the folder's other files in bytes.
    """

    path: Path
    step: int | None
    stays: bool
    reason: str
    nbytes: int
    loses: tuple[str, ...] = ()
    lost_bytes: int = 0
    failed: bool = False


def prune(
    root: Path,
    policy: PreservationPolicy,
    *,
    role: str | None = None,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> list[PrunedFolder]:
    """Deletes leftovers of dead processes, and the steps and optimizers that a trainer with this policy would delete.

    Args:
        policy: the rules by which steps stay. The newest complete step and the tracker's step always stay.
        role: only steps and leftovers of this role may be deleted; None for all roles. A step is deleted with all its
            roles.
        dry_run: True to delete nothing, and only to return the entries.
        progress: called after each deleted step, with the bytes of all steps deleted so far, and of all steps to
            delete.

    Returns one entry for each step and each leftover.

    Raises OSError: the steps cannot be listed.

    Example:
        >>> prune(Path("checkpoints"), PreservationPolicy(max_to_keep=2), dry_run=True)  # doctest: +SKIP
    """
    folders, statuses = [], as_in_folder(root, list_steps(root))
    judgements = [each for one in _by_run(root, statuses) for each in judge(one, policy, read_tracker(root))]
    decisions = [_of_role(each, role) for each in sorted(judgements, key=lambda each: each.status.step)]
    sizes = results_of([decision.status.place for decision in decisions], _nbytes, tuning.LOOK_THREADS)
    judged = list(zip(decisions, sizes, strict=True))
    done, total = 0, sum(nbytes for decision, nbytes in judged if not decision.stays)
    for decision, nbytes in judged:
        pruned = PrunedFolder(decision.status.path, decision.status.step, decision.stays, decision.reason, nbytes)
        if not pruned.stays:
            pruned = _deleted(pruned, decision.status, dry_run)
            done += nbytes
            progress(done, total)
        elif decision.loses:
            pruned = _without_optimizer(pruned, decision, dry_run)
        folders.append(pruned)
    for path in leftovers.find_leftovers(root, role):
        folders.append(_removed(path, dry_run, leftovers.remove_leftover))
    for path in _dropped_in(statuses, role):
        folders.append(_removed(path, dry_run, lambda path: remove_dropped(path.parent)))
    return folders


def _removed(path: Path, dry_run: bool, remove: Callable[[Path], object]) -> PrunedFolder:
    """Removes a leftover, unless `dry_run` is True. Returns the entry for the report."""
    nbytes = _nbytes(path)
    if not dry_run:
        remove(path)
    stays = not dry_run and os.path.lexists(path)
    reason = "left by a process that died" + (", but not all of it could be removed" if stays else "")
    return PrunedFolder(path, None, stays, reason, nbytes, failed=stays)


def _dropped_in(statuses: Sequence[StepStatus], role: str | None) -> list[Path]:
    """Returns the folders of optimizers that processes had begun to remove when they died."""
    roles = [(status, head.role) for status in statuses for head in status.heads if head.dropped]
    kept = [status.role_dir(name) for status, name in roles if role in (None, name)]
    return [path for role_dir in kept if role_dir.is_dir() for path in find_dropped(role_dir)]


def _by_run(root: Path, statuses: Sequence[StepStatus]) -> list[list[StepStatus]]:
    """Returns the steps of each run. Only a folder without identity, such as a node's folder, can have several runs."""
    if read_root_run(root) is not None:
        return [list(statuses)]
    found: dict[frozenset[str], list[StepStatus]] = {}
    for status in statuses:
        ids = frozenset(head.run.id for head in status.says.values() if head.run is not None)
        found.setdefault(ids, []).append(status)
    return list(found.values())


def _of_role(decision: RetentionDecision[StepStatus], role: str | None) -> RetentionDecision[StepStatus]:
    """Returns the decision with its effects limited to one role; for `None`, the unchanged decision.

    A step without the role stays, and no other role loses its optimizer.
    """
    if role is None:
        return decision
    if role in decision.status.committed | decision.status.declared:
        return replace(decision, loses=tuple(each for each in decision.loses if each == role))
    return replace(decision, stays=True, reason=f"without {role}", loses=())


def _deleted(pruned: PrunedFolder, status: StepStatus, dry_run: bool) -> PrunedFolder:
    """Deletes a step or, in a dry run, checks whether it could be deleted. Returns the entry for the report."""
    try:
        obstacle = delete_or_raise(status, dry_run)
    except OSError as error:
        return replace(pruned, stays=True, reason=f"cannot be deleted: {error}", failed=True)
    return pruned if obstacle is None else replace(pruned, stays=True, reason=obstacle)


def _without_optimizer(pruned: PrunedFolder, decision: RetentionDecision[StepStatus], dry_run: bool) -> PrunedFolder:
    """Removes a step's optimizers (in a dry run, only checks for obstacles). Returns the entry for the report."""
    status, roles = decision.status, decision.loses
    nbytes = sum(_nbytes(status.role_dir(role) / file_names.OPTIMIZER_DIR) for role in roles)
    try:
        obstacle = drop_or_raise(status, roles, dry_run)
    except (OSError, ValueError) as error:
        return replace(
            pruned, reason=f"{pruned.reason}; the optimizer of this step cannot be removed: {error}", failed=True
        )
    if obstacle is not None:
        return replace(pruned, reason=f"{pruned.reason}; the optimizer of this step stays for now: {obstacle}")
    what = f"; loses the optimizer of {', '.join(roles)}"
    return replace(pruned, nbytes=pruned.nbytes - nbytes, loses=roles, lost_bytes=nbytes, reason=pruned.reason + what)


def _nbytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
