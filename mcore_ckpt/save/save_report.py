"""Defines the report of a save: how many bytes this rank wrote, and how long each part took.

`SaveTimes.report` in `save_times.py` fills in the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SaveReport:
    """Report of one save on this rank. Times are in seconds.

    Attributes:
        step: the step that was saved.
        path: the checkpoint's folder.
        nbytes: the number of bytes that this rank wrote. If several ranks write one file, only this rank's part counts.
        seconds: the time from the call of `save` to the commit.
        stall_s: the time from the call of `save` to its return.
        plan_s: the time for checks, for the plan and for the ranks' first round, plus any time between copying and
            writing.
        copy_s: the time to copy the state. If the state is written in place, the time until all of it has been read.
        write_s: the time from the first write until all of this rank's files were on the disk.
        export_s: the time from the end of writing until this rank's part of the HuggingFace model was on the disk,
            including the wait for slower ranks. 0 without `hf_model`.
        commit_s: the time from the end of writing and exporting until the checkpoint was in its place, including the
            wait for slower ranks.
        different_replicas: on rank 0, a sentence for each tensor of which this save has found that replicas have
            different bytes. A save looks at some tensors, and with `verify_replicas` at all.
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
    different_replicas: tuple[str, ...] = ()

    @property
    def copy_gb_per_s(self) -> float:
        """The speed of copying, in GB (10**9 bytes) per second; 0.0 if nothing was copied."""
        return self.nbytes / self.copy_s / 1e9 if self.copy_s else 0.0

    @property
    def disk_gb_per_s(self) -> float:
        """The speed of writing, in GB (10**9 bytes) per second; 0.0 if nothing was written."""
        return self.nbytes / self.write_s / 1e9 if self.write_s else 0.0
