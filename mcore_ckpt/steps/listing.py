"""Lists the steps on disk and finds out which of them are complete.

Only the manifests decide whether a step is complete. The tracker is not read here.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.reading import read_manifest_summary
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CommitError

logger = logging.getLogger(__name__)

# A folder that cannot be read because of one of these errors stays unreadable. Examples are a folder of another user
# and a link to a folder that does not exist. Other errors may be temporary.
_STAYS_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENOENT)


@dataclass(frozen=True)
class StepStatus:
    """The state of one step folder.

    Attributes:
        step: the step's number.
        path: the step's folder.
        committed: the roles that are committed.
        declared: the roles that the step consists of, according to the manifests in it.
        problems: why roles with a manifest are not committed, or why the folder cannot be read.
        pinned: true if retention must keep the step.
        flat: the role whose folder is the step's own folder; None if there is none.
    """

    step: int
    path: Path
    committed: frozenset[str]
    declared: frozenset[str]
    problems: tuple[str, ...]
    pinned: bool = False
    flat: str | None = None

    def role_dir(self, role: str) -> Path:
        """Returns the folder of a role in this step."""
        return self.path if role == self.flat else self.path / role

    @property
    def is_complete(self) -> bool:
        """True if all roles that the step consists of are committed."""
        return bool(self.committed) and self.declared <= self.committed

    @property
    def reason(self) -> str:
        """Why the step is not complete."""
        if self.problems:
            return "; ".join(self.problems)
        missing = ", ".join(sorted(self.declared - self.committed))
        return (
            f"{self.path}: not committed by {missing}" if missing else f"{self.path}: no manifest of mcore_ckpt in it"
        )


def list_steps(root: Path) -> list[StepStatus]:
    """Returns all steps below a root, the oldest first.

    If a step has two folders (`global_step_5` and `global_steps_5`), the status of the complete one is returned.

    Raises OSError: the root cannot be read, or a step cannot be read because of an error that may be temporary.

    Example:
        >>> [status.step for status in list_steps(Path("checkpoints")) if status.is_complete]
        []
    """
    result = []
    for _, paths in sorted(file_names.step_dirs(root).items()):
        statuses = [step_status(path) for path in paths]
        result.append(next((status for status in statuses if status.is_complete), statuses[0]))
    return result


def complete_steps(root: Path) -> list[StepStatus]:
    """Returns the steps that are complete, the oldest first. Raises OSError like `list_steps`."""
    return [status for status in list_steps(root) if status.is_complete]


def step_status(path: Path) -> StepStatus:
    """Returns the state of one step folder. Its name must be that of a step. Raises OSError like `list_steps`."""
    step = file_names.parse_step(path.name)
    assert step is not None, f"{path} is not named after a step"
    try:
        entries = _entries(path)
    except OSError as error:
        return StepStatus(step, path, frozenset(), frozenset(), (_why_unreadable(path, error),))
    folders = [path, *(entry for entry in entries if file_names.is_role(entry.name))]
    found = {folder: read for folder in folders if (read := _read_folder(step, path, folder)) is not None}
    return StepStatus(
        step,
        path,
        committed=frozenset(read.role for read in found.values() if read.role is not None and read.problem is None),
        declared=frozenset(role for read in found.values() for role in read.declared),
        problems=tuple(read.problem for read in found.values() if read.problem is not None),
        pinned=file_names.PINNED_FILE in {entry.name for entry in entries},
        flat=found[path].role if path in found else None,
    )


class _RoleFolder(NamedTuple):
    """What the manifest in a folder shows: the folder's role, all roles of the step, and why the role is not committed.

    The problem is None if the role is committed.
    """

    role: str | None
    declared: frozenset[str]
    problem: str | None = None


def _read_folder(step: int, path: Path, role_dir: Path) -> _RoleFolder | None:
    """Reads the manifest in a step's own folder, or in a role's folder in it. Returns None if it has none."""
    is_flat = role_dir == path
    try:
        stat = (role_dir / file_names.MANIFEST_FILE).stat()
        saved_step, saved_role, roles = _read_roles(role_dir, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except (FileNotFoundError, NotADirectoryError, CheckpointNotFoundError):
        return None
    except OSError as error:
        return _RoleFolder(None, frozenset(), _why_unreadable(role_dir, error))
    except CheckpointCorruptError as error:
        if is_flat and _has_roles(path):
            return None  # another program has put a file of that name beside the roles
        return _RoleFolder(role_dir.name, frozenset((role_dir.name,)), str(error))
    role = saved_role if is_flat else role_dir.name
    declared = frozenset((*roles, saved_role, role))
    if (saved_step, saved_role) == (step, role):
        return _RoleFolder(role, declared)
    return _RoleFolder(role, declared, f"{role_dir}: its manifest is of {saved_role} at step {saved_step}")


def holds_something(status: StepStatus) -> bool:
    """True if a step folder holds anything besides leftovers of unfinished saves and loose files of other programs."""
    return bool(status.problems) or any(
        not entry.name.startswith(".") and (file_names.is_own(entry.name) or not entry.is_file())
        for entry in _entries(status.path)
    )


def _why_unreadable(path: Path, error: OSError) -> str:
    """Describes the error if the folder stays unreadable, so that the other steps can be used without it.

    Raises the error if it may be temporary. If it were ignored, the trainer could resume from an older step and lose
    training.
    """
    if error.errno not in _STAYS_UNREADABLE:
        raise error
    link = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
    return f"{path}{link}: cannot be read: {error.strerror}"


def _has_roles(path: Path) -> bool:
    return any(
        os.path.exists(entry / file_names.MANIFEST_FILE) for entry in _entries(path) if file_names.is_role(entry.name)
    )


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except FileNotFoundError:
        if path.is_symlink():
            raise
        return []  # retention of another process has just deleted it


@lru_cache(maxsize=4096)
def _read_roles(role_dir: Path, mtime_ns: int, size: int, inode: int) -> ManifestSummary:
    """Returns step, role and roles of a manifest.

    The result is cached by the file's identity, because the manifest of a large run takes long to read.
    """
    return read_manifest_summary(role_dir)


def check_one_spelling(root: Path, role_dir: Path, step: int) -> None:
    """Raises CommitError if a step already has a folder with another name.

    If it had two folders, `load` could not know which one is meant.
    """
    for path in file_names.step_dirs(root).get(step, []):
        if path.name not in (role_dir.name, role_dir.parent.name) and step_status(path).committed:
            raise CommitError(
                f"step {step} is there already, as {path}: save to that folder, or delete or move it, before saving to "
                f"{role_dir}"
            )
