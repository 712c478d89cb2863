"""Finds the saves that are under way below a root, from their staging folders. Writes nothing and takes no lock."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io import tuning
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.steps.owner import Life, Owner, read_owner
from mcore_ckpt.steps.work_folders import entries, own_steps


@dataclass(frozen=True)
class RunningSave:
    """A save that has a staging folder, of a living or a dead process.

    Attributes:
        role: the role; None if the step's own folder is the role's folder.
        attempt: the id of the save. If the role's manifest has the same id, the save is committed, and its staging
            folder holds the checkpoint that the save has replaced.
        owner: the process that leads the save; None if it is not known.
        life: whether that process is alive.
        began: when the save began, in seconds since the epoch, by the clock of the file system.
    """

    step: int
    role: str | None
    attempt: str
    staging: Path
    owner: Owner | None
    life: Life
    began: float

    @property
    def by(self) -> str:
        """Describes the process, such as "process 12 on node3"."""
        return str(self.owner or "an unknown process")


def running_saves(root: Path, steps: Iterable[Path] | None = None) -> list[RunningSave]:
    """Returns the saves that have a staging folder, the lowest step first.

    With `steps`, looks only into these folders.
    """
    folders = [root, *(own_steps(root) if steps is None else steps)]
    listed = results_of(folders, _entries, tuning.LOOK_THREADS)
    found = [save for folder in listed for entry in folder if (save := _save_in(root, entry)) is not None]
    return sorted(found, key=lambda save: (save.step, save.role or "", save.began))


def _entries(folder: Path) -> list[Path]:
    # A folder that cannot be read (a link to itself, a failing disk) shows no save. A listing reports the reason.
    with suppress(OSError):
        return entries(folder)
    return []


def _save_in(root: Path, entry: Path) -> RunningSave | None:
    work = file_names.parse_work_dir(entry.name)
    if work is None or work.purpose != "staging":
        return None
    # If the step's folder is also the folder of its only role, the staging folder is next to it.
    is_flat = entry.parent == root
    step = file_names.parse_step(work.role if is_flat else entry.parent.name)
    if step is None:
        return None
    owner = read_owner(entry)
    life = Life.UNKNOWN if owner is None else owner.life  # the owner file appears only after the folder
    return RunningSave(step, None if is_flat else work.role, work.attempt, entry, owner, life, _began(entry))


def _began(staging: Path) -> float:
    # The time of the owner's file tells when the save began. The time of the folder is used only if there is no such
    # file, because the folder's time changes with each new file in the folder.
    for path in (staging / file_names.OWNER_FILE, staging):
        with suppress(OSError):
            return os.stat(path).st_mtime
    return 0.0
