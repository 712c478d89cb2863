"""Checks that the step verl resumes from is complete, and corrects the tracker if it is not.

verl follows its tracker, which its SFT trainer (0.9.1, `CheckpointHandler.save_checkpoint`) writes before an async save
is committed. When verl asks for the checkpoint it has already taken the step's number from the folder name, so another
step must not be loaded in its place. Instead the tracker is corrected, and the next start finds a complete step.
"""

from __future__ import annotations

import logging
import re
import zipfile
from pathlib import Path

from mcore_ckpt.checkpoint import MANIFEST_FILE, TRACKER_FILE, step_dirs
from mcore_ckpt.formats import kind_of
from mcore_ckpt.integrations.verl.place import Place
from mcore_ckpt.steps import (
    holds_something,
    list_steps,
    read_tracker,
    remove_tracker,
    step_status,
    write_tracker,
)

logger = logging.getLogger(__name__)

# Files with the state of the data loader: PPO has one, SFT one for each data-parallel rank.
_DATA_FILE = re.compile(r"data(_\d+)?\.pt")


def is_checkpoint(folder: Path) -> bool:
    """True if a folder is a checkpoint of ours, or of another program that we can read, intact or not."""
    return (folder / MANIFEST_FILE).exists() or kind_of(folder) is not None


def why_not_whole(place: Place) -> str | None:
    """Returns what a step lacks because its trainer died while saving it.

    One role of such a step could be loaded. But the trainer would then fail at the next role, or begin its data anew
    without an error.

    Returns:
        None if nothing is missing, if there is no other step to go back to, or if the tracker does not name this step:
        a step that was asked for by its path is taken as it is.
    """
    if place.step_path is None or read_tracker(place.root) != place.step:
        return None
    back = step_to_go_back_to(place)
    if back is None:
        return None
    status = step_status(place.step_path)
    if status.committed and not status.is_complete:
        return status.reason
    other = place.in_step(back)
    if other is None or other.step_path is None or not _data_files(other.step_path):
        return None
    data = _data_files(place.step_path)
    if not data:
        return f"{place.step_path}: the state of the data loader is missing"
    truncated = _truncated(data)
    return f"{truncated[0]}: is cut, so the trainer died while it wrote it" if truncated else None


def step_to_go_back_to(place: Place) -> int | None:
    """Returns the newest other complete step; if any step has the state of the data loader, the newest of those."""
    found = [step for step in sorted(step_dirs(place.root), reverse=True) if _is_whole(place, step)]
    with_data = [step for step in found if (other := place.in_step(step)) and _data_files(other.step_path)]
    return next(iter(with_data or found), None)


def send_back(place: Place, has_copies: bool) -> str:
    """Corrects a tracker that names a step that cannot be loaded. Returns advice for the message.

    Args:
        place: the place that cannot be loaded.
        has_copies: True if a remote store may have other steps, which verl does not find by the tracker.

    Raises OSError: the tracker cannot be changed.
    """
    step, tracker_path = step_to_go_back_to(place), place.root / TRACKER_FILE
    newest = "there is no other checkpoint here" if step is None else f"the newest complete step is {step}"
    if step is None and has_copies:
        return f"{newest}; to resume from a copy in the remote store name its step's folder (trainer.resume_from_path)"
    if place.step is None or read_tracker(place.root) != place.step:
        return newest
    there = [status.path.name for status in list_steps(place.root) if holds_something(status)]
    if step is None and there:
        # These steps are damaged, or of another role or program. Only the user may decide to start anew beside them.
        return (
            f"{newest} that {place.folder.name} can be loaded from, but there are {', '.join(there)}: load one by its "
            f"path, or delete or move them and {tracker_path} to begin from the beginning"
        )
    if step is None:
        remove_tracker(place.root)
        return f"{newest}. {tracker_path} named this one and is removed: the next start begins from the beginning"
    write_tracker(place.root, step)
    return f"{newest}, which {tracker_path} names from now on: start again to go on from there"


def _is_whole(place: Place, step: int) -> bool:
    other = place.in_step(step)
    if other is None or other.step_path is None or step == place.step or not is_checkpoint(other.folder):
        return False
    status = step_status(other.step_path)
    # A checkpoint of another program has no manifest, so its presence has to do.
    is_complete = status.is_complete if status.declared else True
    return is_complete and not _truncated(_data_files(other.step_path))


def _data_files(step_path: Path | None) -> list[Path]:
    if step_path is None or not step_path.is_dir():
        return []
    return sorted(path for path in step_path.iterdir() if _DATA_FILE.fullmatch(path.name))


def _truncated(files: list[Path]) -> list[Path]:
    # torch.save writes the zip directory last, so a file that was cut has none.
    return [file for file in files if not zipfile.is_zipfile(file)]
