"""Commits the driver's role of a ROLL checkpoint, and finds the folder of a role.

`checkpoint-{N}` is a step with one role for each cluster and one for the driver. ROLL saves the driver's role last. The
step is complete once all roles are committed. The driver's files contain the data position
(`worker_state_pipeline.json`: step, metrics, the state of the prompts' schedulers). If weights of one step were paired
with the data position of another step, training would use some prompts twice and other prompts never.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import parse_step
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.integrations.kit.driver import commit_driver_files, finite_metrics
from mcore_ckpt.integrations.roll.options import PIPELINE_ROLE, step_of
from mcore_ckpt.steps import roles_begun, step_status

# The advice in messages about a checkpoint that cannot be loaded.
RESUME_NEWEST = "To load the newest complete checkpoint, use resume_from_checkpoint: true"

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
    step_path = root / ckpt_id

    def roles_of_step() -> Sequence[str]:
        return sorted(roles_begun(step_path) - {PIPELINE_ROLE}) if roles is None else roles

    commit_driver_files(step_path / PIPELINE_ROLE, step_of(ckpt_id), source, roles_of_step, timeout_s, metrics or {})


def logged_metrics(source: Path, names: Collection[str]) -> dict[str, float]:
    """Returns the values that the driver has logged last for the metrics `names`. `source` has the driver's files.

    A metric that is missing, or that is not a finite number, is left out.
    """
    history: Any = []
    with suppress(OSError, ValueError):
        history = json.loads((source / _STATE_FILE).read_text(encoding="utf-8")).get("log_history")
    last = history[-1] if isinstance(history, list) and history and isinstance(history[-1], dict) else {}
    return finite_metrics(last, names)


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
        raise CheckpointNotFoundError(f"{missing}. {RESUME_NEWEST}")
    return status.role_dir(role)
