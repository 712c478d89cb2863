"""Lists the steps on disk and finds out which of them are complete.

Only the manifests decide whether a step is complete. The tracker is not read here.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.reading import read_manifest_summary
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CommitError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.threads import results_of

logger = logging.getLogger(__name__)

# A folder that cannot be read because of one of these errors stays unreadable. Examples are a folder of another user
# and a link to a folder that does not exist. Other errors may be temporary.
_STAYS_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENOENT)

# Of how many roots manifests are remembered.
_MOST_ROOTS = 8


class _Head(NamedTuple):
    """What a listing needs of a manifest, and the identity of the file that it was read from."""

    identity: tuple[int, int, int]
    says: ManifestSummary


_Heads = dict[Path, _Head]
# By root, then by role's folder. The manifest of a large run takes long to read and to parse.
_heads: dict[Path, _Heads] = {}


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
        aside: the folders of committed roles that a save was moving aside when it died. Such a checkpoint is the role's
            until the next trainer puts it back.
    """

    step: int
    path: Path
    committed: frozenset[str]
    declared: frozenset[str]
    problems: tuple[str, ...]
    pinned: bool = False
    flat: str | None = None
    aside: Mapping[str, Path] = field(default_factory=dict, compare=False)

    def role_dir(self, role: str) -> Path:
        """Returns the folder of a role in this step."""
        return self.path if role == self.flat else self.aside.get(role, self.path / role)

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


def list_steps(root: Path, only: int | None = None) -> list[StepStatus]:
    """Returns all steps below a root, the oldest first; or only the step with a number, without a look at the others.

    If a step has two folders (`global_step_5` and `global_steps_5`), the status of the complete one is returned.

    Raises OSError: the root cannot be read, or a step cannot be read because of an error that may be temporary.

    Example:
        >>> [status.step for status in list_steps(Path("checkpoints")) if status.is_complete]
        []
    """
    folders = file_names.step_dirs(root)
    known = _known(root, folders)
    # Looks at steps wait for the file system most of the time.
    wanted = sorted(of for of in folders.items() if only in (None, of[0]))
    return results_of(wanted, lambda of: _status_of_step(of[1], known), tuning.LOOK_THREADS)


def newest_steps(root: Path, count: int) -> list[StepStatus]:
    """Returns the newest steps, complete or not, the oldest of them first. It looks at no older step.

    Raises OSError like `list_steps`, for the steps that it looks at.
    """
    folders = file_names.step_dirs(root)
    known = _known(root, folders)
    return [_status_of_step(paths, known) for _, paths in sorted(folders.items())[-count:]]


def newest_complete(root: Path, role: str | None = None) -> StepStatus | None:
    """Returns the newest complete step, or None. It looks at no older step, so it is fast even if there are thousands.

    Args:
        root: the folder of the steps.
        role: a role that the step must have; None for any.

    Raises OSError like `list_steps`, for the steps that it looks at.
    """
    folders = file_names.step_dirs(root)
    known = _known(root, folders)
    for _, paths in sorted(folders.items(), reverse=True):
        status = _status_of_step(paths, known)
        if status.is_complete and (role is None or role in status.committed):
            return status
    return None


def _status_of_step(paths: Sequence[Path], known: _Heads) -> StepStatus:
    statuses = [_status(path, known) for path in paths]
    return next((status for status in statuses if status.is_complete), statuses[0])


def complete_steps(root: Path) -> list[StepStatus]:
    """Returns the steps that are complete, the oldest first. Raises OSError like `list_steps`."""
    return [status for status in list_steps(root) if status.is_complete]


def step_status(path: Path) -> StepStatus:
    """Returns the state of one step folder. Its name must be that of a step. Raises OSError like `list_steps`."""
    return _status(path, _heads.get(path.parent, {}))


def _status(path: Path, known: _Heads) -> StepStatus:
    step = file_names.parse_step(path.name)
    assert step is not None, f"{path} is not named after a step"
    try:
        entries = _entries(path)
    except OSError as error:
        return StepStatus(step, path, frozenset(), frozenset(), (_why_unreadable(path, error),))
    folders = [path] if any(entry.name == file_names.MANIFEST_FILE for entry in entries) else []
    folders += [path / entry.name for entry in entries if _may_be_role(entry)]
    found = {folder: read for folder in folders if (read := _read_folder(step, path, folder, known)) is not None}
    aside = _roles_aside(path, entries, found.values())
    for role, folder in aside.items():
        read = _read_folder(step, path, folder, known, role)
        if read is not None:
            found[folder] = read
    return StepStatus(
        step,
        path,
        committed=frozenset(read.role for read in found.values() if read.role is not None and read.problem is None),
        declared=frozenset(role for read in found.values() for role in read.declared),
        problems=tuple(read.problem for read in found.values() if read.problem is not None),
        pinned=file_names.PINNED_FILE in {entry.name for entry in entries},
        flat=found[path].role if path in found else None,
        aside={role: folder for role, folder in aside.items() if folder in found},
    )


def _roles_aside(path: Path, entries: Sequence[os.DirEntry[str]], found: Iterable[_RoleFolder]) -> dict[str, Path]:
    """Returns the folders of checkpoints that were moved aside, of roles that have no checkpoint in their own folder.

    Where folders cannot be exchanged, a save that replaces a checkpoint makes two renames (`commit.publish`). Between
    them, and after a power loss between them, the old checkpoint has only its hidden name.
    """
    works = [(entry.name, work) for entry in entries if (work := file_names.parse_work_dir(entry.name)) is not None]
    there = {read.role for read in found}
    return {work.role: path / name for name, work in works if work.purpose == "replaced" and work.role not in there}


class _RoleFolder(NamedTuple):
    """What the manifest in a folder shows: the folder's role, all roles of the step, and why the role is not committed.

    The problem is None if the role is committed.
    """

    role: str | None
    declared: frozenset[str]
    problem: str | None = None


def _may_be_role(entry: os.DirEntry[str]) -> bool:
    # The listing of the step says what is a file, so no call has to ask each file whether it has a manifest.
    return file_names.is_role(entry.name) and not entry.is_file(follow_symlinks=False)


def _read_folder(step: int, path: Path, role_dir: Path, known: _Heads, aside: str | None = None) -> _RoleFolder | None:
    """Reads the manifest in a step's own folder, or in a role's folder in it. Returns None if it has none.

    `aside` is the role whose checkpoint the folder is, if the folder does not have the role's name.
    """
    is_flat = role_dir == path
    try:
        saved_step, saved_role, roles = _read_head(role_dir, known).says
    except (FileNotFoundError, NotADirectoryError, CheckpointNotFoundError):
        return None
    except OSError as error:
        return _RoleFolder(None, frozenset(), _why_unreadable(role_dir, error))
    except CheckpointCorruptError as error:
        if is_flat and _has_roles(path):
            return None  # another program has put a file of that name beside the roles
        role = aside or role_dir.name
        return _RoleFolder(role, frozenset((role,)), str(error))
    role = saved_role if is_flat else aside or role_dir.name
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
        os.path.exists(path / entry.name / file_names.MANIFEST_FILE) for entry in _entries(path) if _may_be_role(entry)
    )


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        if path.is_symlink():
            raise
        return []  # retention of another process has just deleted it


def _read_head(role_dir: Path, known: _Heads) -> _Head:
    stat = (role_dir / file_names.MANIFEST_FILE).stat()
    identity = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    head = known.get(role_dir)
    if head is None or head.identity != identity:
        head = _Head(identity, read_manifest_summary(role_dir))
        known[role_dir] = head
    return head


def _known(root: Path, folders: Mapping[int, Sequence[Path]]) -> _Heads:
    """Returns what is known of the steps that are there. Forgets the others, since a long run saves thousands."""
    there = {path for paths in folders.values() for path in paths}
    # A copy, because another thread may be listing the same root.
    heads = dict(_heads.pop(root, {}))
    _heads[root] = {path: head for path, head in heads.items() if path in there or path.parent in there}
    for oldest in list(_heads)[:-_MOST_ROOTS]:
        _heads.pop(oldest, None)
    return _heads.get(root, {})


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
