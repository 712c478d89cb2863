"""Which steps are on disk, and which of them are complete.

The manifests are the truth, the tracker a hint.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CommitError

logger = logging.getLogger(__name__)

# Of somebody else's folder, or of a link that leads nowhere: this will be so tomorrow.
_STAYS_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENOENT)


@dataclass(frozen=True)
class StepStatus:
    """One step folder: the roles that have committed, those any of them declares, and what is wrong with the others.

    `pinned`: retention leaves it alone (storage/retention.py). `flat`: a role whose folder is the step's own.
    """

    step: int
    path: Path
    committed: frozenset[str]
    declared: frozenset[str]
    problems: tuple[str, ...]
    pinned: bool = False
    flat: str | None = None

    def role_dir(self, role: str) -> Path:
        return self.path if role == self.flat else self.path / role

    @property
    def is_complete(self) -> bool:
        return bool(self.committed) and self.declared <= self.committed

    @property
    def reason(self) -> str:
        """Why it does not count."""
        if self.problems:
            return "; ".join(self.problems)
        missing = ", ".join(sorted(self.declared - self.committed))
        return (
            f"{self.path}: not committed by {missing}" if missing else f"{self.path}: no manifest of mcore_ckpt in it"
        )


def list_steps(root: Path) -> list[StepStatus]:
    """All step folders, the oldest first. Of two spellings of one step, the complete one."""
    result = []
    for _, paths in sorted(file_names.step_dirs(root).items()):
        statuses = [step_status(path) for path in paths]
        result.append(next((status for status in statuses if status.is_complete), statuses[0]))
    return result


def complete_steps(root: Path) -> list[StepStatus]:
    return [status for status in list_steps(root) if status.is_complete]


def step_status(path: Path) -> StepStatus:
    """What is in one step folder."""
    step = file_names.parse_step(path.name)
    assert step is not None
    committed, declared, problems, flat = set(), set(), [], None
    try:
        entries = _entries(path)
    except OSError as error:
        return StepStatus(step, path, frozenset(), frozenset(), (_why_unreadable(path, error),))
    for role_dir in [path, *(entry for entry in entries if file_names.is_role(entry.name))]:
        try:
            stat = (role_dir / file_names.MANIFEST_FILE).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problems.append(_why_unreadable(role_dir, error))
            continue
        try:
            saved_step, role, roles = _read_roles(role_dir, stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except CheckpointNotFoundError:
            continue
        except CheckpointCorruptError as error:
            if role_dir == path and _has_roles(path):
                continue  # a file of that name that somebody else has put beside the roles
            problems.append(str(error))
            declared.add(role_dir.name)
            flat = path.name if role_dir == path else flat
            continue
        flat = role if role_dir == path else flat
        declared.update(roles, (role,))
        if (saved_step, role) == (step, role if role_dir == path else role_dir.name):
            committed.add(role)
        else:
            problems.append(f"{role_dir}: its manifest is of {role} at step {saved_step}")
            declared.add(role if role_dir == path else role_dir.name)
    pinned = file_names.PINNED_FILE in {entry.name for entry in entries}
    return StepStatus(step, path, frozenset(committed), frozenset(declared), tuple(problems), pinned, flat)


def holds_something(status: StepStatus) -> bool:
    """Whether a step folder is more than what a save that never ended has left, and its trainer had put beside it."""
    return bool(status.problems) or any(
        not entry.name.startswith(".") and (file_names.is_own(entry.name) or not entry.is_file())
        for entry in _entries(status.path)
    )


def _why_unreadable(path: Path, error: OSError) -> str:
    """The step's problem, which all others go on without. Raises what may pass: it must not lead to an older step."""
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
        return []  # another role's retention has just deleted it


@lru_cache(maxsize=4096)
def _read_roles(role_dir: Path, mtime_ns: int, size: int, inode: int) -> tuple[int, str, tuple[str, ...]]:
    """Of one manifest file, whose identity is in the arguments: a manifest of a large run takes long to parse."""
    manifest = read_manifest(role_dir)
    return manifest.step, manifest.role, manifest.roles


def check_one_spelling(root: Path, role_dir: Path, step: int) -> None:
    """Raises CommitError if a step is there under another name: of two, `load` could not know which is meant."""
    for path in file_names.step_dirs(root).get(step, []):
        if path.name not in (role_dir.name, role_dir.parent.name) and step_status(path).committed:
            raise CommitError(
                f"step {step} is there already, as {path}: save to that folder, or delete or move it, before saving to "
                f"{role_dir}"
            )
