"""Lets a command clean up when SIGTERM ends it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cleaning_up_at_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit in the block. torchrun sends SIGTERM to all ranks if a rank fails."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
