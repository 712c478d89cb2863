"""A bar for whoever waits while bytes are moved."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def progress_of_bytes(quiet: bool) -> Progress:
    """How much is done, how fast, and how long it will take; on stderr, so that a result stays readable."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=quiet)
