"""Tells the listeners how a load has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt.delivery import Delivery
from mcore_ckpt.events import ErrorText, Failed, Loaded
from mcore_ckpt.load.report import LoadResult


class LoadEvents:
    """The events of one load on this rank.

    Args:
        delivery: brings the events to the listeners.
        role, rank: the manager's role and this rank, which are fields of each event.
    """

    def __init__(self, delivery: Delivery, role: str, rank: int) -> None:
        self._delivery, self._started = delivery, time.perf_counter()
        self._common: dict[str, Any] = {"role": role, "rank": rank}

    def loaded(self, result: LoadResult) -> None:
        """Tells that a load has succeeded."""
        report = result.report
        self._delivery.post(
            Loaded(
                **self._common,
                step=result.step,
                path=report.path,
                time=time.time(),
                nbytes=report.nbytes,
                seconds=report.seconds,
                skipped=report.skipped,
                rounded=report.rounded,
            )
        )

    @contextmanager
    def telling_of_failure(self, step: int | None, path: Path) -> Iterator[None]:
        """Tells of an error that the body of `with` raises. The body loads `step`, or the checkpoint at `path`."""
        try:
            yield
        except BaseException as error:
            if self._delivery.has_listeners:  # formatting the traceback takes a while
                self._delivery.post(
                    Failed(
                        **self._common,
                        step=step,
                        path=path,
                        time=time.time(),
                        operation="load",
                        error=ErrorText.of(error),
                        seconds=time.perf_counter() - self._started,
                    )
                )
            raise
