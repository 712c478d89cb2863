"""Finds the tests of with_swift/ only where ms-swift is on PYTHONPATH: test_swift.py launches them there."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_FOLDERS = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
collect_ignore = [] if any((Path(folder) / "mcore_bridge").is_dir() for folder in _FOLDERS) else ["with_swift"]
