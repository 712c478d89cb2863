"""Commits the driver's role of a ROLL checkpoint, and finds complete checkpoints.

`checkpoint-{N}` is a step with one role for each cluster and one for the driver. ROLL saves the driver's role last. The
step is complete once all roles are committed. The driver's files contain the data position
(`worker_state_pipeline.json`: step, metrics, the state of the prompts' schedulers). If weights of one step were paired
with the data position of another, training would use some prompts twice and others never.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import TRACKER_FILE, find_damage, parse_step
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.integrations.kit.driver import driver_agreement
from mcore_ckpt.integrations.roll.options import PIPELINE_ROLE, step_of
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import (
    RoleWriter,
    StepStatus,
    commit_role,
    list_steps,
    move_tracker,
    remove_leftovers,
    roles_begun,
    step_status,
)

logger = logging.getLogger(__name__)

_STATE_FILE = f"worker_state_{PIPELINE_ROLE}.json"  # written by WorkerState.save_to_json


def commit_pipeline(
    root: Path,
    ckpt_id: str,
    source: Path,
    roles: Sequence[str] | None,
    timeout_s: float,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Commits the driver's files as `<root>/<ckpt_id>/pipeline`. Moves the tracker if the step is then complete.

    Args:
        root: the folder of all steps.
        ckpt_id: `checkpoint-{N}`.
        source: the folder with the driver's files.
        roles: the clusters that the step consists of; None: the clusters whose roles are committed or being saved.
        timeout_s: see CheckpointConfig.
        metrics: the step's metrics by name, for `keep_best`.

    Raises CommitError: the files could not be written. Nothing has been committed.
    """
    step_path, step = root / ckpt_id, step_of(ckpt_id)

    def roles_of_step() -> Sequence[str]:
        return sorted(roles_begun(step_path) - {PIPELINE_ROLE}) if roles is None else roles

    commit_role(
        # The clusters' trainer locks protect the driver's role, too.
        driver_agreement(PIPELINE_ROLE, timeout_s),
        step_path / PIPELINE_ROLE,
        step,
        roles_of_step,
        lambda files: copy_files(source, files),
        before=lambda: remove_leftovers(root, PIPELINE_ROLE, alone=True),
        after=lambda: move_tracker(root, step),
        stamp=partial(replace, metrics=dict(metrics or {})),
    )


def logged_metrics(source: Path, names: Collection[str]) -> dict[str, float]:
    """Returns the values of these metrics that the driver has logged last, from the driver's files in a folder.

    A metric that is missing, or that is not a finite number, is left out.
    """
    history: Any = []
    with suppress(OSError, ValueError):
        history = json.loads((source / _STATE_FILE).read_text(encoding="utf-8")).get("log_history")
    last = history[-1] if isinstance(history, list) and history and isinstance(history[-1], dict) else {}
    found = {name: last[name] for name in names if type(last.get(name)) in (int, float)}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def copy_files(source: Path, files: RoleWriter) -> None:
    """Writes all files below a folder, under their paths relative to that folder. Raises OSError."""
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        files.write(path.relative_to(source).as_posix(), path.read_bytes())


def newest_valid(root: Path, verify: bool) -> Path | None:
    """Returns the newest `checkpoint-{N}` that is complete and intact; None if there never was one.

    `verify` reads all files and checks their CRCs. Otherwise only the sizes are checked, and a load checks the CRCs of
    the bytes that it reads.

    Raises CheckpointNotFoundError: there are checkpoints, but none of them is complete and intact.
    """
    if _first_was_interrupted(root):
        logger.warning("%s: the first checkpoint was never complete, so training starts from the beginning", root)
        return None
    reasons = []
    for status in resumable_steps(root, (PIPELINE_ROLE,)):
        problem = _problem(status, verify)
        if problem is None:
            return status.path
        logger.warning("%s is skipped, and older checkpoints are tried: %s", status.path, problem)
        reasons.append(problem)
    if reasons:
        raise CheckpointNotFoundError("\n  ".join([f"{root}: no checkpoint is valid", *reasons]))
    return None


def _first_was_interrupted(root: Path) -> bool:
    """True if roles are committed, but no step was ever complete. A complete step would have written the tracker."""
    statuses = list_steps(root)
    began = any(status.committed for status in statuses) and not any(status.problems for status in statuses)
    driver = any(PIPELINE_ROLE in status.committed for status in statuses)
    return began and not driver and not (root / TRACKER_FILE).exists()


def _problem(status: StepStatus, verify: bool) -> str | None:
    for role in sorted(status.committed):
        damages = find_damage(status.role_dir(role), read_bytes=verify)
        if damages:
            return damages[0].problem
    return None


def role_folder(load_dir: Path, role: str) -> Path | None:
    """Returns a role's folder in the checkpoint that ROLL names; None if the checkpoint is not ours.

    ROLL passes `<checkpoint>` to actors and `<checkpoint>/<cluster>` to critics and students.

    Raises CheckpointNotFoundError: the checkpoint is ours, but not complete, or it does not have the role.
    """
    step_path = load_dir.parent if load_dir.name == role else load_dir
    if parse_step(step_path.name) is None or not step_path.is_dir():
        return None
    status = step_status(step_path)
    if not status.committed | status.declared and not status.problems:
        return None
    if not status.is_complete or role not in status.committed:
        missing = f"{step_path}: complete, but without {role}" if status.is_complete else status.reason
        raise CheckpointNotFoundError(
            f"{missing}. To load the newest complete checkpoint, use resume_from_checkpoint: true"
        )
    return status.role_dir(role)
