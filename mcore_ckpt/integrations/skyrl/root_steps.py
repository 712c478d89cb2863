"""Tells our steps in `trainer.ckpt_path` from steps that SkyRL has saved without this package.

Our steps and SkyRL's steps have names such as `global_step_10`. Only SkyRL's steps have the driver's files directly in
the step's folder.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.integrations.kit.driver import newest_valid, was_ever_complete
from mcore_ckpt.integrations.kit.free_names import free_name
from mcore_ckpt.integrations.skyrl.driver_files import STATE_FILE
from mcore_ckpt.integrations.skyrl.options import DRIVER_ROLE
from mcore_ckpt.io import replace_file
from mcore_ckpt.steps import newest_complete, running_saves, step_status

logger = logging.getLogger(__name__)

# SkyRL's driver reads this file to find the newest checkpoint.
_STOCK_TRACKER = "latest_ckpt_global_step.txt"


def newest(root: Path) -> Path | None:
    """Returns our newest complete step; None if SkyRL must look for a step that SkyRL wrote.

    Raises CheckpointNotFoundError: there were complete steps of ours, but none is complete and intact now.
    """
    try:
        found = newest_valid(root, DRIVER_ROLE, verify=False)
    except CheckpointNotFoundError:
        if was_ever_complete(root):
            raise
        return None  # only SkyRL itself has saved here
    theirs = _stock_step(root)
    if found is not None and theirs is not None:
        logger.warning(
            "loading %s, although SkyRL's tracker names step %d, which SkyRL saved without mcore_ckpt: to load that "
            "step, use trainer.resume_mode=from_path",
            found,
            theirs,
        )
    return found


def set_aside(step_path: Path) -> None:
    """Renames a step that SkyRL saved without this package, before the step is saved again. Raises OSError.

    Otherwise a save that is interrupted after the weights would leave the new weights with SkyRL's old data position,
    and SkyRL's driver would load both. SkyRL's tracker is corrected once our next step is complete.
    """
    if not _is_stock(step_path):
        return
    target = free_name(step_path.with_name(f"skyrl_{step_path.name}"))
    os.rename(step_path, target)
    logger.warning("%s was saved by SkyRL without mcore_ckpt, and has the name %s from now on", step_path, target.name)


def move_stock_tracker(root: Path) -> None:
    """Lets SkyRL's tracker name our newest complete step. Logs errors of the disk.

    If the run then continues without this package, SkyRL raises an error. With an old tracker, SkyRL would go on from
    one of its old checkpoints. Without a tracker, SkyRL would start from the beginning.
    """
    try:
        last = newest_complete(root, DRIVER_ROLE)
        if last is not None:
            replace_file(root / _STOCK_TRACKER, str(last.step).encode())
    except OSError as error:
        logger.warning("%s could not be updated: %s", root / _STOCK_TRACKER, error)


def saved_attempts(step_path: Path) -> frozenset[tuple[str | None, str]]:
    """Returns role and attempt of each save of a step that is committed or under way."""
    if not step_path.is_dir():
        return frozenset()
    committed = {(head.role, head.attempt) for head in step_status(step_path).heads}
    return frozenset(committed | {(save.role, save.attempt) for save in running_saves(step_path.parent, [step_path])})


def _stock_step(root: Path) -> int | None:
    """Returns the step that SkyRL's tracker names, if SkyRL saved it without this package."""
    try:
        step = int((root / _STOCK_TRACKER).read_text())
    except (OSError, ValueError):
        return None
    return step if _is_stock(root / f"global_step_{step}") else None


def _is_stock(step_path: Path) -> bool:
    return (step_path / STATE_FILE).exists()
