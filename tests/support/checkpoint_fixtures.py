"""Fixtures of the tests that write small checkpoints. The conftest.py of a room imports those that its tests use."""

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io import tuning
from tests.support.checkpoints import ROLE, SMALL_KNOBS


@pytest.fixture
def role_dir(tmp_path: Path) -> Path:
    """The folder of one role in step 7. It does not exist yet."""
    return file_names.step_dir(tmp_path, 7) / ROLE


@pytest.fixture
def dead_pid() -> int:
    """The process id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(autouse=True)
def small_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the ranks share small files, and write them in several pieces."""
    for name, value in SMALL_KNOBS.items():
        monkeypatch.setattr(tuning, name, value)
