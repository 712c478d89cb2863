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

    `shutil.rmtree` waits for the file system at each file in turn. This takes as many calls, but they overlap.
    """
    with suppress(OSError):
        # By descriptors, so that no folder can be replaced by a link on the way to the files in it.
        for _, folders, files, descriptor in os.fwalk(folder, topdown=False):
            results_of(files, partial(_unlink, descriptor), tuning.LOOK_THREADS)
            for name in folders:
                _remove_folder(descriptor, name)
        os.rmdir(folder)


def _unlink(folder: int, name: str) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _remove_folder(folder: int, name: str) -> None:
    with suppress(OSError):
        os.rmdir(name, dir_fd=folder)
        return
    # A link to a folder is listed as a folder. If this is none, something in it could not be removed.
    _unlink(folder, name)
