"""Which steps are on disk, and which of them are complete.

The manifests are the truth, the tracker a hint.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mcore_ckpt import knobs, layout
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CommitError
from mcore_ckpt.storage.files import read_small, replace_file
from mcore_ckpt.storage.reader import read_manifest

logger = logging.getLogger(__name__)

# Of somebody else's folder, or of a link that leads nowhere: this will be so tomorrow.
_STAYS_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENOENT)

# Roles that commit at the same moment: each look but the last is after another one's write.
_TRACKER_LOOKS = 16


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
    for _, paths in sorted(layout.step_dirs(root).items()):
        statuses = [step_status(path) for path in paths]
        result.append(next((status for status in statuses if status.is_complete), statuses[0]))
    return result


def complete_steps(root: Path) -> list[StepStatus]:
    return [status for status in list_steps(root) if status.is_complete]


def step_status(path: Path) -> StepStatus:
    """What is in one step folder."""
    step = layout.parse_step(path.name)
    assert step is not None
    committed, declared, problems, flat = set(), set(), [], None
    try:
        entries = _entries(path)
    except OSError as error:
        return StepStatus(step, path, frozenset(), frozenset(), (_why_unreadable(path, error),))
    for role_dir in [path, *(entry for entry in entries if layout.is_role(entry.name))]:
        try:
            stat = (role_dir / layout.MANIFEST_FILE).stat()
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
    pinned = layout.PINNED_FILE in {entry.name for entry in entries}
    return StepStatus(step, path, frozenset(committed), frozenset(declared), tuple(problems), pinned, flat)


def holds_something(status: StepStatus) -> bool:
    """Whether a step folder is more than what a save that never ended has left, and its trainer had put beside it."""
    return bool(status.problems) or any(
        not entry.name.startswith(".") and (layout.is_own(entry.name) or not entry.is_file())
        for entry in _entries(status.path)
    )


def _why_unreadable(path: Path, error: OSError) -> str:
    """The step's problem, which all others go on without. Raises what may pass: it must not lead to an older step."""
    if error.errno not in _STAYS_UNREADABLE:
        raise error
    link = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
    return f"{path}{link}: cannot be read: {error.strerror}"


def _has_roles(path: Path) -> bool:
    return any(os.path.exists(entry / layout.MANIFEST_FILE) for entry in _entries(path) if layout.is_role(entry.name))


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
    manifest = read_manifest(role_dir, layout.MANIFEST_FILE)
    return manifest.step, manifest.role, manifest.roles


def read_tracker(root: Path) -> int | None:
    """The step the tracker names; None if there is no tracker, or it holds anything else. Raises nothing."""
    try:
        return layout.parse_tracker(read_small(root / layout.TRACKER_FILE, knobs.SMALL_BYTES).decode())
    except (OSError, CheckpointCorruptError, UnicodeDecodeError):
        return None


def check_one_spelling(root: Path, role_dir: Path, step: int) -> None:
    """Raises CommitError if a step is there under another name: of two, `load` could not know which is meant."""
    for path in layout.step_dirs(root).get(step, []):
        if path.name not in (role_dir.name, role_dir.parent.name) and step_status(path).committed:
            raise CommitError(
                f"step {step} is there already, as {path}: save to that folder, or delete or move it, before saving to "
                f"{role_dir}"
            )


def update_tracker(root: Path, only: int | None = None) -> int | None:
    """Makes the tracker name the newest complete step, which is returned. Raises OSError.

    `only`: a trainer that names its folders itself resumes from what the tracker names, and after going back to an
    older step that must not be a newer one of the run that it left: name this step, if it is complete, or leave the
    tracker alone.
    """
    newest = None
    for _ in range(_TRACKER_LOOKS):
        complete = [status.step for status in complete_steps(root)]
        if not complete:
            return None
        newest = complete[-1]
        wanted = newest if only is None else only
        if read_tracker(root) == wanted or wanted not in complete:
            break
        replace_file(root / layout.TRACKER_FILE, str(wanted).encode())
        # Once more: another role may have completed a newer step between the look and the write, and have moved the
        # tracker there before it was moved back here.
    return newest


def move_tracker(root: Path, only: int | None = None) -> int | None:
    """`update_tracker` behind a commit: the checkpoint is in place, so a failure here is told and is not the save's."""
    try:
        return update_tracker(root, only)
    except OSError as error:
        logger.warning("the checkpoint is committed, but the tracker could not be updated: %s", error)
        return None


def warn_if_tracker_differs(root: Path, complete: Sequence[StepStatus]) -> None:
    """Says so if the tracker does not name the newest of the complete steps. Raises nothing.

    Args:
        root: the folder of the steps.
        complete: at least one, the oldest first.
    """
    path, tracked, newest = root / layout.TRACKER_FILE, read_tracker(root), complete[-1].step
    if tracked == newest or not os.path.lexists(path):
        return
    if tracked is None:
        logger.warning("%s does not name a step; loading the newest complete one, %d", path, newest)
    elif tracked in [status.step for status in complete]:
        logger.warning(
            "%s names step %d, but the newest complete step is %d: loading that. Use load(step=%d) for the other",
            path,
            tracked,
            newest,
            tracked,
        )
    else:
        logger.warning(
            "%s names step %d, where there is nothing complete to load; loading the newest complete step, %d",
            path,
            tracked,
            newest,
        )


def tracker_problems(root: Path) -> list[str]:
    """Why other programs, which go by the tracker, would not load what `load` does; nothing if they would."""
    path, complete = root / layout.TRACKER_FILE, complete_steps(root)
    if not complete and not path.exists():
        return []
    tracked = read_tracker(root)
    if tracked is None:
        return [f"{path}: {'does not name a step' if path.exists() else 'missing'}; the next save writes it anew"]
    if not complete or tracked != complete[-1].step:
        newest = f"the newest complete step is {complete[-1].step}" if complete else "no step is complete"
        return [f"{path}: names step {tracked}, but {newest}"]
    return []
