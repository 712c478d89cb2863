"""Ends the links between a checkpoint and the files that were handed over to it, even if the process that saved dies.

Within one file system, a save takes a handed-over file by giving it a second name in the checkpoint. A trainer that
opened its file again under the first name would change the checkpoint. So each rank notes the first names in a file
next to the role's folder before the commit, and removes the first names after the commit. If the process dies in
between, the next start of a trainer removes the noted names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError, CommitError
from mcore_ckpt.io import json_fields, limits
from mcore_ckpt.io.access import is_foreign
from mcore_ckpt.io.file_copies import copy_hashed
from mcore_ckpt.io.files import inside, names_in, read_small, sync_dir, write_file
from mcore_ckpt.steps.listing import is_of_attempt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkedFile:
    """A file of the trainer that has a second name in a checkpoint.

    Attributes:
        source: the trainer's name, an absolute path.
        path: the name in the checkpoint, relative to the role's folder.
        size: the file's size in bytes.
        changed_ns: when the file was changed last, in nanoseconds since 1970.
    """

    source: str
    path: str
    size: int
    changed_ns: int

    @staticmethod
    def of(source: Path, staging: Path, target: Path) -> LinkedFile:
        found = target.lstat()
        return LinkedFile(str(source), target.relative_to(staging).as_posix(), found.st_size, found.st_mtime_ns)


def write_note(staging: Path, rank: int, files: Sequence[LinkedFile], folders: Sequence[Path]) -> Path:
    """Notes durably which files of this rank have a second name below the staging folder. Returns the note's path.

    `folders` are the trainer's folders that are to be removed, too. Each folder is listed before the folders in it.

    Raises OSError, and CommitError if the save has failed meanwhile.
    """
    work = file_names.parse_work_dir(staging.name)
    assert work is not None, "links are made only in staging folders"
    note = file_names.handed_over_note(staging.with_name(work.role), work.attempt, rank)
    # A path may have any bytes, so paths are quoted.
    listed = [(quote(os.fsencode(file.source)), *astuple(file)[1:]) for file in files]
    write_file(note, [json_fields.encode({"files": listed, "folders": [quote(os.fsencode(each)) for each in folders]})])
    sync_dir(note.parent)
    if not staging.exists():  # nobody would remove the note of a save that has failed already
        note.unlink(missing_ok=True)
        raise CommitError(f"{staging}: is gone, because another rank has failed")
    return note


def end_links_in(step_path: Path, role: str, alone: bool) -> None:
    """Calls `end_links` for all notes of a role that are in a step's folder. Raises nothing."""
    for name in sorted(notes_among(names_in(step_path), role)):
        try:
            end_links(step_path / name, alone)
        except (OSError, CheckpointCorruptError) as error:
            logger.warning("what was handed over to a checkpoint could not be removed: %s", error)


def notes_among(names: Iterable[str], role: str) -> list[str]:
    """Returns the names of a role's notes among the names of files."""
    return [name for name in names if (file_names.parse_handed_over_note(name) or ("",))[0] == role]


def end_links(note: Path, alone: bool) -> None:
    """Removes the trainer's names of the files in a note, and then the note, if the files' checkpoint is committed.

    If the save of the checkpoint has failed, the trainer's files stay, and only the note is removed. If the save may
    still be under way, nothing happens. `alone` is True if this process holds the role's trainer lock, so that no save
    of another process is under way.

    Raises OSError.
    """
    parsed = file_names.parse_handed_over_note(note.name)
    if parsed is None or is_foreign(note):
        return
    role_dir = note.with_name(parsed[0])
    # Look at the staging folder first, because the commit may rename it at any moment.
    has_ended = alone or not file_names.staging_dir(role_dir, parsed[1]).exists()
    if not is_of_attempt(role_dir, parsed[1]):
        if has_ended:
            file_names.handed_over_copy(note).unlink(missing_ok=True)
            note.unlink(missing_ok=True)
        return
    try:
        files, folders = _read(note)
    except FileNotFoundError:  # another process was faster
        return
    except json_fields.FieldError as error:  # the power was lost while the note was written, so before the commit
        logger.warning("%s: cannot be read, and is removed: %s", note, error)
        files, folders = [], []
    for file in files:
        _end_link(file, role_dir, note)
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()
    # If an earlier process died while it copied a file, the incomplete copy may still be there.
    file_names.handed_over_copy(note).unlink(missing_ok=True)
    note.unlink(missing_ok=True)


def remove_notes(staging: Path) -> None:
    """Removes the notes of a save that has failed. Raises nothing."""
    work = file_names.parse_work_dir(staging.name)
    with suppress(OSError):
        for entry in list(staging.parent.iterdir()):
            if work is not None and file_names.parse_handed_over_note(entry.name) == (work.role, work.attempt):
                entry.unlink()


def _end_link(file: LinkedFile, role_dir: Path, note: Path) -> None:
    source, stored = Path(file.source), inside(role_dir, file.path)
    found = _stat_of(source)  # look here first, because another thread may be removing the trainer's name
    kept = _stat_of(stored)
    if kept is None:
        return
    if found is None:
        # The trainer's name may still exist under another path on this host, for example outside of a container. So the
        # checkpoint gets a copy that no other name leads to.
        if kept.st_nlink > 1:
            _give_own_bytes(stored, note)
    elif not os.path.samestat(kept, found):
        pass  # the trainer has made a new file with this name
    elif (kept.st_size, kept.st_mtime_ns) == (file.size, file.changed_ns):
        source.unlink(missing_ok=True)
    else:
        logger.error(
            "%s was handed over to a checkpoint and has been changed since, so %s is damaged: load an older step, and "
            "after a start make the manager before you open such a file again",
            source,
            stored,
        )


def _stat_of(path: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.lstat()
    return None


def _give_own_bytes(stored: Path, note: Path) -> None:
    """Replaces a file of a checkpoint by a copy that no other name leads to."""
    copy = file_names.handed_over_copy(note)
    copy.unlink(missing_ok=True)
    copy_hashed(stored, copy)
    os.replace(copy, stored)
    sync_dir(stored.parent)


def _read(note: Path) -> tuple[list[LinkedFile], list[Path]]:
    fields = json_fields.decode(read_small(note, limits.MANIFEST_BYTES))
    try:
        files = [LinkedFile(_path_of(file[0]), str(file[1]), int(file[2]), int(file[3])) for file in fields["files"]]
        return files, [Path(_path_of(each)) for each in fields["folders"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise json_fields.FieldError(f"{type(error).__name__}: {error}") from None


def _path_of(text: str) -> str:
    return os.fsdecode(unquote_to_bytes(text))
