"""Finds a name for a file or folder that is to be moved aside."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path


def free_name(path: Path) -> Path:
    """Returns the first of the paths `path`, `path.2`, `path.3`, ... at which nothing exists. Raises OSError."""
    names = (path.name + (f".{number}" if number > 1 else "") for number in count(1))
    return next(free for free in map(path.with_name, names) if not os.path.lexists(free))
