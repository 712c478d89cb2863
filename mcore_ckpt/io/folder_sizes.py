"""Finds out which files are below a folder, and how large they are, with one listing of each folder.

A link counts as its target if the target is below the folder, too. Other links are left out, because a load does not
follow them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import inside
from mcore_ckpt.io.threads import results_of

# A file or folder that raises one of these errors is left out, because a load could not read it. Other errors may be
# temporary.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM)
# How many files one thread looks at in a row.
_FILES_OF_A_LOOK = 64

_Entry = tuple[str, "os.DirEntry[str]"]


def sizes_below(folder: Path) -> dict[str, int]:
    """Returns the sizes in bytes of all files below a folder, by their paths below the folder.

    Links to folders are left out.

    Raises OSError: a file or folder cannot be looked at because of an error that may be temporary.
    """
    return _sizes(folder, lambda path, entry: entry.is_dir(follow_symlinks=False), lambda path: True)


def sizes_of(folder: Path, paths: Iterable[str]) -> dict[str, int]:
    """Returns the sizes in bytes of the given files below a folder.

    Missing files are left out. Only the folders that these files are in are listed, and no other file is looked at.
    Raises like `sizes_below`.
    """
    wanted = frozenset(paths)
    folders: set[str] = set()
    for parent in {path.rpartition("/")[0] for path in wanted}:
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]

    def is_wanted(path: str, entry: os.DirEntry[str]) -> bool:
        return path in folders and (not entry.is_symlink() or _is_inside(folder, path))

    return _sizes(folder, is_wanted, wanted.__contains__)


def _sizes(
    base: Path, has_wanted: Callable[[str, os.DirEntry[str]], bool], is_wanted: Callable[[str], bool]
) -> dict[str, int]:
    files: list[_Entry] = []
    level = [""]
    while level:
        entries = list(chain.from_iterable(results_of(level, lambda path: _listed(base, path), tuning.LOOK_THREADS)))
        level = [path for path, entry in entries if has_wanted(path, entry)]
        files += (named for named in entries if is_wanted(named[0]) and not named[1].is_dir(follow_symlinks=False))
    # On file systems whose listings include the sizes (NFS, Lustre), `_look` needs no answer from the server.
    parts = [files[start : start + _FILES_OF_A_LOOK] for start in range(0, len(files), _FILES_OF_A_LOOK)]
    looks = results_of(parts, partial(_look, base), tuning.LOOK_THREADS)
    return {path: size for path, size in chain.from_iterable(looks) if size is not None}


def _listed(base: Path, folder: str) -> list[_Entry]:
    try:
        with os.scandir(base / folder) as entries:
            return [(f"{folder}/{entry.name}" if folder else entry.name, entry) for entry in entries]
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return []


def _look(base: Path, entries: list[_Entry]) -> list[tuple[str, int | None]]:
    return [(path, _size(base, path, entry)) for path, entry in entries]


def _size(base: Path, path: str, entry: os.DirEntry[str]) -> int | None:
    """Returns the size of a file; None if the path is not a file, was just deleted, or leads out of the folder."""
    try:
        found = os.stat(inside(base, path)) if entry.is_symlink() else entry.stat(follow_symlinks=False)
    except CheckpointCorruptError:
        return None
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_inside(base: Path, path: str) -> bool:
    try:
        return inside(base, path).is_dir()
    except CheckpointCorruptError:
        return False
