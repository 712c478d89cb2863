"""Reads and moves the tracker, the file that names the newest complete step for people and other programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import read_small, replace_file, sync_dir
from mcore_ckpt.steps.listing import StepStatus, list_steps, newest_complete

logger = logging.getLogger(__name__)

# How many times `update_tracker` checks whether another role, committing at the same moment, has moved the tracker.
_TRACKER_LOOKS = 16


def read_tracker(root: Path) -> int | None:
    """Returns the step that the tracker names; None if there is no tracker or it holds no step. Raises nothing."""
    try:
        return file_names.parse_tracker(read_small(root / file_names.TRACKER_FILE, limits.SMALL_BYTES).decode())
    except (OSError, CheckpointCorruptError, UnicodeDecodeError):
        return None


def write_tracker(root: Path, step: int) -> None:
    """Makes the tracker name a step, whether or not that step is complete. Raises OSError."""
    replace_file(root / file_names.TRACKER_FILE, str(step).encode())


def remove_tracker(root: Path) -> None:
    """Deletes the tracker, durably. Raises OSError, FileNotFoundError included."""
    (root / file_names.TRACKER_FILE).unlink()
    sync_dir(root)


def update_tracker(root: Path, only: int | None = None, seen: Path | None = None) -> int | None:
    """Makes the tracker name the newest complete step, and returns that step; None if no step is complete.

    Args:
        root: the folder of the steps.
        only: make the tracker name this step instead, and leave the tracker as it is if this step is not complete. A
            trainer that names its folders itself needs this, because it resumes from the tracker. After such a trainer
            has gone back to an older step, the tracker must not name a newer step of the abandoned run.
        seen: see `StepStatus.having_seen`.

    Raises OSError.
    """
    newest = None
    for _ in range(_TRACKER_LOOKS):
        # Not `complete_steps`: at each save it would look at every step that there ever was.
        status = newest_complete(root, seen=seen)
        if status is None:
            return None
        newest = status.step
        wanted = newest if only is None else only
        if read_tracker(root) == wanted:
            break
        if wanted != newest and not any(each.having_seen(seen).is_complete for each in list_steps(root, wanted)):
            break
        write_tracker(root, wanted)
        # Look again. Before this write, another role may have completed a newer step and moved the tracker there. Then
        # this write has moved the tracker back.
    return newest


def move_tracker(root: Path, only: int | None = None, seen: Path | None = None) -> int | None:
    """Does the same as `update_tracker`, but only logs an OSError.

    The checkpoint is committed, so the save has not failed.
    """
    try:
        return update_tracker(root, only, seen)
    except OSError as error:
        logger.warning("the checkpoint is committed, but the tracker could not be updated: %s", error)
        return None


def warn_if_tracker_differs(root: Path, complete: Sequence[StepStatus]) -> None:
    """Logs a warning if the tracker does not name the newest complete step. Raises nothing.

    Args:
        root: the folder of the steps.
        complete: the complete steps, at least one, the oldest first. Older ones may be claimed.
    """
    path, tracked, newest = root / file_names.TRACKER_FILE, read_tracker(root), complete[-1].step
    if tracked == newest or not os.path.lexists(path):
        return
    if tracked is None:
        logger.warning("%s does not name a step; loading the newest complete one, %d", path, newest)
    elif any(status.step == tracked and status.is_complete for status in complete):
        logger.warning(
            "%s names step %d, but the newest complete step is %d: loading the newest. Use load(step=%d) for the other",
            path,
            tracked,
            newest,
            tracked,
        )
    else:
        logger.warning(
            "%s names step %d, which is not complete; loading the newest complete step, %d",
            path,
            tracked,
            newest,
        )


def tracker_problems(root: Path) -> list[str]:
    """Returns the reasons why programs that follow the tracker would not load the step that `load` loads.

    The list is empty if they would load that step.
    """
    path, newest = root / file_names.TRACKER_FILE, newest_complete(root)
    if newest is None and not path.exists():
        return []
    tracked = read_tracker(root)
    if tracked is None:
        if path.exists() and not os.access(path, os.R_OK, effective_ids=True):
            return [f"{path}: cannot be read: permission denied"]
        return [f"{path}: {'does not name a step' if path.exists() else 'missing'}; the next save writes a new one"]
    if newest is None or tracked != newest.step:
        instead = "no step is complete" if newest is None else f"the newest complete step is {newest.step}"
        return [f"{path}: names step {tracked}, but {instead}"]
    return []
