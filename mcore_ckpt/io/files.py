"""Writing whole files durably, and reading parts of them, with errors that name the path."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt.errors import CheckpointCorruptError

# As the umask says, but never writable for everybody, whatever it says.
FILE_MODE = 0o664
FOLDER_MODE = 0o775


def write_file(path: Path, parts: Iterable[memoryview | bytes]) -> None:
    """Writes a new file and waits until its bytes are on the disk. Raises OSError, FileExistsError included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        for part in parts:
            _write_all(descriptor, memoryview(part))
        os.fsync(descriptor)
    except OSError as error:
        # The system's errors of a descriptor do not say of which file, so not which disk is full.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def make_folders(base: Path, path: str) -> None:
    """Makes the folders of `path` below `base`, which must be there: one that was discarded must not come back."""
    for parent in reversed(Path(path).parents[:-1]):
        (base / parent).mkdir(FOLDER_MODE, exist_ok=True)


def sync_file(path: Path) -> None:
    """Makes the bytes of a file durable that somebody else has written."""
    _sync(path, os.O_RDONLY | os.O_CLOEXEC)


def sync_dir(path: Path) -> None:
    """Makes the names in a folder durable."""
    _sync(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a small file so that a reader, or a crash, finds either the old bytes or the new."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_file(temporary, [data])
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk each try would leave one
        raise
    sync_dir(path.parent)


def claim_file(path: Path, data: bytes) -> None:
    """Makes a small file that is not there, whole or not at all. Raises OSError, FileExistsError included."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_file(temporary, [data])
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        write_file(path, [data])  # a file system without links
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, where they are not there. Raises OSError."""
    for parent in (*reversed(path.parents), path):
        # Not `parents=True`: those would be made with all permissions that the umask leaves.
        if not parent.is_dir():
            try:
                parent.mkdir(FOLDER_MODE, exist_ok=True)
            except FileExistsError:
                if parent == path:
                    raise
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent)) from None


def open_regular(path: Path) -> int:
    """A descriptor to read a file with, links followed. Raises OSError, for what is no file, too."""
    # Before opening: a pipe waits for a writer, a device may do anything. And again after: names can change.
    _check_regular(os.stat(path).st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a folder, pipe, socket or device, where a file should be", str(path))


def inside(folder: Path, name: str) -> Path:
    """`folder / name`. Raises CheckpointCorruptError if links lead out of the folder.

    The folder may be reached by links: that is up to whoever names it.
    """
    path = folder / name
    base = os.path.realpath(folder)
    found = os.path.realpath(path)
    if os.path.commonpath((base, found)) != base:
        raise CheckpointCorruptError(f"{path}: is a link, or below one, that leads out of {folder}: it was not read")
    return path


def linked_file(folder: Path, name: str) -> Path:
    """As `inside`, but the links that the HuggingFace hub's cache is made of are followed."""
    path = folder / name
    blobs = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(folder))), "blobs")
    return path if os.path.dirname(os.path.realpath(path)) == blobs else inside(folder, name)


def read_small(path: Path, most: int) -> bytes:
    """A whole file. Raises OSError, also for what is no file; CheckpointCorruptError if it is larger than `most`."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise CheckpointCorruptError(f"{path}: has {size} bytes, more than {most}: it is not what its name says")
        return read_exact(descriptor, size, 0, path)
    finally:
        os.close(descriptor)


def read_exact(descriptor: int, nbytes: int, offset: int, path: Path) -> bytes:
    """`nbytes` at `offset`. Raises CheckpointCorruptError if the file ends before."""
    data = bytearray(nbytes)
    target = memoryview(data)
    while target:
        try:
            count = os.preadv(descriptor, [target], offset)
        except OSError as error:
            raise CheckpointCorruptError(f"{path}: cannot be read at byte {offset}: {error}") from error
        if not count:
            raise CheckpointCorruptError(
                f"{path}: ends at byte {offset}, {len(target)} bytes too early: the file was cut"
            )
        target = target[count:]
        offset += count
    return bytes(data)


def drop_from_cache(descriptor: int, offset: int, nbytes: int) -> None:
    """Tells the system that these bytes of a file will not be read again."""
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
