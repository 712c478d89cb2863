"""Turns a staging folder into a committed checkpoint, so that no reader ever sees a part of a checkpoint.

Rank 0 calls `open_staging`; then the ranks write; then rank 0 calls `check_files`, `write_manifest` and `publish`.
`discard` removes the files of a failed save. See transaction.py for how the ranks agree.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, encode_readable
from mcore_ckpt.errors import CommitError
from mcore_ckpt.io import limits, tuning
from mcore_ckpt.io.access import top_mode
from mcore_ckpt.io.files import make_parents, new_folder, sync_dir, write_file
from mcore_ckpt.io.json_fields import FieldError
from mcore_ckpt.io.removal import remove_tree
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.steps.foreign_files import link_foreign_files, move_foreign_entries
from mcore_ckpt.steps.handed_over import remove_notes
from mcore_ckpt.steps.owner import write_owner

logger = logging.getLogger(__name__)

# renameat2(2), linux/fs.h
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# How many times `open_staging` tries to make the step's folder and then the staging folder in it. In between, another
# role can remove the step's folder, because it is still empty.
_TRIES = 100
# The most files that a thread looks at in one turn, and the least number of turns for each thread if there are many
# files. Because of the turns, a thread whose calls take longer looks at fewer files.
_FILES_AT_ONCE = 64
_TURNS = 8
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def new_attempt() -> str:
    """Returns an id that no other save has: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def open_staging(role_dir: Path, attempt: str, mode: int | None = None) -> Path:
    """Makes the staging folder, which ranks write into, next to the role's folder. Raises OSError.

    New folders get `mode`, before the umask is applied. If `mode` is None, a new root gets the usual mode of roots, and
    any other new folder is not more open than the folder above it.
    """
    staging = file_names.staging_dir(role_dir, attempt)
    for tries_left in reversed(range(_TRIES)):
        make_parents(role_dir.parent, top_mode(None) if mode is None else mode)
        try:
            # The names of the new folders are not synced, because the trainer is waiting for this function. `publish`
            # syncs the name of the step's folder.
            new_folder(role_dir.parent, mode, exist_ok=True)
            new_folder(staging, mode)
            write_owner(staging)
            return staging
        except FileNotFoundError:
            # Another role has just removed the step's folder, which was empty or too old. Some file systems (/proc)
            # raise this error at every try, so the number of tries is limited.
            if not tries_left:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


class SizedFile(Protocol):
    """A file with its path below the staging folder and its size in bytes."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...


def check_files(staging: Path, files: Iterable[tuple[int, SizedFile]]) -> None:
    """Checks that this rank sees each file in its full size. `files` has the rank that wrote each file, and the file.

    Raises CommitError.
    """
    # Several threads look, because the size of each file takes a system call, even if the folders are listed. Each
    # thread takes several files at a time, because otherwise, on a local file system, the threads would spend most of
    # their time on handing over Python's global lock.
    written = list(files)
    length = max(1, min(_FILES_AT_ONCE, len(written) // (tuning.LOOK_THREADS * _TURNS)))
    parts = [written[start : start + length] for start in range(0, len(written), length)]
    results_of(parts, lambda part: _check_part(str(staging), part), tuning.LOOK_THREADS)


def _check_part(staging: str, files: Iterable[tuple[int, SizedFile]]) -> None:
    for rank, file in files:
        path = f"{staging}/{file.path}"
        try:
            size = _size_of(path)
        except OSError as error:
            raise CommitError(
                f"rank {rank} has written {path}, but rank 0 cannot see it ({error.strerror}): all ranks must save to "
                "one shared file system"
            ) from None
        if size != file.size:
            raise CommitError(
                f"rank {rank} has written {file.size} bytes to {path}, but rank 0 sees {size}: all ranks must save to "
                "one shared file system that shows each rank the others' writes"
            )


def _size_of(path: str) -> int:
    # If a call hangs, `io/disk_watch.py` takes the path from the variables of the innermost function. The path in this
    # function is the file's path. In the caller, the path would be the folder's path.
    return os.stat(path).st_size


def check_structures(by_rank: Sequence[Mapping[str, str]], node_of: Callable[[int], int] = lambda rank: 0) -> None:
    """Checks that all ranks that wrote parts of one file planned the same tensors for this file.

    A file's owner collects only the parts that it expects, so the owner would not notice a rank that has planned
    different tensors.

    Args:
        by_rank: for each rank, a mapping from the path of each file to the digest of the file's structure
            (`FilePlan.structure`).
        node_of: returns the number of the node that a rank writes on. Ranks of different nodes write different files.

    Raises CommitError.
    """
    first: dict[tuple[int, str], tuple[int, str]] = {}
    for rank, structures in enumerate(by_rank):
        for path, structure in structures.items():
            other, wanted = first.setdefault((node_of(rank), path), (rank, structure))
            if structure != wanted:
                raise CommitError(
                    f"{path}: ranks {other} and {rank} both write to this file, but have planned different tensors for "
                    "it, although they should be replicas: use shared_writes=False"
                )


def write_manifest(staging: Path, manifest: Manifest) -> None:
    """Writes the manifest, durably, and makes the names in `staging` itself durable.

    All other files, and the names in the folders below `staging`, must be durable already.

    Raises OSError, and CommitError if no load could read the manifest: a checkpoint that cannot be loaded must not
    replace an intact older checkpoint.
    """
    try:
        data = encode_readable(manifest)
        if len(data) > limits.MANIFEST_BYTES:
            raise FieldError(f"it has {len(data)} bytes, more than {limits.MANIFEST_BYTES}")
    except ValueError as error:
        raise CommitError(f"{staging}: not committed, because its manifest could not be read back: {error}") from None
    write_file(staging / file_names.MANIFEST_FILE, [data])
    sync_dir(staging)


def publish(staging: Path, role_dir: Path, attempt: str) -> None:
    """Commits a staging folder that has its manifest, by renaming it to the role's folder.

    A checkpoint that the role's folder already holds stays intact until the new one is in place. Files that other
    programs have put into the role's folder are kept (foreign_files.py).

    Raises OSError: the new checkpoint is not in place, and the old one is untouched.
    """
    replaced = file_names.replaced_dir(role_dir, attempt)
    if not _rename_new(staging, role_dir):
        if not role_dir.is_symlink():
            if link_foreign_files(role_dir, staging):
                sync_dir(staging)
            # The old checkpoint is about to be moved aside. If this process dies then, the owner file tells the next
            # process which process moved the checkpoint.
            with suppress(OSError):
                write_owner(role_dir)
        if not exchange(staging, role_dir):
            _rename_in_turn(staging, role_dir, replaced)
    # The checkpoint is in place, so later failures are only logged and do not fail the save.
    try:
        sync_dir(role_dir.parent)
        # The owner file had to stay until the rename, because it shows other processes whether this process is alive.
        (role_dir / file_names.OWNER_FILE).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is in place, but a power loss might undo that: %s", role_dir, error)
    with suppress(PermissionError):  # the root belongs to another user, and this process may not open it
        sync_dir(role_dir.parent.parent)
    for old in (staging, replaced):
        remove_replaced(old, role_dir)


def _rename_new(staging: Path, role_dir: Path) -> bool:
    """Renames the staging folder to the role's folder. Returns False if the role's folder exists already."""
    if role_dir.exists():
        return False
    try:
        os.rename(staging, role_dir)
    except OSError as error:
        # ENOTEMPTY or EEXIST: another program has just made the role's folder.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one system call. Returns False if the file system or the C library cannot do that."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def _rename_in_turn(staging: Path, role_dir: Path, replaced: Path) -> None:
    # If this process dies between these two renames, a later process puts the old checkpoint back (`restore_replaced`).
    os.rename(role_dir, replaced)
    try:
        os.rename(staging, role_dir)
    except OSError:
        restore_replaced(replaced, role_dir)
        raise


def restore_replaced(replaced: Path, role_dir: Path) -> bool:
    """Puts back a checkpoint that was moved aside, if the new checkpoint was never committed.

    Returns False if the old checkpoint is no longer needed, or if `replaced` is not a checkpoint.
    """
    if (role_dir / file_names.MANIFEST_FILE).exists() or not (replaced / file_names.MANIFEST_FILE).exists():
        return False
    if role_dir.exists():
        # Another program has made the folder again, for its own files. Move these files to the old checkpoint first.
        move_foreign_entries(role_dir, replaced)
        remove_if_empty(role_dir)
    if role_dir.exists():
        logger.warning("%s cannot be put back, because %s holds other files: move one of them", replaced, role_dir)
        return True
    logger.warning("putting %s back, because the save that should have replaced it did not finish", role_dir)
    os.rename(replaced, role_dir)
    (role_dir / file_names.OWNER_FILE).unlink(missing_ok=True)
    sync_dir(role_dir.parent)
    return True


def remove_replaced(old: Path, role_dir: Path) -> None:
    """Removes a replaced checkpoint after moving its foreign files. Keeps `old` if a foreign file cannot be moved."""
    # If `old` is a link, only the link is removed, because the folder that it leads to may belong to somebody else.
    if old.is_symlink() or (old.exists() and move_foreign_entries(old, role_dir)):
        remove_folder(old)
    elif (work := file_names.parse_work_dir(old.name)) is not None and work.purpose == "replaced":
        # With its manifest, `old` would count as the role's checkpoint again once the new checkpoint is deleted.
        with suppress(OSError):
            (old / file_names.MANIFEST_FILE).unlink(missing_ok=True)


def discard(staging: Path) -> None:
    """Removes the files of a failed save. A rank that is still writing fails at its next file."""
    remove_tree(staging)
    remove_notes(staging)
    remove_if_empty(staging.parent)


@contextmanager
def taken_away(staging: Path) -> Iterator[Path]:
    """Renames another process's staging folder for a `with` block that removes the folder, and yields the new path.

    Only a staging folder is renamed: its process was taken for dead, but may come back, and must not put a half-removed
    folder into place. A folder that the block could not remove gets its name back in the end.
    """
    work, away = file_names.parse_work_dir(staging.name), staging
    if work is not None and work.purpose == "staging":
        away = file_names.staging_dir(staging.parent / work.role, new_attempt())
        try:
            os.rename(staging, away)
        except OSError:
            away = staging
    yield away
    if away != staging:
        with suppress(OSError):
            os.rename(away, staging)


def remove_folder(folder: Path) -> None:
    """Removes a folder and its contents as far as possible. If the folder is a link, removes only the link.

    Raises nothing.
    """
    if folder.is_symlink():
        with suppress(OSError):
            folder.unlink()
    else:
        remove_tree(folder)


def remove_if_empty(folder: Path) -> None:
    """Removes a folder if it is empty. Raises nothing."""
    try:
        folder.rmdir()
    except OSError as error:
        # A read-only file system answers EROFS even if there is no such folder, so look whether the folder exists.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) and folder.exists():
            logger.warning("cannot remove %s: %s", folder, error)
