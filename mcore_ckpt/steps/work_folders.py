"""Finds the hidden folders beside checkpoints, and checks whether a living process still needs them.

There are four kinds: a *staging* folder that ranks write into, a *replaced* checkpoint that was moved aside, an
*uploading* mark that prevents the deletion of a step, and a *deleted* step whose files are being removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import FOLDER_MODE
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.steps.owner import read_owner, write_owner


def entries(folder: Path) -> list[Path]:
    """Returns the entries of a folder, sorted by name; none if the folder is gone or this process may not read it."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []  # retention of another process has just deleted it
    except PermissionError:
        return []  # it belongs to somebody else, so nothing in it is ours


def own_steps(root: Path) -> list[Path]:
    """Returns the step folders below the root. Links are left out, because they may lead to a run that is alive."""
    found = [path for paths in file_names.step_dirs(root).values() for path in paths]
    if not found:
        return []
    with os.scandir(root) as listed:
        links = {entry.name for entry in listed if entry.is_symlink()}
    return [path for path in found if path.name not in links]


def work_folders(root: Path) -> list[tuple[Path, file_names.RoleWorkDir]]:
    """Returns the staging, replaced and uploading folders of all steps, each with its parsed name.

    They are in the step's folder, or beside it if the step's folder is also the folder of its only role.
    """
    found = [entry for of in results_of([root, *own_steps(root)], entries, tuning.LOOK_THREADS) for entry in of]
    parsed = [(entry, work) for entry in found if (work := file_names.parse_work_dir(entry.name)) is not None]
    return [
        (entry, work) for entry, work in parsed if entry.parent != root or file_names.parse_step(work.role) is not None
    ]


def is_leftover(folder: Path, alone: bool) -> bool:
    """Returns True if the process that made the folder is dead.

    If the owner is unknown or on another host, it returns `alone`. That must be true only if this process holds the
    role's trainer lock, because then no other process can still be saving the role.
    """
    owner = read_owner(folder)
    if owner is None:
        return alone
    return not owner.is_alive_here if owner.is_on_this_host else alone


def is_deleted_for_good(deleted: Path, alone: bool) -> bool:
    """True if no process can still put the deleted step back. `alone` has the same meaning as in `is_leftover`."""
    return read_owner(deleted) is None or is_leftover(deleted, alone)


def is_in_use(folder: Path, step_path: Path) -> bool:
    """True if a save may be writing into a step, or an upload may be reading it.

    Args:
        folder: the folder where the step is now.
        step_path: the step's usual folder. If it is also the folder of a role, the role's work folders are beside it.
    """
    for entry in [*entries(folder), *entries(step_path.parent)]:
        work = file_names.parse_work_dir(entry.name)
        if work is None or work.purpose == "replaced" or (entry.parent != folder and work.role != step_path.name):
            continue
        owner = read_owner(entry)
        if owner is not None and (owner.is_alive_here or not owner.is_on_this_host):
            return True
    return False


@contextmanager
def kept_for_upload(role_dir: Path, attempt: str) -> Iterator[None]:
    """Prevents the deletion of the step by any process during the `with` block. Raises OSError if the step is gone."""
    mark = file_names.uploading_dir(role_dir, attempt)
    mark.mkdir(FOLDER_MODE, exist_ok=True)
    try:
        write_owner(mark)
        yield
    finally:
        shutil.rmtree(mark, ignore_errors=True)
