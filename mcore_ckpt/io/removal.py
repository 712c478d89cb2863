"""Removes folders with many files."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from mcore_ckpt.io import tuning
from mcore_ckpt.io.threads import results_of


def remove_tree(folder: Path) -> None:
    """Removes a folder and its contents as far as possible. Raises nothing, and follows no link.

    Entries that cannot be read or removed stay, with the folders that they are in. Everything else is removed.

    `shutil.rmtree` waits for the file system at each file in turn. This function makes as many calls, but the calls
    overlap.
    """
    _remove_folder(None, str(folder))


def _remove_folder(parent: int | None, name: str) -> None:
    """Removes the folder `name` in the open folder `parent`. Without `parent`, `name` is a path."""
    # Suppress more than OSError, because a folder may also be nested too deep for Python, or memory may be short.
    with suppress(Exception):
        # Use descriptors, so that nobody can replace a folder on the path by a link while its files are removed.
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            _remove_contents(descriptor)
        finally:
            os.close(descriptor)
    # Try to remove the folder in any case, because a folder that cannot be read may be empty.
    with suppress(OSError):
        os.rmdir(name, dir_fd=parent)


def _remove_contents(folder: int) -> None:
    files, folders = list[str](), list[str]()
    with suppress(OSError), os.scandir(folder) as listed:  # after an error, the entries listed so far are removed
        for entry in listed:
            (folders if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
    results_of(files, partial(_unlink, folder), tuning.LOOK_THREADS)
    for name in folders:
        _remove_folder(folder, name)


def _unlink(folder: int, name: str) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
