"""What several tests of the storage layer begin with."""

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import ROLE, SMALL_KNOBS

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.formats.native import folder
from mcore_ckpt.io import tuning


@pytest.fixture
def role_dir(tmp_path: Path) -> Path:
    return file_names.step_dir(tmp_path, 7) / ROLE


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(autouse=True)
def small_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' small files are shared, and written in several pieces."""
    for name, value in SMALL_KNOBS.items():
        monkeypatch.setattr(tuning, name, value)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files whose indexes a catalog reads, in order."""
    paths: list[str] = []
    read = folder.read_index

    def noting(role_dir: Path, record: FileRecord) -> object:
        paths.append(record.path)
        return read(role_dir, record)

    monkeypatch.setattr(folder, "read_index", noting)
    return paths
