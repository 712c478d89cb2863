"""Notes when the phases of one save begin and end, for the report, the timeline and the events.

Ranks send their times in their reports, so no further message is needed. Times count from the call of `save` on the
same rank, so the clocks of two hosts are never compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.checkpoint.timeline import SaveTimeline, Span
from mcore_ckpt.ranks.rounds import Record

# The starts and ends of planning, copying and writing in microseconds, the bytes, and the stall in microseconds.
TimesRecord = tuple[int, int, int, int, int, int, int, int | None]


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
        different_replicas: on rank 0, a sentence for each tensor that has different bytes on replicas. A save compares
            some tensors, and with `verify_replicas` all of them.
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


class SaveTimes:
    """When the phases of one save on this rank began and ended. All times are values of time.perf_counter().

    The moments are `started` (the wait for an earlier save is over), `planned`, `captured`, `begun` (the training may
    go on), `writing` (the first write), `written` and `exported`. The moments come in this order, but an async save may
    be `writing` before it is `begun`. Between the call of `save` (`called`) and `started`, the save may have waited for
    an earlier save.

    Attributes:
        copies_first: whether the state is copied before it is written. If not, the state is read while it is written.
        copied: when copying ended; None until then.
    """

    def __init__(self, called: float) -> None:
        self._called = called
        self._moments = {"started": called}
        self.copies_first = False
        self.copied: float | None = None

    def mark(self, moment: str) -> float:
        """Sets a moment to the current time, and returns this time."""
        self._moments[moment] = now = time.perf_counter()
        return now

    def __getitem__(self, moment: str) -> float:
        return self._moments[moment]

    def spans(self, now: float) -> dict[str, tuple[float, float]]:
        """Returns the start and the end of each phase that has begun. If a phase has not ended, its end is `now`."""
        at = self._moments
        spans = {"wait": (self._called, at["started"]), "plan": (at["started"], at.get("planned", now))}
        copying = at.get("planned" if self.copies_first else "writing")
        if copying is not None:
            spans["copy"] = (copying, now if self.copied is None else self.copied)
        if "writing" in at:
            spans["write"] = (at["writing"], at.get("written", now))
        if "exported" in at:
            spans["export"] = (at["written"], at["exported"])
        if "written" in at:
            spans["commit"] = (at.get("exported", at["written"]), now)
        return spans

    def report(self, step: int, path: Path, nbytes: int, stall_s: float | None) -> SaveReport:
        """Returns the report of a save that is committed now. `stall_s` is None if the trainer still waits."""
        at, now = self._moments, time.perf_counter()
        seconds = now - self._called
        lengths = {part: end - start for part, (start, end) in self.spans(now).items()}
        return SaveReport(
            step=step,
            path=path,
            nbytes=nbytes,
            seconds=seconds,
            stall_s=seconds if stall_s is None else stall_s,
            plan_s=lengths["plan"] + at["writing"] - at["captured"],
            copy_s=lengths["copy"],
            write_s=lengths["write"],
            export_s=lengths.get("export", 0.0),
            commit_s=lengths["commit"],
        )

    def report_of_nothing(self, step: int, path: Path) -> SaveReport:
        """Returns the report of a skipped save, which held up the training until now, and wrote no byte."""
        seconds = time.perf_counter() - self._called
        return SaveReport(step, path, 0, seconds, seconds, seconds, 0.0, 0.0, 0.0, 0.0)

    def in_us(self) -> dict[str, Span]:
        """Returns `spans` in microseconds since the call of `save`, as in the manifest."""
        spans = self.spans(time.perf_counter())
        return {part: (_us(start - self._called), _us(end - self._called)) for part, (start, end) in spans.items()}

    def to_record(self, stall_s: float | None, nbytes: int) -> TimesRecord:
        """Returns the part of a rank's report that `timeline_of` reads.

        Call this method when all files of the rank are written.

        `stall_s` is how long `save` held the training up, in seconds; None if `save` returns only after the commit.
        `nbytes` leaves out the rank's part of the HuggingFace model.
        """
        spans, stall = self.in_us(), None if stall_s is None else _us(stall_s)
        return (*spans["plan"], *spans["copy"], *spans["write"], nbytes, stall)


def timeline_of(times: Sequence[TimesRecord], commit: Span) -> SaveTimeline:
    """Returns the timeline of a save without an export, from the times of each rank.

    `commit` is the time on rank 0 from the end of writing until now, in microseconds since rank 0's call of `save`.
    """
    *spans, nbytes, stalls = zip(*times, strict=True)
    return SaveTimeline(
        nbytes=nbytes,
        plan=(spans[0], spans[1]),
        copy=(spans[2], spans[3]),
        write=(spans[4], spans[5]),
        commit=commit,
        stall=None if None in stalls else stalls,
    )


def with_export(timeline: SaveTimeline, reports: Sequence[Record], commit: Span) -> SaveTimeline:
    """Returns the timeline with the export of the HuggingFace model added.

    On each rank, the export begins once the rank has written its files. Each rank's report says when the rank's part of
    the model was on the disk (`exported`, in microseconds). `commit` is as in `timeline_of`, but begins at the end of
    the export.
    """
    starts = timeline.write[1]
    ends = tuple(max(start, report["exported"]) for start, report in zip(starts, reports, strict=True))
    return replace(timeline, export=(starts, ends), commit=commit)


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
