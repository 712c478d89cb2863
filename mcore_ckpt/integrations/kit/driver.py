"""Helps a driver, which is a single process, to commit its own role of a step, and to find complete steps.

The driver's role holds the driver's files, such as the data position. Other processes commit the roles of the models.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import TRACKER_FILE, find_damage, parse_step
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.io import DiskWatch
from mcore_ckpt.ranks import Agreement, single_process_agreement
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import (
    PreservationPolicy,
    RoleWriter,
    StepStatus,
    commit_role,
    delete_old_steps,
    list_steps,
    move_tracker,
    remove_leftovers,
    rules_of_others,
    step_status,
)

logger = logging.getLogger(__name__)


def driver_agreement(role: str, timeout_s: float) -> Agreement:
    """Returns an agreement of this process alone, even if this process belongs to a process group.

    With this agreement, a commit raises HungDiskError once a single call to the disk has lasted `timeout_s` seconds.
    Otherwise the driver, and with it the whole training, would wait for ever.
    """
    agreement = single_process_agreement(role, timeout_s)
    agreement.runner = DiskWatch(timeout_s, who=f"{role}: ")
    return agreement


def commit_driver_files(
    role_dir: Path,
    step: int,
    source: Path,
    roles: Sequence[str] | Callable[[], Sequence[str]],
    timeout_s: float,
    metrics: Mapping[str, float],
) -> None:
    """Commits all files below `source` as the driver's role. Moves the tracker if the step is then complete.

    Args:
        role_dir: the role's folder in the step's folder.
        step: the step's number.
        source: the folder with the driver's files.
        roles: the step's other roles, as in `commit_role`.
        timeout_s: see CheckpointConfig.
        metrics: the step's metrics by name, for `keep_best`.

    Raises CommitError: the files could not be written. Nothing has been committed.
    """
    root, role = role_dir.parents[1], role_dir.name
    commit_role(
        # This commit takes no trainer lock, because the locks of the models' roles protect the driver's role, too.
        driver_agreement(role, timeout_s),
        role_dir,
        step,
        roles,
        lambda files: copy_files(source, files),
        before=lambda: remove_leftovers(root, role, alone=True),
        after=lambda: move_tracker(root, step),
        stamp=partial(replace, metrics=dict(metrics)),
    )


def finite_metrics(metrics: Mapping[str, Any], names: Collection[str]) -> dict[str, float]:
    """Returns the metrics with these names. A metric that is missing, or that is not a finite number, is left out."""
    found = {name: metrics[name] for name in names if name in metrics}
    numbers = {
        name: value for name, value in found.items() if type(value) is not bool and isinstance(value, int | float)
    }
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def copy_files(source: Path, files: RoleWriter) -> None:
    """Writes all files below a folder, under their paths relative to that folder. Raises OSError."""
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        files.write(path.relative_to(source).as_posix(), path.read_bytes())


def is_complete_step(path: Path, advice: str) -> bool:
    """True if a path is the folder of a complete step of ours; False if the path is not a step of ours.

    Raises CheckpointNotFoundError: the path is a step of ours that is not complete. The message ends with `advice`.
    """
    if parse_step(path.name) is None or not path.is_dir():
        return False
    status = step_status(path)
    if not status.committed | status.declared:
        return False
    if not status.is_complete:
        raise CheckpointNotFoundError(f"{status.reason}. {advice}")
    return True


def newest_valid(root: Path, driver_role: str, verify: bool) -> Path | None:
    """Returns the newest step of this package that is complete and intact; None if no step was ever complete.

    `verify` reads all files and checks their CRCs. Otherwise only the sizes are checked, and a load checks the CRCs of
    the bytes that it reads.

    Raises:
        CheckpointNotFoundError: there are steps, but none of them is complete and intact.
        CheckpointCorruptError: no step is complete, and files of a committed step are missing.
    """
    if _first_was_interrupted(root):
        logger.warning("%s: the first checkpoint was never complete, so it is not loaded", root)
        return None
    reasons = []
    for status in resumable_steps(root, (driver_role,)):
        problem = _problem(status, verify)
        if problem is None:
            return status.path
        logger.warning("%s is skipped, and older checkpoints are tried: %s", status.path, problem)
        reasons.append(problem)
    if reasons:
        raise CheckpointNotFoundError("\n  ".join([f"{root}: no checkpoint is valid", *reasons]))
    return None


def was_ever_complete(root: Path) -> bool:
    """True if a step of this package below `root` is complete, was complete, or may have been.

    A complete step would have written the tracker.
    """
    return (root / TRACKER_FILE).exists() or any(status.problems or status.is_complete for status in list_steps(root))


def _first_was_interrupted(root: Path) -> bool:
    """True if roles are committed, but no step was ever complete.

    With an asynchronous save, the driver may have committed before the models.
    """
    return not was_ever_complete(root) and any(status.committed for status in list_steps(root))


def _problem(status: StepStatus, verify: bool) -> str | None:
    for role in sorted(status.committed):
        damages = find_damage(status.role_dir(role), read_bytes=verify)
        if damages:
            return damages[0].problem
    return None


def delete_after_driver(root: Path, role: str, config: CheckpointConfig, step: int) -> None:
    """Deletes old steps if the driver's role has made this step complete. Errors of the disk are logged, not raised.

    Steps that the rules of other roles keep are not deleted. The models' processes delete old steps before this step is
    complete, so they do not count this step, and leave one step too many.
    """
    policy = PreservationPolicy.of(config)
    if policy.max_to_keep is None and policy.optimizer_for_last is None:
        return
    try:
        if any(status.is_complete for status in list_steps(root, step)):
            delete_old_steps(root, policy, step, others=rules_of_others(root, role))
    except OSError as error:
        logger.warning("%s: old steps could not be deleted: %s", root, error)
