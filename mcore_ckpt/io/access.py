"""Decides who may enter new folders and read new files, and refuses folders that other users have made.

What is made in a folder is never more open than that folder, nor than the umask. So only what is made in a place that
says nothing about it needs a mode: a new root, a new folder of the fast tier, or a new folder elsewhere.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError

# Permissions of new files and folders, before the umask is applied. They let only the owner and the group write,
# whatever the umask.
FILE_MODE = 0o664
FOLDER_MODE = 0o775
# The same for folders that only their owner, or only the owner and the group, may enter.
_PRIVATE, _OF_GROUP = 0o700, 0o770

_UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)


def top_mode(shared: bool | None) -> int:
    """Returns the mode of a new folder, before the umask is applied, if no folder above it decides.

    Args:
        shared: whether the group may enter it. None: if the umask lets the group write, as of people who share files.
    """
    is_shared = not _umask() & stat.S_IWGRP if shared is None else shared
    return _OF_GROUP if is_shared else _PRIVATE


def mode_below(root: Path, path: Path, shared: bool | None) -> int:
    """Returns the mode of new folders for a path. A root that is there decides what is made in it, if `shared` is None.

    Nobody loses what he could read: the evaluations of a team go on in its older roots.
    """
    if shared is None and root.is_dir() and path.resolve().is_relative_to(root.resolve()):
        return mode_in(root, FOLDER_MODE)
    return top_mode(shared)


def mode_in(folder: Path, most: int) -> int:
    """Returns those permissions of `most` that a folder also gives; the owner's in any case."""
    try:
        given = os.stat(folder).st_mode
    except OSError:  # who makes something in it sees the error
        given = 0
    return most & (given | stat.S_IRWXU)


def _umask() -> int:
    # Only /proc tells it without changing it, which other threads would notice.
    with suppress(OSError):
        found = _UMASK.search(Path("/proc/self/status").read_text(errors="replace"))
        if found is not None:
            return int(found[1], 8)
    before = os.umask(0o077)
    os.umask(before)
    return before


def user_name(uid: int) -> str:
    """Returns the name of a user; the number if the system knows no name."""
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def owner_of(path: Path) -> str:
    """Says whose a file, folder or link is, for messages."""
    try:
        found = path.lstat()
    except OSError:
        return "an unknown user"
    return f"user {user_name(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}"


def is_foreign(path: Path) -> bool:
    """True if a file, folder or link belongs to another user, who is not root. Raises nothing."""
    with suppress(OSError):
        return path.lstat().st_uid not in (os.geteuid(), 0)
    return False


@contextmanager
def naming_owner(path: Path) -> Iterator[None]:
    """Lets a PermissionError also say whose a file or folder is, if it is another user's."""
    try:
        yield
    except PermissionError as error:
        if is_foreign(path):
            error.strerror = f"{error.strerror}: {path} belongs to {owner_of(path)}"
        raise


def strange(path: Path, shared: bool | None) -> str | None:
    """Says why a folder, or the link to it, may hold what another user has put there; None if it cannot.

    Args:
        path: the folder.
        shared: whether the group may write in it. None: as in `top_mode`.

    Raises OSError.
    """
    for found in dict.fromkeys((path.lstat(), path.stat())):
        if found.st_uid not in (os.geteuid(), 0):
            return f"belongs to user {user_name(found.st_uid)}"
        by_group = found.st_mode & stat.S_IWGRP and top_mode(shared) == _PRIVATE
        if not stat.S_ISLNK(found.st_mode) and (by_group or found.st_mode & stat.S_IWOTH):
            return f"can be written by other users (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def check_own_folder(path: Path, shared: bool | None) -> None:
    """Checks that no other user has put a folder there, or can put something into it.

    Folders above it count if anybody could have made them: those in a folder in which all users may write.

    Raises InvalidArgumentError, and OSError if the folder cannot be looked at.
    """
    above = [folder for folder in (*path.parents, *path.resolve().parents) if folder != folder.parent]
    for folder in (folder for folder in above if folder.parent.stat().st_mode & stat.S_IWOTH):
        if is_foreign(folder):
            raise InvalidArgumentError(
                f"{path}: is in {folder}, which belongs to {owner_of(folder)}, who can replace it: use a "
                "folder with another name"
            )
    reason = strange(path, shared)
    if reason is not None:
        raise InvalidArgumentError(
            f"{path}: {reason}, so a step in it may not be of this training: use a folder with another name. If only "
            "its mode is wrong, use one in it, or chmod 700 it; shared_with_group=True lets the group write"
        )
