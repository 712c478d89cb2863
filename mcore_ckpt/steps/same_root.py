"""Notices if the path of a root no longer leads to the same folder as at the start of the training.

A disk may be unmounted, so that saves would fill the empty folder that it was mounted on. Something may be mounted over
the root. The folder may be replaced, or a link may lead to another folder, where this trainer has no lock. Device and
inode of the folder show each of these changes. Rank 0 checks the root before it opens a save and right before the
rename, and each rank checks the root before and after it writes. All ranks also check the node's folder of the fast
tier. If the root does not exist yet, the folder above it counts. A root that was deleted is made again. A network file
system that an automounter has mounted again counts as the same folder.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.errors import CommitError
from mcore_ckpt.io import file_systems
from mcore_ckpt.io.mounts import Mount, mount_of


@dataclass(frozen=True)
class _Folder:
    """A folder that a path leads to."""

    device: int
    inode: int
    target: str
    mount: Mount | None

    def is_same(self, other: _Folder) -> bool:
        """True if this folder and the other are the same, as far as their file system can show it."""
        kind, _ = self.mounted
        is_fuse = kind.startswith("fuse.")
        # A file system on a network gets another device number when it is mounted again, as an automounter does after
        # a pause. A FUSE file system may number a folder anew at any time.
        is_far = (is_fuse or file_systems.of_name(kind).place == "network") and self.mounted == other.mounted
        is_renumbered = is_fuse and self.target == other.target
        return (self.device == other.device or is_far) and (self.inode == other.inode or is_renumbered)

    @property
    def mounted(self) -> tuple[str, str]:
        """The type and the source of the file system that the folder is on; empty if the system does not tell."""
        return ("", "") if self.mount is None else (self.mount.kind, self.mount.source)


class SameRoot:
    """The folder that a path leads to when this object is made, or the nearest existing folder above it."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._noted = self._look()

    def check(self) -> None:
        """Checks that the path leads to the same folder. A folder that was deleted may be made again.

        Raises CommitError if the path leads to another folder, and OSError if a folder on the path cannot be read.
        """
        for folder in (self._path, *self._path.parents):
            # A missing folder is judged by the folder that it was in.
            noted, found = self._noted.get(folder), _stat(folder)
            if noted is None or found is None:
                continue
            if (noted.device, noted.inode) != (found.st_dev, found.st_ino):
                now = _folder(folder, found)
                if not noted.is_same(now):
                    raise CommitError(_what_changed(folder, noted, now))
            if folder != self._path:
                self._noted = self._look()
            return

    def _look(self) -> dict[Path, _Folder]:
        found: dict[Path, _Folder] = {}
        for folder in (self._path, *self._path.parents):
            with suppress(OSError):  # a trainer that only loads may lack the permission to look
                if (status := _stat(folder)) is not None:
                    found[folder] = _folder(folder, status)
        return found


def _stat(folder: Path) -> os.stat_result | None:
    try:
        # The dot, which `Path` would drop, makes an automounter mount the folder.
        return os.stat(f"{folder}/.")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _folder(folder: Path, status: os.stat_result) -> _Folder:
    with suppress(OSError):
        return _Folder(status.st_dev, status.st_ino, os.path.realpath(folder), mount_of(folder))
    return _Folder(status.st_dev, status.st_ino, os.path.realpath(folder), None)


def _what_changed(folder: Path, noted: _Folder, now: _Folder) -> str:
    if noted.target != now.target:
        what = f"a link leads to {now.target} instead of {noted.target}"
    elif noted.device != now.device or _on(noted) != _on(now):
        what = f"{_on(noted)} was unmounted, or something was mounted over it (now it is on {_on(now)})"
    else:
        what = "it was replaced"
    return (
        f"{folder}: is not the folder that this trainer has begun with: {what}. Nothing is saved to it. Put the "
        "right folder back in its place, or start the training again with the folder to save to"
    )


def _on(folder: _Folder) -> str:
    return f"device {folder.device}" if folder.mount is None else str(folder.mount)
