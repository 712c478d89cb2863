"""Removes what crashed processes left below a folder of steps, and restores checkpoints that they had moved aside."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io import tuning
from mcore_ckpt.io.access import is_foreign, naming_owner, owner_of
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.steps.commit import remove_folder, remove_if_empty, remove_replaced, restore_replaced, taken_away
from mcore_ckpt.steps.handed_over import end_links_in, notes_among
from mcore_ckpt.steps.optimizer_files import remove_dropped
from mcore_ckpt.steps.work_folders import (
    entries,
    is_dead_trial,
    is_deleted_for_good,
    is_leftover,
    own_steps,
    work_folders,
)
from mcore_ckpt.steps.worth import lack_of

logger = logging.getLogger(__name__)


def remove_leftovers(root: Path, role: str, alone: bool) -> None:
    """Removes the leftovers of one role, and restores the role's checkpoints that a crashed process had moved aside.

    Leftovers of other roles stay, because those roles may be saving. `alone` is True if this process holds the role's
    trainer lock (`TrainerLock`). In that case, folders with an owner that this process cannot see (unknown, on another
    host or hidden) are leftovers, too. A doctor's trial folder is a leftover only if it is old, because the lock says
    nothing about doctors.
    """
    if not root.is_dir():
        return
    with naming_owner(root):
        listed = list(root.iterdir())
    replaced = root / file_names.TRACKER_FILE, file_names.trainer_file(root, role), file_names.rules_file(root, role)
    for entry in listed:
        if file_names.is_deleted_dir(entry.name):
            if is_deleted_for_good(entry, alone):
                remove_folder(entry)
        elif file_names.is_trial_dir(entry.name):
            if is_dead_trial(entry, by_age=alone):
                remove_folder(entry)
        elif alone and any(file_names.is_under_way(entry.name, file) for file in replaced):
            _unlink(entry)
    # The name of a work folder next to a step does not contain its role. If the owner of such a folder cannot be
    # checked, the folder counts as a folder of this role only if no trainer of another role holds a lock.
    locked = {file_names.role_of_trainer_file(entry.name) for entry in listed} - {None}
    only = alone and locked <= {role}
    beside_steps = [work.role for entry in listed if (work := file_names.parse_work_dir(entry.name)) is not None]
    noted = [note[0] for entry in listed if (note := file_names.parse_handed_over_note(entry.name)) is not None]
    for name in {name for name in (*beside_steps, *noted) if file_names.parse_step(name) is not None}:
        _remove_in_if_allowed(root, name, only)
    step_paths = own_steps(root)
    # There may be thousands of steps, and few of them have leftovers. So several threads look at the steps, with as few
    # calls as possible.
    suspects = results_of(step_paths, lambda path: _may_have_leftovers(path, role), tuning.LOOK_THREADS)
    for step_path in itertools.compress(step_paths, suspects):
        _remove_in_if_allowed(step_path, role, alone)


def remove_sibling_leftovers(folder: Path) -> None:
    """Removes the leftovers next to one folder that is committed like a role's folder."""
    if folder.parent.is_dir():
        _remove_in(folder.parent, folder.name, alone=False)


def remove_leftover(folder: Path) -> None:
    """Removes a leftover. The files of other programs in an old checkpoint are first moved to the new checkpoint."""
    work = file_names.parse_work_dir(folder.name)
    with taken_away(folder) as away:
        # A staging folder that was exchanged with the role's folder holds an old checkpoint, too. Such a folder has a
        # manifest.
        is_old = work is not None and (work.purpose == "replaced" or (away / file_names.MANIFEST_FILE).exists())
        if work is not None and is_old and (folder.parent / work.role).exists():
            remove_replaced(away, folder.parent / work.role)
        else:
            remove_folder(away)


def find_leftovers(root: Path, role: str | None = None) -> list[Path]:
    """Returns the leftovers of one role, or of all roles, below a folder of steps.

    Leaves out folders whose process may be alive, on this host or another host. Also leaves out checkpoints that were
    moved aside, if the next start of a trainer will restore them.
    """
    listed = entries(root)
    found = [each for each in listed if file_names.is_deleted_dir(each.name) and is_deleted_for_good(each, alone=False)]
    found += [each for each in listed if file_names.is_trial_dir(each.name) and is_dead_trial(each, by_age=False)]
    for entry, work in work_folders(root):
        beside_step = entry.parent == root  # the name of such a folder does not contain its role
        if (role not in (None, work.role) and not beside_step) or not is_leftover(entry, alone=False):
            continue
        role_dir = entry.parent / work.role
        is_replaced = work.purpose == "staging" or os.path.exists(role_dir / file_names.MANIFEST_FILE)
        if is_replaced and not _is_all_that_is_left(entry, role_dir):
            found.append(entry)
    return found


def _unlink(entry: Path) -> None:
    try:
        entry.unlink(missing_ok=True)
    except PermissionError:  # in a folder with the sticky bit, only the owner may remove a file
        logger.warning("%s stays: this user may not remove it: it belongs to %s", entry, owner_of(entry))


def _remove_in_if_allowed(step_path: Path, role: str, alone: bool) -> None:
    try:
        _remove_in(step_path, role, alone)
    except PermissionError as error:  # the step belongs to another user
        logger.warning("%s stays as it is: it belongs to %s: %s", step_path, owner_of(step_path), error)


def _remove_in(step_path: Path, role: str, alone: bool) -> None:
    # Retention writes an owner file into a step before it deletes the step, and the process that wrote the file may
    # have died before the deletion. A save also writes an owner file into a role's folder before it replaces the
    # folder. Retention writes an owner file before it removes an optimizer, too. If the process that wrote an owner
    # file is dead, the owner file is removed here.
    for folder in (step_path, step_path / role):
        if (folder / file_names.OWNER_FILE).exists() and is_leftover(folder, alone):
            remove_dropped(folder, alone)
            (folder / file_names.OWNER_FILE).unlink(missing_ok=True)
    for entry in entries(step_path):
        work = file_names.parse_work_dir(entry.name)
        if work is None or work.role != role:
            continue
        if work.purpose == "replaced" and _is_between_renames(step_path / role, work.attempt, alone):
            continue
        if work.purpose == "replaced" and restore_replaced(entry, step_path / role):
            continue
        if is_leftover(entry, alone) and not _is_all_that_is_left(entry, step_path / role):
            logger.warning("removing %s, a leftover of a save that did not finish", entry)
            remove_leftover(entry)
            if os.path.lexists(entry) and is_foreign(entry):
                logger.warning("%s stays: this user may not remove it: it belongs to %s", entry, owner_of(entry))
    # The notes come last, because a restored checkpoint has links, too.
    end_links_in(step_path, role, alone)
    if alone:
        remove_if_empty(step_path)


def _is_all_that_is_left(entry: Path, role_dir: Path) -> bool:
    """True if a leftover is a whole checkpoint, and the checkpoint that replaced it has lost files."""
    if not (role_dir / file_names.MANIFEST_FILE).exists() or not (entry / file_names.MANIFEST_FILE).exists():
        return False
    try:
        return lack_of(role_dir) is not None and lack_of(entry) is None
    except OSError:
        return True


def _may_have_leftovers(step_path: Path, role: str) -> bool:
    """True if `_remove_in` may have something to do in a step. Makes at most two calls."""
    names = {entry.name for entry in entries(step_path)}
    works = [work for name in names if (work := file_names.parse_work_dir(name)) is not None]
    if not names or file_names.OWNER_FILE in names or any(work.role == role for work in works):
        return True
    if notes_among(names, role):
        return True
    try:
        return role in names and (step_path / role / file_names.OWNER_FILE).exists()
    except OSError:
        return True  # `_remove_in` reports the error


def _is_between_renames(role_dir: Path, attempt: str, alone: bool) -> bool:
    """True if the save that moved a checkpoint aside may still put the new checkpoint in place."""
    staging = file_names.staging_dir(role_dir, attempt)
    return staging.exists() and not is_leftover(staging, alone)
