"""Finds what prevents the deletion of a step, or of files in it: a pin, a save, a change, or missing permissions."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.steps.listing import StepStatus, is_of_attempt
from mcore_ckpt.steps.work_folders import is_in_use


def obstacle_to(status: StepStatus, path: Path) -> str | None:
    """Returns what prevents the deletion of a step that is now at `path`, such as a pin; None if nothing does.

    Raises OSError: the step is gone, or its files cannot be deleted.
    """
    if status.aside:
        return "a save was replacing it and died; the next start or save of a trainer puts it back"
    if path.is_symlink():
        return "it is a link, and its target may belong to somebody else"
    if (path / file_names.PINNED_FILE).exists():
        return "it was pinned"
    for folder in (path, *map(path.joinpath, sorted(status.committed))):
        _check_may_change(folder)
    if is_in_use(path, status.path):
        return "a save is under way in it"
    flat = {status.flat or path.name} if (path / file_names.MANIFEST_FILE).exists() else set()
    roles = {each.name for each in path.iterdir() if file_names.is_role(each.name)}
    if {role for role in roles if (path / role / file_names.MANIFEST_FILE).exists()} | flat != status.committed:
        return "it has just changed"
    return "it has just changed" if any(_is_replaced(status, role, path) for role in status.committed) else None


def _is_replaced(status: StepStatus, role: str, path: Path) -> bool:
    """True if a role of a step that is now at `path` was saved again since the status was read."""
    role_dir = path if role == status.flat else path / role
    return not is_of_attempt(role_dir, status.says[role].attempt)


def check_may_rename(step_path: Path) -> None:
    """Raises PermissionError if this process may not rename a step, and so may not delete it."""
    _check_may_change(step_path.parent)


def _check_may_change(folder: Path) -> None:
    if _is_protected(folder):
        raise PermissionError(errno.EACCES, "may not be changed: it is another user's, or protected", str(folder))


def _is_protected(folder: Path) -> bool:
    """True if the files in a folder cannot be removed.

    A deletion first hides the step by a rename. Without this check such files would be hidden, but would stay, and take
    space.
    """
    # The system call filter of an old container makes every `access` call fail, even a call with `F_OK`. In that case,
    # only an attempt to remove the files shows whether they can be removed.
    is_seen = folder.is_dir() and os.access(folder, os.F_OK, effective_ids=True)
    return is_seen and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
