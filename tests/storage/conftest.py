"""What several tests of the storage layer begin with."""

from pathlib import Path

import pytest
from checkpoints import ROLE

from mcore_ckpt import layout


@pytest.fixture
def role_dir(tmp_path: Path) -> Path:
    return layout.step_dir(tmp_path, 7) / ROLE
