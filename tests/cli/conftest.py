"""Fixtures for the tests of the commands."""

import sys
from collections.abc import Callable

import pytest

from tests.support.checkpoint_fixtures import dead_pid

__all__ = ["dead_pid"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[int], None]:
    """Makes the captured stdout a terminal without colors, of a width."""

    def become(columns: int) -> None:
        for name, value in {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return become
