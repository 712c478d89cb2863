"""Collects when each rank did each part of a save, for the timeline in the manifest.

The times travel in the ranks' reports, so they cost no message of their own. All are relative to the rank's own call of
`save`: the clocks of two hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_ckpt.checkpoint.timeline import SaveTimeline, Span, Spans
from mcore_ckpt.ranks.rounds import Record

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

    def to_record(self) -> Record:
        """Returns the part of a rank's report that `timeline_of` reads."""
        return {
            "plan": _in_us(self.plan),
            "copy": _in_us(self.copy),
            "write": _in_us(self.write),
            "stall": None if self.stall_s is None else _us(self.stall_s),
            "bytes": self.nbytes,
        }


def timeline_of(reports: Sequence[Record], commit: SpanInSeconds) -> SaveTimeline:
    """Returns the timeline of a save without an export.

    Args:
        reports: the report of each rank (`rank_reports.rank_report`), by rank.
        commit: on rank 0, from the end of writing until now, in seconds since its call of `save`.
    """
    times = [report["times"] for report in reports]
    stalls = tuple(each["stall"] for each in times)
    return SaveTimeline(
        nbytes=tuple(each["bytes"] for each in times),
        plan=_column(times, "plan"),
        copy=_column(times, "copy"),
        write=_column(times, "write"),
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


def _column(times: Sequence[Record], part: str) -> Spans:
    return tuple(each[part][0] for each in times), tuple(each[part][1] for each in times)


def _in_us(span: SpanInSeconds) -> Span:
    return _us(span[0]), _us(span[1])


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
