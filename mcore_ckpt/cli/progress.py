"""Shows a progress bar while bytes are moved."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def progress_of_bytes(quiet: bool) -> Progress:
    """Returns a bar of bytes done, speed and time left.

    The bar is shown on stderr, because stdout is for the result. It is shown only if stderr is a terminal, because a
    log needs no bar.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    quiet = quiet or not sys.stderr.isatty()
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=quiet)


def progress_in(bar: Progress, what: str) -> Callable[[int, int], None]:
    """Adds a task to a bar. Returns a function that moves the bar: `f(bytes_done, all_bytes)`."""
    task = bar.add_task(what, total=None)

    def update(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    return update
