"""Finds the folder of steps that a user means if the given path is a little above or below it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mcore_ckpt.checkpoint import file_names

# How many levels above a path its root can be: <root>/<step>/<role>/model/mp_rank_00_000.
_MOST_ABOVE = 4
# Roots below a path are looked for this many levels deep, in at most this many folders: enough for
# <project>/<experiment>.
_MOST_BELOW, _MOST_FOLDERS = 2, 200


def nearby_roots(path: Path) -> list[Path]:
    """Returns the folders of steps near a path; none if the path itself is such a folder.

    If a folder of steps is above the path, only that folder is returned. Folders below the path are sorted by name.

    Example:
        >>> nearby_roots(Path("checkpoints/global_steps_100/actor"))  # doctest: +SKIP
        [PosixPath('checkpoints')]
    """
    if _has_steps(path):
        return []
    above = _root_above(path) or _root_above(path.resolve())  # a link may lead into a step
    return _roots_below(path) if above is None else [above]


def _has_steps(folder: Path) -> bool:
    with suppress(OSError):
        return bool(file_names.step_dirs(folder))
    return False


def _root_above(path: Path) -> Path | None:
    absolute = Path(os.path.abspath(path))
    for depth, folder in enumerate([absolute, *absolute.parents][:_MOST_ABOVE]):
        if file_names.parse_step(folder.name) is not None:
            # If the path as typed contains the root (the parent of `folder`), return that part of the path as typed. So
            # a relative path stays relative.
            typed = () if ".." in path.parts else path.parts[: len(path.parts) - depth - 1]
            return Path(*typed) if typed else folder.parent
    return None


def _roots_below(path: Path) -> list[Path]:
    level = [path]
    left = _MOST_FOLDERS
    for _ in range(_MOST_BELOW):
        level = [folder for parent in level for folder in _folders(parent)][:left]
        left -= len(level)
        roots = [folder for folder in level if _has_steps(folder)]
        if roots:
            return roots
    return []


def _folders(path: Path) -> list[Path]:
    with suppress(OSError), os.scandir(path) as entries:
        return sorted(path / entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    return []
