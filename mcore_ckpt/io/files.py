"""Writes whole files durably and reads parts of files. Errors name the path."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.access import FILE_MODE, FOLDER_MODE, mode_in, naming_owner

# A file in the store that all models of the HuggingFace hub's cache share (huggingface_hub 2.4, `shared_blob_path`).
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}")


def names_in(folder: Path) -> set[str]:
    """Returns the names in a folder; no names if the folder cannot be read."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def write_file(path: Path, parts: Iterable[memoryview | bytes]) -> None:
    """Writes a new file and waits until its bytes are on the disk. Raises FileExistsError and any other OSError."""
    _write_new(path, parts, os.fsync)


def overwrite(path: Path, bytes_at: Mapping[int, bytes]) -> None:
    """Replaces bytes of a file, less than a page at each offset, durably. Raises OSError."""
    with path.open("r+b", buffering=0) as file:
        for offset, data in bytes_at.items():
            os.pwrite(file.fileno(), data, offset)
        os.fsync(file.fileno())


def write_hint(path: Path, data: bytes) -> None:
    """Writes a new file as `write_file` does, but does not wait until its bytes are on the disk.

    After a power loss, the file may be missing or damaged.
    """
    _write_new(path, [data], lambda descriptor: None)


def _write_new(path: Path, parts: Iterable[memoryview | bytes], finish: Callable[[int], None]) -> None:
    descriptor = open_new(path)
    try:
        for part in parts:
            write_all(descriptor, memoryview(part))
        finish(descriptor)
    except OSError as error:
        # The system's error does not name the path. Without the path, a user could not see which disk is full.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def open_new(path: Path, flags: int = os.O_EXCL) -> int:
    """Makes a file that is not more open than its folder, and returns its descriptor for writing. Raises OSError."""
    mode = mode_in(path.parent, FILE_MODE)
    with naming_owner(path.parent):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, mode)


def new_folder(path: Path, mode: int | None = None, exist_ok: bool = False) -> None:
    """Makes one folder. With `exist_ok`, an existing folder stays unchanged. Raises OSError.

    The folder gets the mode `mode`, before the umask is applied. None: the new folder is not more open than the folder
    above it.
    """
    with naming_owner(path.parent):
        path.mkdir(mode_in(path.parent, FOLDER_MODE) if mode is None else mode, False, exist_ok)


def make_folders(base: Path, path: str) -> None:
    """Makes the folders below `base` that the file `path` will be in.

    Does not make `base`, because a staging folder that was discarded must not come back.
    """
    for parent in reversed(Path(path).parents[:-1]):
        new_folder(base / parent, exist_ok=True)


def sync_file(path: Path) -> None:
    """Waits until the bytes of a file are on the disk, whichever process has written them."""
    _sync(path, os.O_RDONLY | os.O_CLOEXEC)


def sync_dir(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    _sync(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)


def sync_names(base: Path, paths: Iterable[str]) -> None:
    """Waits until the names of `paths` and their folders are on the disk, except the names in `base`."""
    folders = {base / folder for path in paths for folder in Path(path).parents[:-1]}
    for folder in sorted(folders, reverse=True):
        sync_dir(folder)


def sync_folders(base: Path) -> None:
    """Waits until all names below a folder are on the disk, whichever process of this host has made them."""
    sync_dir(base)
    sync_folders_below(base)


def sync_folders_below(base: Path) -> None:
    """Waits until the names in all folders below `base` are on the disk, but not the names in `base` itself.

    The caller syncs the names in `base` later.
    """
    for folder, _, _ in os.walk(base):
        if Path(folder) != base:
            sync_dir(Path(folder))


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> None:
    """Writes all of the data at the descriptor's position. Raises OSError, which does not name the path."""
    while data:
        data = data[os.write(descriptor, data) :]


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a small file atomically: even after a crash, a reader finds the old or the new bytes. Raises OSError."""
    write = _temporary_file(path, data, lambda temporary, data: write_file(temporary, [data]))
    with naming_owner(path), write as temporary:  # in a folder with the sticky bit, only a file's owner may replace it
        os.replace(temporary, path)
    sync_dir(path.parent)


def claim_file(path: Path, data: bytes) -> None:
    """Makes a small file atomically, but not durably. Raises FileExistsError if it exists, and any other OSError."""
    with _temporary_file(path, data, write_hint) as temporary:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            write_hint(path, data)  # This file system has no hard links, so the file is not made atomically.


@contextmanager
def _temporary_file(path: Path, data: bytes, write: Callable[[Path, bytes], None]) -> Iterator[Path]:
    """Writes a temporary file next to `path`, yields its path, and finally deletes the file if it is still there."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(temporary, data)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)  # Otherwise each try on a full disk would leave a file behind.


def remove_abandoned_files(path: Path, seconds: float) -> None:
    """Removes temporary files next to `path` that processes left when they died while writing `path`. Raises OSError.

    A file that has not changed for `seconds` seconds counts as left by a dead process. If the process is only slow, its
    write fails with FileNotFoundError.
    """
    since = time.time() - seconds
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}"):
        with suppress(FileNotFoundError):
            if temporary.stat().st_mtime < since:
                temporary.unlink()


def make_folder(path: Path, mode: int | None = None) -> None:
    """Makes a folder and its missing parents, durably. `mode` is as in `new_folder`. Raises OSError."""
    make_parents(path, mode)
    if not path.is_dir():
        _make_durably(path, mode)


def make_parents(path: Path, mode: int | None = None) -> None:
    """Makes the missing folders above `path`, durably. `mode` is as in `new_folder`. Raises OSError."""
    for parent in reversed(path.parents):
        # `mkdir(parents=True)` would ignore the mode for the parents and make them as open as the umask allows.
        if not parent.is_dir():
            try:
                _make_durably(parent, mode)
            except FileExistsError:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent)) from None


def _make_durably(folder: Path, mode: int | None) -> None:
    new_folder(folder, mode, exist_ok=True)
    with suppress(PermissionError):  # the folder above may belong to another user, and be unreadable
        sync_dir(folder.parent)


def open_regular(path: Path) -> int:
    """Opens a regular file for reading and returns its descriptor. Follows links. Raises OSError for anything else."""
    # Check before opening, because opening a pipe waits for a writer, and opening a device can have any effect. Check
    # again after opening, because another file may have the name by then.
    _check_regular(os.stat(path).st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """Opens a regular file as `open_regular` does; yields its descriptor and its size in bytes, and closes it."""
    descriptor = open_regular(path)
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "found a folder, pipe, socket or device where a file should be", str(path))


def inside(folder: Path, name: str) -> Path:
    """Returns `folder / name`. Raises CheckpointCorruptError if links lead out of the folder.

    Links in the path of the folder itself are allowed, because the caller has chosen that path.
    """
    path = folder / name
    parts = Path(name).parts
    # Each look at a name is a call to the file system, which may be far away. Only a link below the folder can lead out
    # of the folder. So if no name below the folder is a link, the names above need not be looked at.
    if ".." not in parts and not os.path.isabs(name) and not _is_link_in(folder, parts):
        return path
    base = os.path.realpath(folder)
    found = os.path.realpath(path)
    if os.path.commonpath((base, found)) != base:
        raise CheckpointCorruptError(
            f"{path}: a link on this path leads out of {folder}, so nothing was read. Replace the link by its target"
        )
    return path


def _is_link_in(folder: Path, parts: Sequence[str]) -> bool:
    return any(os.path.islink(folder.joinpath(*parts[: count + 1])) for count in range(len(parts)))


def linked_file(folder: Path, name: str) -> Path:
    """Returns `folder / name` as `inside` does, but also allows links into the HuggingFace hub's cache.

    The folder is `<cache>/models--<owner>--<name>/snapshots/<commit>`. Its links lead to `<cache>/models--.../blobs`.
    Since huggingface_hub 2, the files in `blobs` can be links, which lead on to the store that all models share,
    `<cache>/blobs/<2 digits>/<64 digits>`.
    """
    path = folder / name
    model = os.path.dirname(os.path.dirname(os.path.realpath(folder)))
    parent, digits = os.path.split(os.path.realpath(path))
    is_shared = _SHARED_BLOB.fullmatch(digits) and parent == os.path.join(os.path.dirname(model), "blobs", digits[:2])
    return path if is_shared or parent == os.path.join(model, "blobs") else inside(folder, name)


def read_small(path: Path, most: int) -> bytes:
    """Reads a whole file.

    Raises OSError if the file cannot be opened or is not a regular file. Raises CheckpointCorruptError if the file is
    larger than `most` bytes, or cannot be read.
    """
    with opened(path) as (descriptor, size):
        if size > most:
            raise CheckpointCorruptError(f"{path}: has {size} bytes, more than the {most} that such a file can have")
        return read_exact(descriptor, size, 0, path)


def read_exact(descriptor: int, nbytes: int, offset: int, path: Path) -> bytes:
    """Reads `nbytes` bytes at `offset`. Raises CheckpointCorruptError if the file is too short or cannot be read."""
    pieces: list[bytes] = []  # usually one piece, so that no second copy of the bytes is needed
    left = nbytes
    while left:
        try:
            piece = os.pread(descriptor, left, offset)
        except OSError as error:
            raise CheckpointCorruptError(f"{path}: cannot be read at byte {offset}: {error}") from error
        if not piece:
            raise CheckpointCorruptError(f"{path}: ends at byte {offset}, {left} bytes too early: the file was cut")
        pieces.append(piece)
        left -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def drop_from_cache(descriptor: int, offset: int, nbytes: int) -> None:
    """Tells the system that it need not keep these bytes of a file in the page cache."""
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
