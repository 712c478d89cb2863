"""Pins steps, so that retention never deletes them.

A pin belongs to the step's number. A training that has gone back may save a pinned step again, and then the new save
has the pin. Such a save is not refused, because it would be refused again after each restart, and a training that
nobody watches would stop. Instead, the load that goes back behind a pinned step warns of the pin
(`RunHistory.warn_of_pins`), and the save warns, too. Tools replace no pinned step, because their user is there to
decide.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.field_checks import check_value
from mcore_ckpt.io.access import FILE_MODE, mode_in
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.steps.listing import StepStatus, list_steps
from mcore_ckpt.urls import local_path

logger = logging.getLogger(__name__)


def pin(root: str | Path, step: int) -> None:
    """Keeps a step until `unpin` is called, whatever `max_to_keep` is. Any process may pin a step, even repeatedly.

    A trainer that has gone back behind the step may still save it again. Then the pin keeps the new save.

    Raises CheckpointNotFoundError if the step is missing or not complete, and OSError.

    Example:
        >>> pin("checkpoints", 12000)  # doctest: +SKIP
    """
    status = _status(local_path(root, "root"), step)
    if not status.is_complete:
        raise CheckpointNotFoundError(f"step {step} cannot be pinned: {status.reason}")
    try:
        (status.place / file_names.PINNED_FILE).touch(mode_in(status.place, FILE_MODE))
        sync_dir(status.place)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{status.path}: was deleted before it could be pinned: pin another step"
        ) from None


def unpin(root: str | Path, step: int) -> None:
    """Removes a pin, if there is one. From then on, the preservation policy decides whether the step stays.

    Raises CheckpointNotFoundError if there is no such step, and OSError.

    Example:
        >>> unpin("checkpoints", 12000)  # doctest: +SKIP
    """
    status = _status(local_path(root, "root"), step)
    (status.place / file_names.PINNED_FILE).unlink(missing_ok=True)
    sync_dir(status.place)


def is_pinned(step_path: Path) -> bool:
    """True if a step is pinned. `step_path` is the folder of the step."""
    return (step_path / file_names.PINNED_FILE).exists()


def warn_if_pinned(role_dir: Path, step: int) -> None:
    """Warns if a save is about to replace a checkpoint of a pinned step. `role_dir` is the checkpoint's folder."""
    step_path = role_dir if file_names.parse_step(role_dir.name) is not None else role_dir.parent
    if is_pinned(step_path):
        logger.warning("%s: step %d is pinned, and is saved again: the pin keeps the new save", role_dir, step)


def _status(root: Path, step: int) -> StepStatus:
    check_value("step", step, int, {"least": 0})
    found = [status for status in list_steps(root) if status.step == step]
    if not found:
        raise CheckpointNotFoundError(
            f"{root}: there is no step {step}: `mcore-ckpt list {root}` shows which there are"
        )
    return found[0]
