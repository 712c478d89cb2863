"""The report of a save: how many bytes this rank wrote, and how long each part took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SaveReport:
    """Report of one save on this rank. Times are in seconds.

    Attributes:
        step: the step that was saved.
        path: the checkpoint's folder.
        nbytes: the bytes that this rank wrote; of a file that several ranks share, this rank's part.
        seconds: from the call of `save` to the commit.
        stall_s: from the call of `save` to its return.
        plan_s: the time in which the save neither copied, nor wrote, nor waited for the commit: checks, the plan, and
            the ranks' first round.
        copy_s: until the state had been copied out. A state that is written in place is copied out while it is written.
        write_s: from the first write until all of this rank's files were on the disk.
        export_s: from then until this rank's part of the HuggingFace model was on the disk. It includes waiting for
            slower ranks. 0 without `hf_model`.
        commit_s: from then until the checkpoint was in its place. It includes waiting for slower ranks.
    """

    step: int
    path: Path
    nbytes: int
    seconds: float
    stall_s: float
    plan_s: float
    copy_s: float
    write_s: float
    export_s: float
    commit_s: float

    @property
    def copy_gb_per_s(self) -> float:
        """The speed of copying, in units of 10**9 bytes per second; 0.0 if nothing was copied."""
        return self.nbytes / self.copy_s / 1e9 if self.copy_s else 0.0

    @property
    def disk_gb_per_s(self) -> float:
        """The speed of writing, in units of 10**9 bytes per second; 0.0 if nothing was written."""
        return self.nbytes / self.write_s / 1e9 if self.write_s else 0.0
