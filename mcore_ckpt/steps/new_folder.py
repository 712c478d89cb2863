"""Opens a new folder beside others: of a HuggingFace model, or of a checkpoint in a foreign format."""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.steps import commit, leftovers


def check_unused(path: Path) -> None:
    """Checks that a folder can be made, because there is none, or one without files.

    A model that is already in the folder may be somebody's only copy, or the one that is being read.

    Raises:
        InvalidArgumentError: there is a file, or a folder that is not empty.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InvalidArgumentError(f"{path}: exists already and is not empty: name another folder, or remove it")


def open_new_folder(path: Path) -> str:
    """Makes the staging folder of a new folder, and removes those that dead processes have left beside it.

    Returns:
        The id of the attempt, which `commit.publish` needs to put the folder in place.

    Raises:
        InvalidArgumentError: there is a file, or a folder that is not empty.
        OSError: the staging folder cannot be made.
    """
    check_unused(path)
    leftovers.remove_leftovers_beside(path)
    attempt = commit.new_attempt()
    commit.open_staging(path, attempt)
    return attempt
