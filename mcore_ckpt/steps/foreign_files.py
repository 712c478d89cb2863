"""When a new checkpoint replaces an old one, keeps the files that other programs put into the role's folder.

An example is verl's SFT trainer (0.9.1, `CheckpointHandler.save_checkpoint`): it writes its data position into the
step's folder while a save to that folder is still under way.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.steps.work_folders import entries

logger = logging.getLogger(__name__)


def link_foreign_files(old: Path, new: Path) -> bool:
    """Makes hard links in `new` to the foreign files of `old`, so that no file is missing, even after a crash.

    Returns True if there are foreign files. The links become durable with the next sync of `new`.
    """
    foreign = _foreign_entries(old)
    for entry in foreign:
        with suppress(OSError):  # `move_foreign_entries` moves what cannot be linked, such as a folder
            os.link(entry, new / entry.name, follow_symlinks=False)
    return bool(foreign)


def move_foreign_entries(old: Path, new: Path) -> bool:
    """Moves, durably, the foreign files and folders of `old` that `new` lacks or has in an older version.

    These are entries that `link_foreign_files` could not link, and entries that were written after its links were made.
    Returns False if something has to stay in `old`.
    """
    moved = False
    for entry in _foreign_entries(old):
        target = new / entry.name
        try:
            if not os.path.lexists(target):
                os.rename(entry, target)
            elif _is_newer(entry, target):
                os.replace(entry, target)
            else:
                continue
            moved = True
        except OSError as error:
            logger.warning("%s belongs in %s, but could not be moved there, and stays: %s", entry, new, error)
            return False
    if moved:
        # Make the move durable. Otherwise the caller's removal of `old` could reach the disk before the move.
        sync_dir(new)
    return True


def _foreign_entries(role_dir: Path) -> list[Path]:
    return [entry for entry in entries(role_dir) if not file_names.is_own(entry.name)]


def _is_newer(entry: Path, target: Path) -> bool:
    """True if another program has replaced the file `entry` since the link `target` to it was made."""
    moved, there = entry.lstat(), target.lstat()
    both_files = stat.S_ISREG(moved.st_mode) and stat.S_ISREG(there.st_mode)
    return both_files and moved.st_ino != there.st_ino and moved.st_mtime_ns > there.st_mtime_ns
