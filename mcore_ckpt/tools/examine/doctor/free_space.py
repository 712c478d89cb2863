"""Finds out how much space is free below a root, and how many saves fit.

The results agree with the check before each save, because both come from `io/disk_space.py`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.amounts import size_text
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io.disk_space import Amount, DiskSpace, space_of
from mcore_ckpt.steps.listing import newest_complete
from mcore_ckpt.steps.step_sizes import NO_FILES, need_of
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity, fine

FREE_SPACE = "free room"  # scripts of users look for this name


@dataclass(frozen=True)
class FreeSpace:
    """The free space below a root. `step` is the newest complete step; None if there is none.

    A save of the same size as this step takes the amount `taken` for good, and `passing` more bytes until the save is
    committed.
    """

    disk: DiskSpace
    step: int | None = None
    taken: Amount = NO_FILES
    passing: int = 0

    @property
    def nbytes(self) -> int | None:
        """How many bytes can still be written; None if the system does not report this."""
        return self.disk.free("nbytes")

    @property
    def saves(self) -> int | None:
        """How many further saves of the newest step's size fit; None if unknown."""
        return self.disk.without(self.passing).times(self.taken)

    def __str__(self) -> str:
        if self.nbytes is None:
            return "the file system does not report its free space"
        text = f"{size_text(self.nbytes)} free"
        if self.saves is not None:
            word = "save" if self.saves == 1 else "saves"
            more = f", and {size_text(self.passing)} more until it is committed" if self.passing else ""
            text += f": {self.saves} more {word} like step {self.step} ({size_text(self.taken.nbytes)}{more})"
        if self.disk.is_certain:
            return text
        return f"{text}, or more if the disk stores files in less space than their size"


def free_space(root: Path) -> FreeSpace:
    """Returns the free space below an existing root. Raises OSError."""
    disk, newest = space_of(root), newest_complete(root)
    # If a manifest of the newest step cannot be read, the size of the next save is unknown.
    with suppress(CheckpointNotFoundError, CheckpointCorruptError):
        if newest is not None:
            need = need_of(newest)
            return FreeSpace(disk, newest.step, disk.taken_by(need.kept), need.passing)
    return FreeSpace(disk)


def free_bytes(root: Path) -> int | None:
    """Returns how many bytes this user can still write; None if unknown. Raises OSError."""
    return space_of(root).free("nbytes")


def finding_of_space(space: FreeSpace) -> Finding:
    """Returns the finding about the free space.

    If the amount of free space is uncertain, saves are tried anyway, so too little space is only a risk.
    """
    if space.nbytes is None:
        return fine(FREE_SPACE, str(space))
    values = {"bytes": float(space.nbytes)}
    if space.saves is not None:
        values |= {"saves": float(space.saves), "step_bytes": float(space.taken.nbytes)}
    is_certain = space.disk.is_certain
    too_little = Severity.BAD if is_certain else Severity.RISK
    if space.nbytes == 0:
        cost = "no checkpoint can be saved" if is_certain else "saves may fail"
        return Finding(FREE_SPACE, too_little, "no byte is free", cost, "delete files, or use another disk", values)
    if space.saves is not None and space.saves < 2:
        severity = too_little if space.saves == 0 else Severity.RISK
        which = "the next save" if space.saves == 0 else "the save after the next one"
        cost = f"{which} fails" if is_certain else f"{which} may fail"
        advice = (
            "delete files, or set max_to_keep (an old step is deleted only after the new step is committed, so there "
            "must be space for both)"
        )
        return Finding(FREE_SPACE, severity, str(space), cost, advice, values)
    return fine(FREE_SPACE, str(space), **values)
