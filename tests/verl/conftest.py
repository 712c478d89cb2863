"""Finds the tests of with_verl/ only where verl is on PYTHONPATH: test_verl.py launches them there."""

import os
from pathlib import Path

# Not verl itself: this folder has its name, and pytest puts the one above on the path. And not whether it can be
# imported: other tests take peft from the same folder.
_FOLDERS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
collect_ignore = [] if any((Path(folder) / "mbridge").is_dir() for folder in _FOLDERS if folder) else ["with_verl"]
