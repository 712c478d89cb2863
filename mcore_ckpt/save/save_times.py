"""Notes when the parts of one save begin and end, and makes of that the report, the timeline and the phases.

The times of all ranks travel in their reports, so they cost no message of their own. All are relative to the rank's own
call of `save`: the clocks of two hosts are never compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.checkpoint.timeline import SaveTimeline, Span
from mcore_ckpt.events import Phase
from mcore_ckpt.ranks.rounds import Record


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


class SaveTimes:
    """The moments of one save on this rank, as time.perf_counter() tells them.

    The moments are `planned`, `captured`, `begun` (the training may go on), `writing` (the first write), `written` and
    `exported`. They come in this order, but an async save may be `writing` before it is `begun`.

    Args:
        called: when the trainer called `save`. That call may have waited for an earlier save.

    Attributes:
        copies_first: whether the state is copied before it is written. If not, it is read while it is written.
        copy: when copying began and ended; None until then.
    """

    def __init__(self, called: float) -> None:
        self._called = self._started = called
        self._moments: dict[str, float] = {}
        self.copies_first = False
        self.copy: SpanInSeconds | None = None

    def start(self) -> None:
        """Notes that no earlier save is waited for any more."""
        self._started = time.perf_counter()

    def mark(self, moment: str) -> float:
        """Notes that a moment is now, and returns it."""
        self._moments[moment] = now = time.perf_counter()
        return now

    def __getitem__(self, moment: str) -> float:
        return self._moments[moment]

    def since_call(self, moment: str) -> float:
        """Returns how long after the call of `save` a moment was, in seconds."""
        return self._moments[moment] - self._called

    def commit_span(self, start: str) -> SpanInSeconds:
        """Returns the time from a moment until now, in seconds since the call of `save`."""
        return self.since_call(start), time.perf_counter() - self._called

    def rank_times(self, stall_s: float | None, nbytes: int) -> RankTimes:
        """Returns what the manifest keeps of this rank, once all its files are written."""
        copy_start, copy_end = self._copied
        return RankTimes(
            plan=(self._started - self._called, self.since_call("planned")),
            copy=(copy_start - self._called, copy_end - self._called),
            write=(self.since_call("writing"), self.since_call("written")),
            stall_s=stall_s,
            nbytes=nbytes,
        )

    def report(self, step: int, path: Path, nbytes: int, stall_s: float | None) -> SaveReport:
        """Returns the report of a save that is committed now. Without `stall_s` the trainer has waited until now."""
        at, now = self._moments, time.perf_counter()
        seconds = now - self._called
        exported = at.get("exported", at["written"])
        return SaveReport(
            step=step,
            path=path,
            nbytes=nbytes,
            seconds=seconds,
            stall_s=seconds if stall_s is None else stall_s,
            plan_s=at["planned"] - self._started + at["writing"] - at["captured"],
            copy_s=self._copied[1] - self._copied[0],
            write_s=at["written"] - at["writing"],
            export_s=exported - at["written"],
            commit_s=now - exported,
        )

    def phases(self, phase: Callable[[str, float, float], Phase], now: float) -> list[Phase]:
        """Returns the phases that have begun. A phase that has not ended ends now.

        Args:
            phase: makes a phase of its name, its start and its end.
            now: the present moment.
        """
        at = self._moments
        phases = [
            phase("wait", self._called, self._started),
            phase("plan", self._started, at.get("planned", now)),
        ]
        copy_began = at.get("planned" if self.copies_first else "writing")
        if copy_began is not None:
            phases.append(phase("copy", copy_began, now if self.copy is None else self.copy[1]))
        if "writing" in at:
            phases.append(phase("write", at["writing"], at.get("written", now)))
        if "exported" in at:
            phases.append(phase("export", at["written"], at["exported"]))
        if "written" in at:
            phases.append(phase("commit", at.get("exported", at["written"]), now))
        return phases

    @property
    def _copied(self) -> SpanInSeconds:
        assert self.copy is not None, "writing comes first"
        return self.copy


SpanInSeconds = tuple[float, float]


@dataclass(frozen=True)
class RankTimes:
    """When one rank planned, copied and wrote, as (start, end) in seconds since its call of `save`.

    Attributes:
        plan, copy, write: the parts of the save (`SaveReport` describes them).
        stall_s: how long `save` held the training up; None if until the commit.
        nbytes: how many bytes the rank wrote, without its part of the HuggingFace model.
    """

    plan: SpanInSeconds
    copy: SpanInSeconds
    write: SpanInSeconds
    stall_s: float | None
    nbytes: int

    def to_record(self) -> TimesRecord:
        """Returns the part of a rank's report that `timeline_of` reads."""
        stall = None if self.stall_s is None else _us(self.stall_s)
        return (*_in_us(self.plan), *_in_us(self.copy), *_in_us(self.write), self.nbytes, stall)


# The starts and ends of planning, copying and writing in microseconds, the bytes, and the stall in microseconds.
TimesRecord = tuple[int, int, int, int, int, int, int, int | None]


def timeline_of(times: Sequence[TimesRecord], commit: SpanInSeconds) -> SaveTimeline:
    """Returns the timeline of a save without an export.

    Args:
        times: of each rank, by rank.
        commit: on rank 0, from the end of writing until now, in seconds since its call of `save`.
    """
    *spans, nbytes, stalls = zip(*times, strict=True)
    return SaveTimeline(
        nbytes=nbytes,
        plan=(spans[0], spans[1]),
        copy=(spans[2], spans[3]),
        write=(spans[4], spans[5]),
        commit=_in_us(commit),
        stall=None if None in stalls else stalls,
    )


def with_export(timeline: SaveTimeline, reports: Sequence[Record], commit: SpanInSeconds) -> SaveTimeline:
    """Returns the timeline with the export of the HuggingFace model, which begins when a rank has written its files.

    Args:
        timeline: the timeline without the export.
        reports: of each rank, the time when its part of the export was on the disk, as `exported`.
        commit: as in `timeline_of`, from the end of the export.
    """
    starts = timeline.write[1]
    ends = tuple(max(start, _us(report["exported"])) for start, report in zip(starts, reports, strict=True))
    return replace(timeline, export=(starts, ends), commit=_in_us(commit))


def _in_us(span: SpanInSeconds) -> Span:
    return _us(span[0]), _us(span[1])


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
