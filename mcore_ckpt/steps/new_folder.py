"""Opens a new folder that a tool writes: of a HuggingFace model, or of a checkpoint in any format."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError, NoRoomError
from mcore_ckpt.io.room import Need, room_of
from mcore_ckpt.steps import commit, leftovers

logger = logging.getLogger(__name__)


def check_unused(path: Path) -> None:
    """Checks that a folder can be made, because there is none, or one without files.

    A model that is already in the folder may be somebody's only copy, or the one that is being read.

    Raises:
        InvalidArgumentError: there is a file, or a folder that is not empty.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InvalidArgumentError(f"{path}: exists already and is not empty: name another folder, or remove it")


def check_space(path: Path, sizes: Iterable[int]) -> None:
    """Checks that files fit where a folder will be.

    Args:
        path: the folder.
        sizes: the size of each file in bytes, or a lower bound of it.

    Raises:
        NoRoomError: they do not fit.
        OSError: the folder cannot be opened.
    """
    room = room_of(path.parent)
    amount = room.taken_by(Need(tuple(sizes)))
    limit = room.shortage(amount)
    if limit is None:
        return
    message = f"{path}: the files do not fit: {limit.describe(amount)}"
    if room.is_certain:
        raise NoRoomError(f"{message}. Nothing has been written. Free room, or name another folder")
    logger.warning("%s. The file system may store them in less room, so it is tried", message)


def open_new_folder(path: Path, sizes: Iterable[int]) -> str:
    """Makes the staging folder of a new folder, and removes those that dead processes have left beside it.

    Args:
        path: the new folder.
        sizes: the size of each file that will be written, in bytes.

    Returns:
        The id of the attempt, which `commit.publish` needs to put the folder in place.

    Raises:
        InvalidArgumentError: there is a file, or a folder that is not empty.
        NoRoomError: the files do not fit.
        OSError: the staging folder cannot be made.
    """
    check_unused(path)
    leftovers.remove_leftovers_beside(path)
    check_space(path, sizes)
    attempt = commit.new_attempt()
    commit.open_staging(path, attempt)
    return attempt
