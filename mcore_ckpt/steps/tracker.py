"""Reads and moves the tracker, the file that names the newest complete step for people and other programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io.files import replace_file, sync_dir
from mcore_ckpt.steps.choice import newest
from mcore_ckpt.steps.listing import StepStatus, list_steps, newest_complete, read_tracker
from mcore_ckpt.steps.worth import Weighed

logger = logging.getLogger(__name__)

# How many times `update_tracker` checks whether another role, committing at the same moment, has moved the tracker.
_TRACKER_LOOKS = 16


def write_tracker(root: Path, step: int) -> None:
    """Makes the tracker name a step, whether or not that step is complete. Raises OSError."""
    replace_file(root / file_names.TRACKER_FILE, str(step).encode())


def remove_tracker(root: Path) -> None:
    """Deletes the tracker, durably. Raises OSError, FileNotFoundError included."""
    (root / file_names.TRACKER_FILE).unlink()
    sync_dir(root)


def update_tracker(root: Path, committed: int | None = None, seen: Path | None = None) -> int | None:
    """Makes the tracker name the newest complete step, and returns that step; None if no step is complete.

    `committed` is the step that was committed just now. This step is the newest step once it is complete. If
    `committed` is None, all steps are looked at. `seen` is as in `newest_complete`. Raises OSError.
    """
    last = None
    for _ in range(_TRACKER_LOOKS):
        # After a commit, look only at some steps, because a look at all steps at each save would take too long.
        last = newest(list_steps(root)) if committed is None else newest_complete(root, seen=seen, committed=committed)
        if last is None or read_tracker(root) == last.step:
            break
        write_tracker(root, last.step)
        # Look again. Before this write, another role may have completed a newer step and moved the tracker to that
        # step. Then this write has moved the tracker back.
    return None if last is None else last.step


def move_tracker(root: Path, committed: int | None = None, seen: Path | None = None) -> None:
    """Does what `update_tracker` does, but only logs an OSError, because the checkpoint is committed."""
    try:
        update_tracker(root, committed, seen)
    except OSError as error:
        logger.warning("the checkpoint is committed, but the tracker could not be updated: %s", error)


def warn_if_tracker_differs(root: Path, tried: Sequence[Weighed]) -> None:
    """Logs a warning if the first step to try is in the root, and the tracker names another step. Raises nothing."""
    if not isinstance(tried[0], StepStatus):
        return
    path, tracked, last = root / file_names.TRACKER_FILE, read_tracker(root), tried[0].step
    if tracked == last or not os.path.lexists(path):
        return
    if tracked is None:
        logger.warning("%s does not name a step; loading the newest complete step, %d", path, last)
    elif any(each.step == tracked and each.is_complete for each in tried):
        logger.warning(
            "%s names step %d, but the newest complete step is %d: loading the newest. Use load(step=%d) for the other",
            path,
            tracked,
            last,
            tracked,
        )
    else:
        logger.warning(
            "%s names step %d, which is not complete; loading the newest complete step, %d", path, tracked, last
        )


def tracker_problems(root: Path) -> list[str]:
    """Returns why programs that follow the tracker load another step than `load`; [] if they load the same step."""
    path, last = root / file_names.TRACKER_FILE, newest(list_steps(root))
    if last is None and not path.exists():
        return []
    tracked = read_tracker(root)
    if path.is_dir():
        return [f"{path}: is a folder, so no save can write the tracker: remove it"]
    if tracked is None:
        if path.exists() and not os.access(path, os.R_OK, effective_ids=True):
            return [f"{path}: cannot be read: permission denied"]
        return [f"{path}: {'does not name a step' if path.exists() else 'missing'}; the next save writes a new one"]
    if last is None or tracked != last.step:
        instead = "no step is complete" if last is None else f"the newest complete step is {last.step}"
        return [f"{path}: names step {tracked}, but {instead}"]
    return []
