"""A checkpoint is either entirely there or not there: the rename that makes it so, and what crashes leave behind."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile, decode_manifest, encode_manifest
from mcore_ckpt.errors import CommitError
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import FOLDER_MODE, make_folder, sync_dir, write_file
from mcore_ckpt.io.json_fields import FieldError
from mcore_ckpt.steps.owner import read_owner, write_owner

logger = logging.getLogger(__name__)

# renameat2(2), linux/fs.h
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TRIES = 100
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def new_attempt() -> str:
    """A name no other save has."""
    return uuid.uuid4().hex


def open_staging(role_dir: Path, attempt: str) -> Path:
    """Makes the folder ranks write into. Raises OSError."""
    staging = file_names.staging_dir(role_dir, attempt)
    for tries_left in reversed(range(_TRIES)):
        make_folder(role_dir.parent)
        try:
            staging.mkdir(FOLDER_MODE)
            write_owner(staging)
            return staging
        except FileNotFoundError:
            # Another role has in this instant removed the step's folder, which was empty or too old. Some file systems
            # (/proc) say the same of any folder, for ever.
            if not tries_left:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


def check_files(staging: Path, files: Iterable[tuple[int, WrittenFile]]) -> None:
    """Raises CommitError if a file that a rank has written cannot be seen from here, or is of another size."""
    for rank, file in files:
        path = staging / file.path
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CommitError(
                f"rank {rank} has written {path}, but rank 0 cannot see it ({error.strerror}): all ranks must save to "
                "one shared file system"
            ) from None
        if size != file.size:
            raise CommitError(f"rank {rank} has written {file.size} bytes to {path}, but rank 0 sees {size}")


def check_parts(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Ranks that wrote to one file must have meant the same one: its owner does not ask a rank it does not expect.

    Args:
        by_rank: each rank's digest of what it took each file for (FilePlan.structure), by path.

    Raises:
        CommitError: two ranks took a file for different ones.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, parts in enumerate(by_rank):
        for path, structure in parts.items():
            other, wanted = first.setdefault(path, (rank, structure))
            if structure != wanted:
                raise CommitError(
                    f"{path}: rank {other} and rank {rank} both write to it, and have other tensors in it, though they "
                    "should be replicas: use shared_writes=False"
                )


def write_manifest(staging: Path, manifest: Manifest) -> None:
    """Makes the names of all files durable, then writes the manifest.

    Raises:
        CommitError: the manifest could not be read again: the save would be reported as done, in the place of an
            older checkpoint that was sound.
        OSError: it cannot be written.
    """
    try:
        data = encode_manifest(manifest)
        if len(data) > limits.MANIFEST_BYTES:
            raise FieldError(f"it has {len(data)} bytes, more than {limits.MANIFEST_BYTES}")
        decode_manifest(data)
    except ValueError as error:
        raise CommitError(f"{staging}: not committed, since its manifest could not be read again: {error}") from None
    for folder, _, _ in os.walk(staging):
        sync_dir(Path(folder))
    write_file(staging / file_names.MANIFEST_FILE, [data])
    sync_dir(staging)


def publish(staging: Path, role_dir: Path, attempt: str) -> None:
    """Puts a sealed folder into place. An older checkpoint there stays whole until the new one is in its place.

    What others have put there stays: verl's SFT trainer (0.9.1, `CheckpointHandler.save_checkpoint`) writes its data
    position into the step's folder, while a save that goes on beside it is on its way there.
    """
    replaced = file_names.replaced_dir(role_dir, attempt)
    if not _rename_new(staging, role_dir):
        if not role_dir.is_symlink():
            _link_strange_files(role_dir, staging)
            with suppress(OSError):  # it is on its way out, and if this process dies its doing must be known
                write_owner(role_dir)
        if not _exchange(staging, role_dir):
            _rename_in_turn(staging, role_dir, replaced)
    # From here on it is in place: what fails now is told, and is not the save's failure.
    try:
        sync_dir(role_dir)
        sync_dir(role_dir.parent)
        # Only now: until the rename a start of another process must be able to see whether this one lives.
        (role_dir / file_names.OWNER_FILE).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is in place, but a power loss might undo that: %s", role_dir, error)
    with suppress(PermissionError):  # of the folder above all steps, if it is new, only its owner can say
        sync_dir(role_dir.parent.parent)
    for old in (staging, replaced):
        _remove_replaced(old, role_dir)


def _rename_new(staging: Path, role_dir: Path) -> bool:
    """False if something is there already."""
    if role_dir.exists():
        return False
    try:
        os.rename(staging, role_dir)
    except OSError as error:
        # Its trainer has made the folder in this instant.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _rename_in_turn(staging: Path, role_dir: Path, replaced: Path) -> None:
    # Between these two renames only recovery can find the old checkpoint: see restore_replaced.
    os.rename(role_dir, replaced)
    try:
        os.rename(staging, role_dir)
    except OSError:
        restore_replaced(replaced, role_dir)
        raise


def _strange_entries(role_dir: Path) -> list[Path]:
    """What no save of ours has put into a role's folder."""
    return [entry for entry in _entries(role_dir) if not file_names.is_own(entry.name)]


def _link_strange_files(old: Path, new: Path) -> None:
    """The files have both names, so that they are not missing for an instant, nor after a crash."""
    for entry in _strange_entries(old):
        with suppress(OSError):  # a file system without links, or a folder: moved after the exchange
            os.link(entry, new / entry.name, follow_symlinks=False)


def _remove_replaced(old: Path, role_dir: Path) -> None:
    """Removes what a checkpoint was replaced in, but not what others have in it and that could not be moved."""
    # What was behind a link is not ours to tidy up.
    if old.is_symlink() or (old.exists() and _move_strange_entries(old, role_dir)):
        remove(old)


def _move_strange_entries(old: Path, new: Path) -> bool:
    """What has come since links were made, and what cannot be linked. False if something has to stay."""
    for entry in _strange_entries(old):
        there = new / entry.name
        try:
            if not os.path.lexists(there):
                os.rename(entry, there)
            elif _is_newer(entry, there):
                os.replace(entry, there)
        except OSError as error:
            logger.warning("%s could not be moved to %s, where it belongs, and stays: %s", entry, new, error)
            return False
    return True


def _is_newer(entry: Path, there: Path) -> bool:
    """Whether a file is a later one than that of its name: its writer has replaced it after the link was made."""
    mine, other = entry.lstat(), there.lstat()
    both_files = stat.S_ISREG(mine.st_mode) and stat.S_ISREG(other.st_mode)
    return both_files and mine.st_ino != other.st_ino and mine.st_mtime_ns > other.st_mtime_ns


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step. False where the file system or the C library cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


@contextmanager
def kept_for_upload(role_dir: Path, attempt: str) -> Iterator[None]:
    """No retention, of this role or another, deletes the step meanwhile. Raises OSError, if the step is gone."""
    mark = file_names.uploading_dir(role_dir, attempt)
    mark.mkdir(FOLDER_MODE, exist_ok=True)
    try:
        write_owner(mark)
        yield
    finally:
        shutil.rmtree(mark, ignore_errors=True)


def discard(staging: Path) -> None:
    """Removes what a failed save has written. A rank that is still writing into it fails at its next file."""
    shutil.rmtree(staging, ignore_errors=True)
    _remove_if_empty(staging.parent)


def remove(folder: Path) -> None:
    """Removes a folder with what is in it, as far as that can be; of a link, the link alone. Raises nothing."""
    if folder.is_symlink():
        with suppress(OSError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            logger.warning("cannot remove %s: %s", folder, error)


def sweep(root: Path, role: str, alone: bool) -> None:
    """Removes what crashes of earlier runs have left of this role, and puts back what a crash left moved aside.

    Args:
        root: the folder of the steps.
        role: only this role's remains; other roles may be saving.
        alone: this process is the role's trainer (`trainer_lock`), so folders of unknown or unreachable owners are
            remains too.
    """
    if not root.is_dir():
        return
    for entry in list(root.iterdir()):
        if file_names.is_deleted_dir(entry.name):
            if _is_deleted_for_good(entry, alone):
                remove(entry)
        elif alone and (
            file_names.is_tracker_under_way(entry.name) or file_names.is_trainer_file_under_way(entry.name, role)
        ):
            entry.unlink(missing_ok=True)
    # Whose these are their names do not say: those of unknown owners are this role's if there is no other trainer.
    only = alone and not any(file_names.is_trainer_file_of_another(entry.name, role) for entry in root.iterdir())
    for name in {work.role for entry, work in _work_dirs(root) if entry.parent == root}:
        _sweep_step(root, name, only)
    for step_path in _own_steps(root):
        try:
            _sweep_step(step_path, role, alone)
        except PermissionError as error:  # somebody else's
            logger.warning("%s stays as it is: %s", step_path, error)


def _work_dirs(root: Path) -> list[tuple[Path, file_names.RoleWorkDir]]:
    """Of all steps: in their folders, and beside those whose folder is their only role's."""
    entries = [entry for folder in (root, *_own_steps(root)) for entry in _entries(folder)]
    works = [(entry, work) for entry in entries if (work := file_names.parse_work_dir(entry.name)) is not None]
    return [
        (entry, work) for entry, work in works if entry.parent != root or file_names.parse_step(work.role) is not None
    ]


def _own_steps(root: Path) -> list[Path]:
    """The folders of steps that are below the root: what a link names may be another run's, which may live."""
    return [path for paths in file_names.step_dirs(root).values() for path in paths if not path.is_symlink()]


def find_remains(root: Path, role: str | None = None) -> list[Path]:
    """What processes that died have left below a folder of steps: of one role, or of all.

    What may belong to a process that lives, on this host or on another, is not in it, and neither is a checkpoint
    that the next start puts back.
    """
    found = [entry for entry in _entries(root) if file_names.is_deleted_dir(entry.name)]
    found = [entry for entry in found if _is_deleted_for_good(entry, alone=False)]
    for entry, work in _work_dirs(root):
        flat = entry.parent == root  # its role is not in its name
        if (role not in (None, work.role) and not flat) or not _is_remains(entry, alone=False):
            continue
        if work.purpose == "staging" or os.path.exists(entry.parent / work.role / file_names.MANIFEST_FILE):
            found.append(entry)
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []  # retention of another process has just deleted it
    except PermissionError:
        return []  # somebody else's: nothing of ours is in it


def sweep_beside(folder: Path) -> None:
    """Removes what crashes have left of a folder that is put in place as a role's is."""
    if folder.parent.is_dir():
        _sweep_step(folder.parent, folder.name, alone=False)


def _sweep_step(step_path: Path, role: str, alone: bool) -> None:
    # The step's own is retention's, which was about to take it away.
    for folder in (step_path, step_path / role):
        if (folder / file_names.OWNER_FILE).exists() and _is_remains(folder, alone):
            (folder / file_names.OWNER_FILE).unlink(missing_ok=True)
    for entry in _entries(step_path):
        work = file_names.parse_work_dir(entry.name)
        if work is None or work.role != role:
            continue
        if work.purpose == "replaced" and _is_between_renames(step_path / role, work.attempt, alone):
            continue
        if work.purpose == "replaced" and restore_replaced(entry, step_path / role):
            continue
        if _is_remains(entry, alone):
            logger.warning("removing %s: what a save that did not finish has left", entry)
            if (entry / file_names.MANIFEST_FILE).exists() and (step_path / role).exists():
                _remove_replaced(entry, step_path / role)
            else:
                remove(entry)
    if alone:
        _remove_if_empty(step_path)


def _is_between_renames(role_dir: Path, attempt: str, alone: bool) -> bool:
    """Whether the save that moved a checkpoint aside is still about to put the new one there."""
    staging = file_names.staging_dir(role_dir, attempt)
    return staging.exists() and not _is_remains(staging, alone)


def restore_replaced(replaced: Path, role_dir: Path) -> bool:
    """Puts a checkpoint back that was moved aside for one that never came. False if it is not needed any more."""
    if (role_dir / file_names.MANIFEST_FILE).exists() or not (replaced / file_names.MANIFEST_FILE).exists():
        return False
    if role_dir.exists():
        # Its trainer has made the folder again, for files of its own.
        _move_strange_entries(role_dir, replaced)
        _remove_if_empty(role_dir)
    if role_dir.exists():
        logger.warning("%s cannot be put back: there is something else in %s: move one of them", replaced, role_dir)
        return True
    logger.warning("putting %s back: the save that was to replace it did not finish", role_dir)
    os.rename(replaced, role_dir)
    (role_dir / file_names.OWNER_FILE).unlink(missing_ok=True)
    sync_dir(role_dir.parent)
    return True


def is_in_use(folder: Path, step_path: Path) -> bool:
    """Whether a save that may still be under way has its staging folder in a step, or a role there is being copied.

    Args:
        folder: where the step is now.
        step_path: where it belongs: beside it is what is under way for the step as a whole.
    """
    for entry in [*_entries(folder), *_entries(step_path.parent)]:
        work = file_names.parse_work_dir(entry.name)
        if work is None or work.purpose == "replaced" or (entry.parent != folder and work.role != step_path.name):
            continue
        owner = read_owner(entry)
        if owner is not None and (owner.is_alive_here or not owner.is_on_this_host):
            return True
    return False


def _is_remains(folder: Path, alone: bool) -> bool:
    owner = read_owner(folder)
    if owner is None:
        return alone
    return not owner.is_alive_here if owner.is_on_this_host else alone


def _is_deleted_for_good(deleted: Path, alone: bool) -> bool:
    """Whether who deletes a step is past putting it back, or dead."""
    return read_owner(deleted) is None or _is_remains(deleted, alone)
