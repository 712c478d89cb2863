"""Tests here use what makes small checkpoints for the storage layer's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))
