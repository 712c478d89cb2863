"""Tells the listeners what happens to one save."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt.delivery import Delivery
from mcore_ckpt.events import Captured, Committed, ErrorText, Failed, Phase, Skipped, Started, Written
from mcore_ckpt.save.save_times import SaveReport, SaveTimes


class SaveEvents:
    """The events of one save on this rank. All times passed to its methods are values of time.perf_counter()."""

    def __init__(self, delivery: Delivery, step: int, role: str, rank: int, called: float) -> None:
        self._delivery, self._called = delivery, called
        self._common: dict[str, Any] = {"step": step, "role": role, "rank": rank}
        self._epoch = time.time() - time.perf_counter()
        # False before `started` and after the save's end.
        self._is_under_way = False

    def started(self, path: Path) -> None:
        """Tells that the save has begun. Before this call, listeners are told nothing, not even a failure."""
        self._common["path"] = path
        self._is_under_way = True
        self._delivery.post(Started(**self._at(self._called)))

    def captured(self, at: float, nbytes: int, seconds: float) -> None:
        """Tells that all of this rank's state has been read."""
        self._delivery.post(Captured(**self._at(at), nbytes=nbytes, seconds=seconds))

    def written(self, at: float, nbytes: int, seconds: float) -> None:
        """Tells that this rank's files are on the disk."""
        self._delivery.post(Written(**self._at(at), nbytes=nbytes, seconds=seconds))

    def committed(self, report: SaveReport, times: SaveTimes) -> None:
        """Tells that the checkpoint is committed. Then the save has ended."""
        self._is_under_way = False
        at = self._called + report.seconds
        phases = self._phases(times.spans(at))
        self._delivery.post(
            Committed(
                **self._at(at), nbytes=report.nbytes, seconds=report.seconds, stall_s=report.stall_s, phases=phases
            )
        )

    def skipped(self, reason: str) -> None:
        """Tells that nothing is saved, because an earlier save is under way."""
        self._is_under_way = False
        now = time.perf_counter()
        self._delivery.post(Skipped(**self._at(now), reason=reason, seconds=now - self._called))

    def failed(self, error: BaseException, times: SaveTimes | None = None) -> None:
        """Tells that the save has failed, if it is under way. `times` is None if planning has failed."""
        if not self._is_under_way:
            return
        self._is_under_way = False
        if not self._delivery.has_listeners:
            return
        now = time.perf_counter()
        spans = {"plan": (self._called, now)} if times is None else times.spans(now)
        self._delivery.post(
            Failed(
                **self._at(now),
                operation="save",
                error=ErrorText.of(error),
                seconds=now - self._called,
                phases=self._phases(spans),
            )
        )

    @contextmanager
    def telling_of_failure(self) -> Iterator[None]:
        """Tells of an error that the block raises."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def _phases(self, spans: Mapping[str, tuple[float, float]]) -> tuple[Phase, ...]:
        return tuple(Phase(name, self._epoch + start, end - start) for name, (start, end) in spans.items())

    def _at(self, moment: float) -> dict[str, Any]:
        return self._common | {"time": self._epoch + moment}
