"""Decides who may enter new folders and read new files, and refuses folders that other users have made.

A new file or folder is never more open than the folder around it, and never more open than the umask allows. So this
module chooses a mode only where no existing folder determines the mode: for a new root, a new folder of the fast tier,
or a new folder elsewhere.
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

# Permissions of new files and folders, before the umask is applied. These modes let only the owner and the group write,
# whatever the umask.
FILE_MODE = 0o664
FOLDER_MODE = 0o775
# Permissions of new folders that only the owner may enter, or only the owner and the group.
_PRIVATE, _OF_GROUP = 0o700, 0o770

_UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)


def top_mode(shared: bool | None) -> int:
    """Returns the mode of a new folder, before the umask is applied, if no folder above it decides.

    `shared`: whether the group may enter the folder. None: the group may enter if the umask lets the group write,
    because people who share files set such a umask.
    """
    is_shared = not _umask() & stat.S_IWGRP if shared is None else shared
    return _OF_GROUP if is_shared else _PRIVATE


def mode_below(root: Path, path: Path, shared: bool | None) -> int:
    """Returns the mode of new folders for a path.

    If `shared` is None, the mode of an existing root decides. So nobody loses access: for example, a team's evaluations
    can read new steps in an older root.
    """
    if shared is None and root.is_dir() and path.resolve().is_relative_to(root.resolve()):
        return mode_in(root, FOLDER_MODE)
    return top_mode(shared)


def mode_in(folder: Path, most: int) -> int:
    """Returns the permissions in `most` that the folder also has, and all permissions that `most` gives the owner."""
    try:
        given = os.stat(folder).st_mode
    except OSError:  # the caller's next call, which makes something in the folder, raises the error
        given = 0
    return most & (given | stat.S_IRWXU)


def widen(path: Path, folder: Path, most: int) -> None:
    """Lets all users who may enter `folder` also use `path`, a file or folder in it that other code has made.

    `path` gets the permissions in `most` that `folder` gives, and keeps the permissions that it has. If `path` belongs
    to another user, it stays unchanged. Raises OSError.
    """
    if missing := _missing(path, folder, most):
        with suppress(PermissionError):
            path.chmod(stat.S_IMODE(path.lstat().st_mode) | missing)


def would_widen_elsewhere(path: Path, folder: Path, most: int) -> bool:
    """True if `widen` would change the mode of a file with a second name, and so the mode under both names.

    Raises OSError.
    """
    return path.lstat().st_nlink > 1 and _missing(path, folder, most) != 0


def _missing(path: Path, folder: Path, most: int) -> int:
    return mode_in(folder, most) & ~stat.S_IMODE(path.lstat().st_mode)


def _umask() -> int:
    # Only /proc tells the umask without changing it. Other threads would notice a change.
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
    """Says who owns a file, folder or link, for messages."""
    try:
        found = path.lstat()
    except OSError:
        return "an unknown user"
    return f"user {user_name(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}"


def is_foreign(path: Path) -> bool:
    """True if a file, folder or link belongs to a user other than this user and root. Raises nothing."""
    with suppress(OSError):
        return path.lstat().st_uid not in (os.geteuid(), 0)
    return False


@contextmanager
def naming_owner(path: Path) -> Iterator[None]:
    """Adds the owner to a PermissionError if a file or folder belongs to another user."""
    try:
        yield
    except PermissionError as error:
        if is_foreign(path):
            error.strerror = f"{error.strerror}: {path} belongs to {owner_of(path)}"
        raise


def strange(path: Path, shared: bool | None) -> str | None:
    """Says why another user may have put files into a folder, or replaced the link to it; None if nobody could.

    `shared`: whether the group may write into the folder. None: as in `top_mode`. Raises OSError.
    """
    for found in dict.fromkeys((path.lstat(), path.stat())):
        if found.st_uid not in (os.geteuid(), 0):
            return f"belongs to user {user_name(found.st_uid)}"
        by_group = found.st_mode & stat.S_IWGRP and top_mode(shared) == _PRIVATE
        if not stat.S_ISLNK(found.st_mode) and (by_group or found.st_mode & stat.S_IWOTH):
            return f"can be written by other users (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def check_own_folder(path: Path, shared: bool | None) -> None:
    """Checks that no other user has made a folder, or can write into it. Raises InvalidArgumentError and OSError.

    A folder above `path` is checked, too, if all users may write into its parent.
    """
    above = [folder for folder in (*path.parents, *path.resolve().parents) if folder != folder.parent]
    for folder in (folder for folder in above if folder.parent.stat().st_mode & stat.S_IWOTH):
        if is_foreign(folder):
            raise InvalidArgumentError(
                f"{path}: is in {folder}, which belongs to {owner_of(folder)}, who can replace the folder: "
                "use a folder with another name"
            )
    reason = strange(path, shared)
    if reason is not None:
        raise InvalidArgumentError(
            f"{path}: {reason}, so its steps may be those of another user: use a folder with another name. If only "
            "the mode is wrong, chmod 700 the folder or use a folder inside it; shared_with_group=True lets the group "
            "write"
        )
