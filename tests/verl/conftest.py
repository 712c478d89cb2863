"""Finds the tests of with_verl/ only where verl is on PYTHONPATH: test_verl.py launches them there."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Not whether verl can be imported: other tests take peft from the same folder.
_FOLDERS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
collect_ignore = [] if any((Path(folder) / "mbridge").is_dir() for folder in _FOLDERS if folder) else ["with_verl"]
