"""Writes what one rank saves of the parts that are attached to its manager, as files of the checkpoint.

A part's function runs on the trainer's thread, because it reads what the training changes, and may use the GPU. What it
returns, or has written into its folder, is copied, synced and read for its CRC while the training continues.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import CheckpointError, CommitError, HungDiskError
from mcore_ckpt.interrupts import is_interrupt
from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.file_copies import clone_file, link_file, pieces_of
from mcore_ckpt.io.files import make_folders, new_folder, sync_dir, sync_file, write_hint
from mcore_ckpt.io.removal import remove_tree
from mcore_ckpt.state.attached_parts import Content, HandOver, Part, Save, check_content
from mcore_ckpt.steps.transaction import Attempt

logger = logging.getLogger(__name__)


class PartFiles:
    """The files of this rank's parts in one save. Call `capture`, `write` and `committed`, in this order.

    Args:
        parts: the parts that this rank saves.
        rank: this rank.

    Attributes:
        names: the names of the parts.
    """

    def __init__(self, parts: Iterable[Part], rank: int) -> None:
        self._saves: dict[str, Save] = {part.name: part.save for part in parts if part.save is not None}
        self.names = tuple(self._saves)
        self._rank = rank
        self._contents: dict[str, Content] = {}

    def capture(self, attempt: Attempt) -> None:
        """Calls the function of each part, on the thread of the trainer.

        Raises:
            HungDiskError: the staging folder, into which the functions would write, is not there yet.
            CommitError: a function raised something, or returned something that a part cannot consist of.
        """
        for name, save in self._saves.items():
            if attempt.is_late:
                raise HungDiskError(f"{attempt.staging}: the disk hangs, so that part {name!r} cannot be written there")
            folder = attempt.staging / file_names.part_dir(name, self._rank)
            make_folders(attempt.staging, f"{file_names.part_dir(name, self._rank)}/{file_names.PART_FILE}")
            self._contents[name] = _content_of(name, lambda save=save, folder=folder: save(folder))  # type: ignore[misc]

    def write(self, staging: Path) -> list[WrittenFile]:
        """Writes what the functions have returned, durably. Returns all files of the parts.

        Raises CommitError, and OSError.
        """
        written: list[WrittenFile] = []
        for name, content in self._contents.items():
            path = file_names.part_dir(name, self._rank)
            if callable(content):
                content = self._contents[name] = _content_of(name, content)
                if callable(content):
                    raise CommitError(f"part {name!r}: the function that it returned has returned a function, too")
            _put(name, content, staging / path)
            written += _written(name, staging, path)
        return written

    def committed(self) -> None:
        """Removes what was handed over, because the checkpoint has it now."""
        for content in self._contents.values():
            if isinstance(content, HandOver):
                _remove(Path(content.path))


def _content_of(name: str, save: Callable[[], Content]) -> Content:
    """Calls a function of the trainer. The other ranks raise a CommitError if it fails, so this rank does, too."""
    try:
        content = save()
    except CheckpointError:
        raise
    except Exception as error:
        if is_interrupt(error):
            raise
        raise CommitError(f"part {name!r} could not be saved: {type(error).__name__}: {error}") from error
    if not callable(content):
        check_content(name, content)
    return content


def _put(name: str, content: Content, folder: Path) -> None:
    """Puts into a folder what the function of a part has returned."""
    if content is None:
        return
    if isinstance(content, (bytes, bytearray, memoryview)):
        write_hint(folder / file_names.PART_FILE, bytes(content))
        return
    is_handed_over = isinstance(content, HandOver)
    source = Path(os.path.abspath(content.path if isinstance(content, HandOver) else content))
    put = link_file if is_handed_over else clone_file
    if not source.is_dir():
        _refuse_special(name, source)
        put(source, folder / source.name)
        return
    for path in _below(source):
        if path.is_dir() and not path.is_symlink():
            new_folder(folder / path.relative_to(source))
        else:
            _refuse_special(name, path)
            put(path, folder / path.relative_to(source))


def _below(folder: Path) -> Iterator[Path]:
    """Yields all that is in a folder, and each folder before what is in it. Follows no link."""
    for above, folders, files in os.walk(folder, onerror=_raise):
        yield from (Path(above, name) for name in sorted([*folders, *files]))


def _raise(error: OSError) -> None:
    raise error


def _refuse_special(name: str, path: Path) -> None:
    """Raises CommitError for a link, because what it leads to would not be in the checkpoint, and for a device."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CommitError(f"part {name!r}: {path} is a link, pipe, socket or device: use files and folders")


def _written(name: str, staging: Path, path: str) -> list[WrittenFile]:
    """Syncs a part's files, and returns them with their sizes and CRCs."""
    found: list[WrittenFile] = []
    for file in _below(staging / path):
        if file.is_dir() and not file.is_symlink():
            sync_dir(file)
            continue
        _refuse_special(name, file)
        below = file.relative_to(staging).as_posix()
        if not below.isprintable():
            raise CommitError(f"part {name!r}: {below!r} cannot be the name of a file: use printable characters")
        if len(found) == limits.PART_FILES:
            raise CommitError(
                f"part {name!r} has more than {limits.PART_FILES} files on this rank: put them in archives"
            )
        sync_file(file)
        size = crc = 0
        for piece in pieces_of(file):
            size, crc = size + len(piece), crc32(piece, crc)
        found.append(WrittenFile(below, "part", size, crc))
    sync_dir(staging / path)
    return found


def _remove(source: Path) -> None:
    try:
        if source.is_dir():
            remove_tree(source)
        else:
            source.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s was handed over to a checkpoint, and could not be removed: %s", source, error)
