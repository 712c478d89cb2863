"""Opens a new folder that a tool writes: of a HuggingFace model, or of a checkpoint in any format."""

from __future__ import annotations

import shutil
from pathlib import Path

from mcore_ckpt.errors import CommitError, InvalidArgumentError
from mcore_ckpt.steps import commit, leftovers


def check_unused(path: Path) -> None:
    """Checks that a folder can be made, because there is none, or one without files.

    A model that is already in the folder may be somebody's only copy, or the one that is being read.

    Raises:
        InvalidArgumentError: there is a file, or a folder that is not empty.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InvalidArgumentError(f"{path}: exists already and is not empty: name another folder, or remove it")


def check_space(path: Path, nbytes: int) -> None:
    """Checks that so many bytes are free where a folder will be.

    Raises:
        CommitError: fewer are free.
        OSError: the file system does not tell.
    """
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise CommitError(
            f"{path}: {nbytes} bytes are to be written, but only {free} are free there: free space, or name another "
            "folder"
        )


def open_new_folder(path: Path, nbytes: int) -> str:
    """Makes the staging folder of a new folder, and removes those that dead processes have left beside it.

    Args:
        path: the new folder.
        nbytes: how many bytes will be written.

    Returns:
        The id of the attempt, which `commit.publish` needs to put the folder in place.

    Raises:
        InvalidArgumentError: there is a file, or a folder that is not empty.
        CommitError: too few bytes are free.
        OSError: the staging folder cannot be made.
    """
    check_unused(path)
    check_space(path, nbytes)
    leftovers.remove_leftovers_beside(path)
    attempt = commit.new_attempt()
    commit.open_staging(path, attempt)
    return attempt
