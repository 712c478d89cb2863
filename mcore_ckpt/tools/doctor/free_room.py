"""Says how much room is left below a root, and how many saves that is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.io.room import room_of
from mcore_ckpt.steps.listing import newest_complete
from mcore_ckpt.steps.step_sizes import size_of, taken_by
from mcore_ckpt.tools.doctor.findings import Finding, Severity, fine

ROOM = "free room"


@dataclass(frozen=True)
class FreeRoom:
    """The room below a root.

    Attributes:
        nbytes: how many bytes can still be written; None if the system does not tell.
        step: the newest complete step; None if there is none.
        step_bytes: the size of its roles.
        entries: how many files and folders can still be made; None if the system does not tell.
        step_entries: how many the step has.
    """

    nbytes: int | None
    step: int | None = None
    step_bytes: int = 0
    entries: int | None = None
    step_entries: int = 0

    @property
    def saves(self) -> int | None:
        """How many further saves of the newest step's size fit; None if that is unknown."""
        of_each = ((self.nbytes, self.step_bytes), (self.entries, self.step_entries))
        return min((free // each for free, each in of_each if free is not None and each), default=None)

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
    nbytes, entries = _least(root, "nbytes"), _least(root, "entries")
    newest = newest_complete(root)
    if newest is None:
        return FreeRoom(nbytes, entries=entries)
    taken = taken_by([newest])
    return FreeRoom(nbytes, newest.step, size_of(newest).nbytes, entries, taken.entries)


def free_bytes(root: Path) -> int | None:
    """Returns how many bytes this user can still write; None if the file system does not tell. Raises OSError."""
    return _least(root, "nbytes")


def _least(root: Path, kind: str) -> int | None:
    return min((limit.free for limit in room_of(root).limits if limit.kind == kind), default=None)


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
