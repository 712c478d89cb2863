"""Says how much room is left below a root, and how many saves that is."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.steps.listing import step_status
from mcore_ckpt.tools.doctor.findings import Finding, Severity, fine

ROOM = "free room"


@dataclass(frozen=True)
class FreeRoom:
    """The room below a root.

    Attributes:
        nbytes: how many bytes can still be written; None if the system does not tell.
        step: the newest complete step; None if there is none.
        step_bytes: the size of its roles.
    """

    nbytes: int | None
    step: int | None = None
    step_bytes: int = 0

    @property
    def saves(self) -> int | None:
        """How many further saves of the newest step's size fit; None if that is unknown."""
        return None if self.nbytes is None or not self.step_bytes else self.nbytes // self.step_bytes

    def __str__(self) -> str:
        if self.nbytes is None:
            return "the file system does not tell how much is free"
        text = f"{self.nbytes / 1e9:.1f} GB free"
        if self.saves is None:
            return text
        word = "save" if self.saves == 1 else "saves"
        return f"{text}: {self.saves} more {word} like step {self.step} ({self.step_bytes / 1e9:.3g} GB)"


def free_room(root: Path) -> FreeRoom:
    """Returns the room below an existing root. Raises OSError."""
    nbytes = free_bytes(root)
    newest = _newest(root)
    return FreeRoom(nbytes) if newest is None else FreeRoom(nbytes, *newest)


def free_bytes(root: Path) -> int | None:
    """Returns how many bytes this user can still write; None if the file system does not tell. Raises OSError."""
    space = os.statvfs(root)
    return space.f_bavail * space.f_frsize if space.f_blocks else None


def _newest(root: Path) -> tuple[int, int] | None:
    """Returns number and size of the newest complete step."""
    for step, paths in sorted(file_names.step_dirs(root).items(), reverse=True):
        for path in paths:
            status = step_status(path)
            if status.is_complete:
                # Another process may be deleting it.
                with suppress(CheckpointError):
                    return step, sum(read_manifest(status.role_dir(role)).nbytes for role in status.committed)
    return None


def of_room(room: FreeRoom) -> Finding:
    """Says how much room is left, and whether it is enough."""
    if room.nbytes is None:
        return fine(ROOM, str(room))
    values = {"bytes": float(room.nbytes)}
    if room.saves is not None:
        values |= {"saves": float(room.saves), "step_bytes": float(room.step_bytes)}
    if room.nbytes == 0:
        return Finding(ROOM, Severity.BAD, "no byte is free", "no checkpoint can be saved", "free space", values)
    if room.saves is not None and room.saves < 2:
        severity = Severity.BAD if room.saves == 0 else Severity.RISK
        cost = "the next save fails" if room.saves == 0 else "the save after the next one fails"
        advice = "free space, or set max_to_keep: an old step is deleted only when the new one is committed"
        return Finding(ROOM, severity, str(room), cost, advice, values)
    return fine(ROOM, str(room), **values)
