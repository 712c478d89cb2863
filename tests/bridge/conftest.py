"""Finds the tests of with_bridge/ only where Megatron-Bridge is on PYTHONPATH: test_bridge.py launches them there."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_FOLDERS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
_HAS_BRIDGE = any((Path(folder) / "megatron" / "bridge").is_dir() for folder in _FOLDERS if folder)
collect_ignore = [] if _HAS_BRIDGE else ["with_bridge"]
