"""What several tests of the storage layer begin with."""

from pathlib import Path

import pytest
from checkpoints import ROLE, SMALL_KNOBS

from mcore_ckpt import knobs, layout


@pytest.fixture
def role_dir(tmp_path: Path) -> Path:
    return layout.step_dir(tmp_path, 7) / ROLE


@pytest.fixture(autouse=True)
def small_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' small files are shared, and written in several pieces."""
    for name, value in SMALL_KNOBS.items():
        monkeypatch.setattr(knobs, name, value)
