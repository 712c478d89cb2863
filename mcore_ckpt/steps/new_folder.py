"""Checks and publishes the folder that a tool writes, and replaces files or folders of a trainer.

A tool writes a HuggingFace model, or a checkpoint in any format.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import InvalidArgumentError, NoRoomError
from mcore_ckpt.io.access import FOLDER_MODE, mode_in
from mcore_ckpt.io.disk_space import Need, space_of
from mcore_ckpt.io.files import sync_dir, sync_folders
from mcore_ckpt.steps import commit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replaceable:
    """Says what a tool may replace if its output folder already has files.

    Attributes:
        force: True if the user has asked to replace files.
        what: the kind of thing that the tool writes, for messages.
        is_like: returns whether a folder holds a thing of this kind. No other folder is ever replaced.
    """

    force: bool
    what: str
    is_like: Callable[[Path], bool]


def check_may_replace(path: Path, replaceable: Replaceable) -> None:
    """Checks that a tool may make a folder: `path` does not exist, is an empty folder, or may be replaced.

    Any other folder is refused, because a model in it may be somebody's only copy, or the model that the tool is
    reading.

    Raises:
        InvalidArgumentError: there is a file, or a folder that the tool must not replace.
    """
    if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
        return
    if not replaceable.force:
        raise InvalidArgumentError(
            f"{path}: exists already and is not empty: name another folder, remove it, or replace it with --force"
        )
    for folder in (path, *path.parents):
        if file_names.parse_step(folder.name) is not None:
            check_not_pinned(folder)
        if (folder / file_names.MANIFEST_FILE).exists():
            raise InvalidArgumentError(
                f"{path}: is not replaced, because {folder} is a checkpoint of this package: name another folder"
            )
    if not replaceable.is_like(path) or file_names.step_dirs(path):
        raise InvalidArgumentError(
            f"{path}: is not replaced, because it is not {replaceable.what}: name another folder, or remove it yourself"
        )


def check_not_pinned(step_path: Path) -> None:
    """Raises InvalidArgumentError if the step with this folder is pinned."""
    if os.path.lexists(step_path / file_names.PINNED_FILE):
        step = file_names.parse_step(step_path.name)
        raise InvalidArgumentError(
            f"{step_path}: is pinned, so no tool replaces it: name another folder, or first unpin it with "
            f"`mcore-ckpt prune {step_path.parent} --unpin {step}`"
        )


def check_space(path: Path, sizes: Iterable[int]) -> None:
    """Checks that files fit where a folder will be.

    Args:
        path: the folder.
        sizes: the size of each file in bytes, or a lower bound of it.

    Raises:
        NoRoomError: the files do not fit.
        OSError: the folder cannot be opened.
    """
    space = space_of(path.parent)
    amount = space.taken_by(Need(tuple(sizes)))
    limit = space.shortage(amount)
    if limit is None:
        return
    message = f"{path}: the files do not fit: {limit.describe(amount)}"
    if space.is_certain:
        raise NoRoomError(f"{message}. Nothing has been written. Delete files, or name another folder")
    logger.warning("%s. The file system may store them in less space, so it is tried", message)


def mode_as(*sources: Path) -> int:
    """Returns the mode of a tool's output: not more open than the sources that it is made of, as with `cp -r`.

    The folders of a checkpoint's step and root count, too. The caller must still apply the umask.
    """
    mode = FOLDER_MODE
    for source in sources:
        of_root = source.parents[:2] if file_names.parse_step(source.parent.name) is not None else ()
        for folder in (source, *of_root):
            mode = mode_in(folder, mode)
    return mode


def publish_folder(staging: Path, path: Path, attempt: str, replaceable: Replaceable) -> None:
    """Renames a staging folder, whose contents are durable, to the new folder.

    An old folder of that name stays whole until the rename, and is then removed with everything in it.

    Raises:
        InvalidArgumentError: there is a folder that the tool must not replace.
        OSError: the new folder is not in place, and the old one is untouched.
    """
    check_may_replace(path, replaceable)
    # rename() replaces an empty folder, and fails if somebody has put files into the folder in the meantime.
    if not path.is_dir() or not any(path.iterdir()):
        os.rename(staging, path)
    elif not commit.exchange(staging, path):
        replaced = file_names.replaced_dir(path, attempt)
        os.rename(path, replaced)
        try:
            os.rename(staging, path)
        except OSError:
            os.rename(replaced, path)
            raise
    # The new folder is in place, so a failed sync is only logged.
    try:
        sync_dir(path.parent)
        with suppress(PermissionError):  # the folder above belongs to another user, and this process may not open it
            sync_dir(path.parent.parent)
    except OSError as error:
        logger.warning("%s is in place, but a power loss might undo that: %s", path, error)
    # Until the rename, this file showed that the process of the staging folder is alive, so no other process removed
    # the folder. The file is no longer needed.
    (path / file_names.OWNER_FILE).unlink(missing_ok=True)
    for old in (staging, file_names.replaced_dir(path, attempt)):
        commit.remove_folder(old)


def replace_entry(path: Path, new: Path | None, old: Path) -> None:
    """Replaces a file or folder of a trainer. The replaced file or folder stays under the name `old`.

    The caller removes `old`, or keeps it. A kill or a power loss at any time leaves both contents on the disk.

    Args:
        path: the file or folder. It need not exist.
        new: takes the place of `path`. Its files must be durable. None if nothing takes this place.
        old: a path next to `path`. Nothing exists there yet.

    Raises OSError: `path` is as it was, unless only the sync has failed.
    """
    if new is not None and new.is_dir() and not new.is_symlink():
        sync_folders(new)
    is_there = os.path.lexists(path)
    if is_there:
        os.rename(path, old)
    try:
        if new is not None:
            os.rename(new, path)
    except OSError:
        if is_there:
            os.rename(old, path)
        raise
    sync_dir(path.parent)


def remove_entry(path: Path) -> None:
    """Removes a file, a link, or a folder with its contents, if it exists. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
