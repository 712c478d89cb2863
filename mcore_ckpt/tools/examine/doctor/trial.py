"""Makes the folder in which the doctor tries the file system, and removes it."""

from __future__ import annotations

import errno
import grp
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io.access import user_name
from mcore_ckpt.io.files import new_folder
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.owner import write_owner
from mcore_ckpt.steps.work_folders import entries, is_dead_trial
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity, fine

FOLDER = "folder"


@contextmanager
def trial_folder(root: Path) -> Iterator[Path]:
    """Makes a hidden folder below the root for the `with` block. Raises OSError.

    If the process is killed, the folder stays. On this host, the next doctor, the next start of a trainer or `prune`
    removes it. On another host, a doctor or the first save of a trainer removes it, but only after `TRIAL_LASTS_S`,
    because the doctor may be alive until then.
    """
    remove_dead_trials(root)
    folder = file_names.trial_dir(root, commit.new_attempt())
    try:
        new_folder(folder)
        write_owner(folder)
        yield folder
    finally:
        commit.remove_folder(folder)


def remove_dead_trials(root: Path) -> None:
    """Removes the folders of doctors that died on this host, and old folders of doctors on other hosts."""
    for entry in entries(root):
        if file_names.is_trial_dir(entry.name) and is_dead_trial(entry, by_age=True):
            commit.remove_folder(entry)


def unusable(root: Path, error: OSError) -> Finding:
    """Returns the finding that nothing can be written below the root, with the reason and advice."""
    advice = {
        errno.EROFS: "mount the file system with `rw`, or name another folder",
        errno.ENOSPC: "delete files, or name another folder",
        errno.EDQUOT: "delete files of this user, or ask for a larger quota",
        errno.EACCES: "allow the trainer's user to write here, or name another folder",
        errno.EPERM: "allow the trainer's user to write here, or name another folder",
    }.get(error.errno or 0, "name another folder")
    fact = f"user {user_name(os.geteuid())} cannot write here: {error.strerror or error}; {_described(root)}"
    return Finding(FOLDER, Severity.BAD, fact, "no checkpoint can be saved", advice)


def owner_of(root: Path, folder: Path) -> Finding:
    """Returns the finding about the owner of the root, and of the files that this process makes below the root."""
    made, own = folder.stat().st_uid, os.geteuid()
    found = root.stat()
    if found.st_mode & stat.S_ISVTX and own not in (found.st_uid, 0):
        cost = f"user {user_name(own)} can neither replace nor delete what other users have saved here"
        advice = "let only one user save here, or remove the sticky bit (chmod -t)"
        return Finding(FOLDER, Severity.RISK, f"{_described(root)}, with the sticky bit", cost, advice)
    text = f"user {user_name(own)} can write; {_described(root)}"
    if made != own:
        text += f"; new files belong to {user_name(made)}, as the server decides"
    return fine(FOLDER, text)


def _described(root: Path) -> str:
    try:
        status = root.stat()
    except OSError as error:
        return f"{root} cannot be examined ({error.strerror})"
    group = str(status.st_gid)
    with suppress(KeyError):
        group = grp.getgrgid(status.st_gid).gr_name
    return f"{root} belongs to {user_name(status.st_uid)}, group {group}, mode {stat.S_IMODE(status.st_mode):04o}"
