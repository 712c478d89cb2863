"""Tells the listeners how a load has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mcore_ckpt.delivery import Delivery
from mcore_ckpt.events import ErrorText, Failed, Loaded
from mcore_ckpt.load.load import LoadResult
from mcore_ckpt.state.trainer import Trainer


def load_and_tell(
    delivery: Delivery, trainer: Trainer, step: int | None, path: Path | None, load: Callable[[], LoadResult]
) -> LoadResult:
    """Calls `load`, which is to load this step or path, and tells whether it succeeded or failed."""
    started = time.perf_counter()
    role, rank = trainer.role, trainer.agreement.rank
    try:
        result = load()
    except BaseException as error:
        if delivery.has_listeners:  # formatting the traceback takes a while
            delivery.post(
                Failed(
                    step=step,
                    role=role,
                    rank=rank,
                    path=trainer.root if path is None else path,
                    time=time.time(),
                    operation="load",
                    error=ErrorText.of(error),
                    seconds=time.perf_counter() - started,
                )
            )
        raise
    report = result.report
    delivery.post(
        Loaded(
            step=result.step,
            role=role,
            rank=rank,
            path=report.path,
            time=time.time(),
            nbytes=report.nbytes,
            seconds=report.seconds,
            skipped=report.skipped,
            rounded=report.rounded,
        )
    )
    return result
