"""Selects checkpoints of this package at a path: of a role, of a step, or of the newest complete step of a root."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError
from mcore_ckpt.steps.choice import choose
from mcore_ckpt.steps.listing import StepStatus, find_moved_aside, is_step, list_steps, step_status
from mcore_ckpt.steps.node_files import as_in_folder, check_not_of_one_node
from mcore_ckpt.steps.tracker import warn_if_tracker_differs
from mcore_ckpt.tools.examine.what_is import why_none


@dataclass(frozen=True)
class Selection:
    """The checkpoints at a path: the folders of some or all roles of one step, sorted by name."""

    step: int
    role_dirs: tuple[Path, ...]


def select(path: Path, step: int | None = None, of_one_node: bool = False) -> Selection:
    """Selects the checkpoints of this package at a path.

    Args:
        path: the folder of a role, of a step (all its roles), or of all steps (the newest complete step).
        step: the step to take from a folder of all steps; None for the newest.
        of_one_node: True to also accept a node's folder of the fast tier if the files that it lacks are on other nodes.

    Raises:
        InvalidArgumentError: the folder has another step than `step`.
        CheckpointNotFoundError: there is no checkpoint, or the step is not complete.
        CheckpointCorruptError: a manifest is damaged.
    """
    selection = _select(path.resolve(), step)  # a path such as "." has no name until it is resolved
    if not of_one_node:
        check_not_of_one_node(selection.role_dirs)
    return selection


def _select(path: Path, step: int | None) -> Selection:
    has_manifest = (path / file_names.MANIFEST_FILE).exists()
    if not has_manifest and is_step(path):
        (status,) = as_in_folder(path.parent, [step_status(path)])
        check_step(path, status.step, step)
        return _selection(status)
    role_dir = path if has_manifest else find_moved_aside(path)
    if role_dir is not None:
        manifest = read_manifest(role_dir)
        check_step(path, manifest.step, step)
        return Selection(manifest.step, (role_dir,))
    statuses = as_in_folder(path, [status for status in list_steps(path) if step in (None, status.step)])
    choice = choose(statuses)
    if not choice.steps:
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        raise CheckpointNotFoundError(f"{path}: {what}{why_none(path, step, statuses)}")
    if step is None:
        warn_if_tracker_differs(path, choice.steps)
    return _selection(choice.steps[0])


def check_step(path: Path, found: int, wanted: int | None) -> None:
    """Raises InvalidArgumentError if the checkpoint at a path belongs to another step than the wanted step."""
    if wanted not in (None, found):
        raise InvalidArgumentError(
            f"{path}: is a checkpoint of step {found}, not {wanted}: leave out --step, or name the folder of all steps"
        )


def _selection(status: StepStatus) -> Selection:
    if not status.is_complete:
        raise CheckpointNotFoundError(status.reason)
    return Selection(status.step, tuple(map(status.role_dir, sorted(status.committed))))
