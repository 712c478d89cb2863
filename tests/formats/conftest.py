"""Fixtures for the tests of formats."""

from pathlib import Path

import pytest

from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.formats.native import stored_tensors
from tests.support.checkpoint_fixtures import small_knobs

__all__ = ["opened", "small_knobs"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files whose indexes a reader reads, in order."""
    paths: list[str] = []
    read = stored_tensors.read_entries

    def noting(role_dir: Path, record: FileRecord) -> object:
        paths.append(record.path)
        return read(role_dir, record)

    monkeypatch.setattr(stored_tensors, "read_entries", noting)
    return paths
