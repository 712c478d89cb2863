"""Checks that the step from which verl resumes is complete, and otherwise corrects the tracker.

verl resumes from the step that its tracker names. But verl's SFT trainer (0.9.1, `CheckpointHandler.save_checkpoint`)
writes the tracker before an async save is committed, so the step in the tracker can be incomplete. When verl loads the
checkpoint, it has already read the step's number from the folder name, so no other step can be loaded instead.
Therefore only the tracker is corrected, and the next run starts from a complete step.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from mcore_ckpt.checkpoint import MANIFEST_FILE, TRACKER_FILE, step_dirs
from mcore_ckpt.formats import companions_of, first_cut, kind_of, what_is_missing
from mcore_ckpt.integrations.verl.place import Place
from mcore_ckpt.steps import (
    NodeStep,
    StepStatus,
    holds_something,
    list_steps,
    newest_complete,
    oldest_first,
    read_tracker,
    remove_tracker,
    step_status,
    write_tracker,
)

logger = logging.getLogger(__name__)

# The complete steps on the nodes of the fast tier, by number.
OnNodes = Mapping[int, NodeStep]
_NONE: OnNodes = {}
# The files that verl's trainers are known to write into a step.
_KNOWN = ("data.pt", "data_#.pt", "transfer_queue")


def is_checkpoint(folder: Path) -> bool:
    """True if a folder is a checkpoint, even a damaged one, of ours or of a program whose checkpoints we can read."""
    return (folder / MANIFEST_FILE).exists() or kind_of(folder) is not None


def why_not_whole(place: Place, on_nodes: OnNodes = _NONE) -> str | None:
    """Says which parts a step lacks because its trainer died during the save.

    A single role of such a step could be loaded. But then the trainer would fail at the next role, or would silently
    start its data from the beginning.

    Returns:
        What the step lacks. None if nothing is missing, if there is no other step to go back to, or if the tracker does
        not name this step. In the last case the user gave the path of the step, which is then loaded as it is.
    """
    if place.step_path is None or read_tracker(place.root) != place.step:
        return None
    others = _whole_steps(place, on_nodes)
    if not others:
        return None
    status = step_status(place.step_path)
    if place.step not in on_nodes and status.committed and not status.is_complete:
        return status.reason
    return what_is_missing(place.step_path, [path for _, path in others], _KNOWN)


def step_to_go_back_to(place: Place, on_nodes: OnNodes = _NONE) -> int | None:
    """Returns the newest other complete step that has all files that older steps have; None if there is no such step.

    A step that only the nodes have is returned only if it has a folder in the root, because verl would not find it
    otherwise.
    """
    found = _whole_steps(place, on_nodes)
    for number, (step, path) in enumerate(found):
        if what_is_missing(path, [older for _, older in found[number + 1 :]], _KNOWN) is None:
            return step
    return None


def send_back(place: Place, has_copies: bool, on_nodes: OnNodes = _NONE) -> str:
    """Corrects the tracker if it names the step that cannot be loaded. Returns advice for the error message.

    `has_copies` tells whether a remote store can have other steps, which verl does not find through the tracker.

    Raises OSError: the tracker cannot be changed.
    """
    step, tracker_path = step_to_go_back_to(place, on_nodes), place.root / TRACKER_FILE
    newest = "there is no other checkpoint here" if step is None else f"the newest complete step is {step}"
    if step is None and has_copies:
        return (
            f"{newest}; to resume from a step in the remote store, set trainer.resume_from_path to that step's folder "
            f"in {place.root}"
        )
    if place.step is None or read_tracker(place.root) != place.step:
        return newest
    there = [status.path.name for status in list_steps(place.root) if holds_something(status)]
    if step is None and there:
        # These steps are damaged, or belong to another role or program. Only the user may decide to ignore them and to
        # start from the beginning.
        return (
            f"{newest} from which {place.folder.name} can be loaded, but there are the folders {', '.join(there)}: "
            f"load one by its path, or delete or move these folders and {tracker_path} to start from the beginning"
        )
    if step is None:
        remove_tracker(place.root)
        return f"{newest}. {tracker_path} named this step and was removed, so the next run starts from the beginning"
    write_tracker(place.root, step)
    return f"{newest}, which {tracker_path} names from now on: start again to continue from that step"


def bare_steps(place: Place) -> list[int]:
    """Returns the steps for which the root has verl's data but no checkpoint, and from which no run would resume.

    The result leaves out steps that the tracker names, that are being saved, or that are newer than the newest complete
    step in the root. The nodes of a fast tier may still have the returned steps. Raises OSError.
    """
    complete = newest_complete(place.root)
    newest = complete.step if complete is not None else 0
    # Only files that the trainer writes into each step may be deleted. The complete step shows which files these are.
    known = set() if complete is None else companions_of(complete.path).keys()
    needed = {place.step, read_tracker(place.root)}
    older = {step: folders for step, folders in step_dirs(place.root).items() if step < newest and step not in needed}
    return [step for step, folders in older.items() if all(_is_bare(folder, known) for folder in folders)]


def _is_bare(folder: Path, known: Collection[str]) -> bool:
    theirs = companions_of(folder).keys()
    return theirs == {entry.name for entry in folder.iterdir()} and theirs <= set(known)


def remove_steps(root: Path, steps: Collection[int]) -> None:
    """Removes all folders of some steps. Raises OSError."""
    there = step_dirs(root)
    for folder in (folder for step in steps for folder in there.get(step, ())):
        shutil.rmtree(folder)


def _whole_steps(place: Place, on_nodes: OnNodes) -> list[tuple[int, Path]]:
    """Returns the other complete steps of a place, the newest first, each with its folder."""
    # A step that only the nodes have also has a folder in the root, but without a commit. Do not count that folder.
    here = [status for status in list_steps(place.root) if status.committed or status.step not in on_nodes]
    everywhere: list[StepStatus | NodeStep] = [*here, *on_nodes.values()]
    last_first = reversed(oldest_first(everywhere))
    there = [step for step in dict.fromkeys(each.step for each in last_first) if _is_whole(place, step, on_nodes)]
    others = ((step, place.in_step(step)) for step in there)
    return [(step, other.step_path) for step, other in others if other is not None and other.step_path is not None]


def _is_whole(place: Place, step: int, on_nodes: OnNodes) -> bool:
    other = place.in_step(step)
    if other is None or other.step_path is None or step == place.step or not other.step_path.is_dir():
        return False
    if step not in on_nodes and not is_checkpoint(other.folder):
        return False
    status = step_status(other.step_path)
    # A checkpoint of another program has no manifest that would show whether it is complete. So such a checkpoint
    # counts as complete.
    is_complete = status.is_complete if status.declared and step not in on_nodes else True
    return is_complete and first_cut(other.step_path, _KNOWN) is None
