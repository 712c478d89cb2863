"""Finds the hidden folders next to checkpoints, and checks whether a living process still needs them.

There are five kinds: a *staging* folder that ranks write into, a *replaced* checkpoint that was moved aside, an
*uploading* mark that prevents the deletion of a step, a *deleted* step whose files are being removed, and the *trial*
folder in which `mcore-ckpt doctor` or `mcore-ckpt bench` tries the file system.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import new_folder
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.steps.owner import Life, life_of, write_owner

# A run of `mcore-ckpt doctor` or `mcore-ckpt bench` lasts for minutes, and keeps making files and folders in its trial
# folder. A trial folder in which nothing was made for this long (seconds) is a leftover, even if its owner is on
# another host.
TRIAL_LASTS_S = 24 * 3600.0


def entries(folder: Path) -> list[Path]:
    """Returns the entries of a folder, sorted by name; none if the folder is gone or this process may not read it."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []  # retention of another process has just deleted the folder
    except PermissionError:
        return []  # the folder belongs to another user, so nothing in it is ours


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

    These folders are in the step's folder, or next to it if the step's folder is also the folder of its only role.
    """
    found = [entry for of in results_of([root, *own_steps(root)], entries, tuning.LOOK_THREADS) for entry in of]
    parsed = [(entry, work) for entry in found if (work := file_names.parse_work_dir(entry.name)) is not None]
    return [
        (entry, work) for entry, work in parsed if entry.parent != root or file_names.parse_step(work.role) is not None
    ]


def replaced_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints next to `folder` that were replaced by saves to `folder`, and not removed yet."""
    found = [(entry, file_names.parse_work_dir(entry.name)) for entry in entries(folder.parent)]
    return [
        entry for entry, work in found if work is not None and (work.role, work.purpose) == (folder.name, "replaced")
    ]


def is_leftover(folder: Path, alone: bool) -> bool:
    """True if the process that made the folder is dead.

    If this process cannot see the owner, because the owner is unknown, on another host or hidden, the result is
    `alone`. The caller passes True if it holds the role's trainer lock, so that no other process can still be saving
    the role.
    """
    life = life_of(folder)
    return alone if life in (None, Life.UNKNOWN) else life is Life.DEAD


def is_deleted_for_good(deleted: Path, alone: bool) -> bool:
    """True if no process can put the deleted step back any more. `alone` is as in `is_leftover`."""
    return life_of(deleted) is None or is_leftover(deleted, alone)


def is_dead_trial(trial: Path, by_age: bool) -> bool:
    """True if the doctor that made a trial folder is dead.

    No lock shows whether a doctor is alive, and a doctor on another host cannot be seen. If the doctor cannot be seen,
    the folder's age decides, but only if `by_age` is True. To find out the age, a new folder is made next to the trial
    folder.
    """
    life = life_of(trial)
    if life not in (None, Life.UNKNOWN):
        return life is Life.DEAD
    return by_age and _age_s(trial) > TRIAL_LASTS_S


def _age_s(trial: Path) -> float:
    """Returns how long ago something was last made in a trial folder, in seconds; 0 if unknown."""
    # The clock of the file system has set the folder's time, so only a new folder shows the present time of that clock.
    # If this process dies here, the new folder is an empty trial folder, which is removed like any other trial folder.
    now = file_names.trial_dir(trial.parent, uuid.uuid4().hex)
    try:
        new_folder(now)
        try:
            return now.stat().st_mtime - trial.stat().st_mtime
        finally:
            now.rmdir()
    except OSError:
        return 0.0


def is_in_use(folder: Path, step_path: Path) -> bool:
    """True if a save may be writing into a step that is now in `folder`, or an upload may be reading the step.

    If the step's usual folder (`step_path`) is also the folder of a role, the role's work folders are next to it.
    """
    for entry in [*entries(folder), *entries(step_path.parent)]:
        work = file_names.parse_work_dir(entry.name)
        if work is None or work.purpose == "replaced" or (entry.parent != folder and work.role != step_path.name):
            continue
        if life_of(entry) in (Life.ALIVE, Life.UNKNOWN):
            return True
    return False


@contextmanager
def kept_for_upload(role_dir: Path, attempt: str) -> Iterator[None]:
    """Prevents the deletion of the step by any process during the `with` block. Raises OSError if the step is gone."""
    mark = file_names.uploading_dir(role_dir, attempt)
    new_folder(mark, exist_ok=True)
    try:
        write_owner(mark)
        yield
    finally:
        shutil.rmtree(mark, ignore_errors=True)
