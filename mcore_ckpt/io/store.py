"""Reads and writes files of a remote store (S3, GCS, HDFS, a folder) through fsspec."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from mcore_ckpt.errors import CheckpointCorruptError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.access import FILE_MODE, mode_below, mode_in
from mcore_ckpt.io.disk_space import DiskSpace, space_of
from mcore_ckpt.io.files import make_folder, remove_abandoned_files, replace_file, sync_dir
from mcore_ckpt.io.retries import persist
from mcore_ckpt.redaction import redacted, secrets_of
from mcore_ckpt.urls import checked_url, public_url

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# URL schemes of object stores. Object stores have no folders, and for some schemes fsspec would make a bucket instead
# of a folder. So no folders are made under these schemes.
_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss")
# URL schemes of stores that report the MD5 of every file, however the file was sent.
_TELL_MD5 = ("gs", "gcs")
# URL schemes that fsspec supports only with another package, and the extra of mcore_ckpt that installs the other
# package.
_PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hdfs": "hdfs"}


class Store:
    """A folder of a remote store. Its methods accept keys, which are paths below the folder.

    Any thread can call the methods.

    Args:
        url: a URL in fsspec's form: s3://bucket/prefix, gs://..., hdfs://host/path, file:///path. Credentials are read
            from the environment variables that the store's own tools use.
        shared: whether the group may read files that are written to file:///path, as in `access.mode_below`.

    Raises InvalidArgumentError if fsspec does not know the URL. Raises UnsupportedError if the URL's package is not
    installed.

    Example:
        >>> Store("memory://checkpoints").names("")
        []
    """

    def __init__(self, url: str, shared: bool | None = None) -> None:
        url = checked_url(url)
        self.url = public_url(url)
        self._secrets = secrets_of(url)
        scheme = urlsplit(url).scheme
        try:
            # A cached listing would lack the files that this run uploads later.
            self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            extra = f": pip install 'mcore_ckpt[{_PACKAGES[scheme]}]'" if scheme in _PACKAGES else ""
            raise UnsupportedError(
                f"remote={self.url!r} needs a package that is missing ({self.plain(error)}){extra}"
            ) from None
        except ValueError as error:
            raise InvalidArgumentError(
                f"remote is {self.url!r}: {self.redacted(error)}: use a URL of a store that fsspec knows, such as "
                "s3://bucket/prefix"
            ) from None
        except Exception as error:
            raise UnsupportedError(f"remote={self.url!r} cannot be used: {self.redacted(error)}") from None
        self._root = root.rstrip("/")
        self._shared = shared
        self._has_folders = scheme not in _WITHOUT_FOLDERS
        self.tells_md5 = scheme in _TELL_MD5

    def url_of(self, key: str) -> str:
        """Returns the URL of a key, for messages."""
        return f"{self.url}/{key}"

    def redacted(self, error: BaseException) -> str:
        """Returns the type and the text of an error, without secrets, such as a password in the URL."""
        return f"{type(error).__name__}: {self.plain(error)}"

    def plain(self, error: BaseException) -> str:
        """Returns the text of an error without secrets."""
        return redacted(str(error), self._secrets)

    def space(self) -> DiskSpace | None:
        """Returns how much can be written into the store; None if unknown, as for most stores. Raises OSError."""
        return space_of(Path(self._root)) if isinstance(self.fs, LocalFileSystem) else None

    # -- bytes ---------------------------------------------------------------------------------------------

    def read(self, key: str, start: int, stop: int) -> bytes:
        """Reads bytes `[start, stop)` of a file. Raises RemoteError, FileNotFoundError."""
        return self.persist(f"reading {key}", lambda: self.read_once(key, start, stop))

    def read_into(self, key: str, start: int, memory: memoryview) -> None:
        """Fills memory with bytes of a file from byte `start` on. Raises RemoteError, FileNotFoundError."""
        memory[:] = self.read(key, start, start + len(memory))

    def read_once(self, key: str, start: int, stop: int) -> bytes:
        """Reads as `read` does, but without retries. Raises any exception of the file system."""
        data = bytes(self.fs.cat_file(self._path(key), start=start, end=stop)) if stop > start else b""
        if len(data) != stop - start:
            raise OSError(f"the store sent {len(data)} bytes instead of the {stop - start} bytes at byte {start}")
        return data

    def read_all(self, key: str, most: int) -> bytes:
        """Reads a small file. Raises like `read`; raises CheckpointCorruptError if the file has over `most` bytes."""
        size = int(self.persist(f"asking for the size of {key}", lambda: self.info(key)["size"]))
        if size > most:
            raise CheckpointCorruptError(
                f"{self.url_of(key)}: has {size} bytes, more than the {most} that such a file can have"
            )
        return bytes(self.persist(f"reading {key}", lambda: self.fs.cat_file(self._path(key))))

    def info(self, key: str) -> dict[str, Any]:
        """Returns what the store reports about a file, without retries. Raises any exception of the file system."""
        return dict(self.fs.info(self._path(key)))

    @contextmanager
    def writing(self, key: str, part_bytes: int) -> Iterator[Any]:
        """Opens a file for writing, without retries. After a failure, abandons the incomplete file."""
        path = self._path(key)
        is_local = isinstance(self.fs, LocalFileSystem)
        if is_local:
            self._make_folder(Path(path).parent)
        elif self._has_folders:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        stream = self.fs.open(path, "wb", block_size=part_bytes)
        try:
            if is_local:
                _protect(stream.fileno(), Path(path).parent)
            yield stream
            if is_local:
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            _abandon(stream)
            raise
        stream.close()
        if is_local:
            sync_dir(Path(path).parent)

    def replace(self, key: str, data: bytes) -> None:
        """Writes a small file, or replaces it atomically, without retries."""
        if isinstance(self.fs, LocalFileSystem):
            path = Path(self._path(key))
            self._make_folder(path.parent)
            remove_abandoned_files(path, tuning.ABANDONED_S)
            replace_file(path, data)
            return
        with self.writing(key, tuning.UPLOAD_PART_BYTES) as stream:
            stream.write(data)

    def sizes(self, key: str) -> dict[str, int]:
        """Returns the sizes in bytes of the files below a folder, by their paths below the folder.

        Raises RemoteError.
        """
        path = self._path(key)
        found = self.persist(f"listing {key}", lambda: self.fs.find(path, detail=True))
        return {name[len(path) + 1 :]: int(info["size"]) for name, info in found.items()}

    def delete(self, key: str, first: str) -> None:
        """Removes a folder or file. Raises RemoteError.

        Files named `first` (manifests) are deleted before all others, so that a checkpoint never looks complete after
        some of its files have been deleted. If a link leads to the key, nothing is deleted.
        """
        path = self._path(key)
        if self._is_behind_link(key):
            logger.info("%s is not deleted: a link leads to it, so it may belong to somebody else", path)
            return

        def remove() -> None:
            for name in self.fs.find(path):
                if name.endswith(f"/{first}"):
                    self.fs.rm_file(name)
                    if isinstance(self.fs, LocalFileSystem):  # in an object store, each deletion is durable
                        sync_dir(Path(name).parent)
            with suppress(FileNotFoundError):  # an object store keeps no empty folder, so `path` may be gone
                self.fs.rm(path, recursive=True)

        self.persist(f"deleting {key}", remove)

    def _is_behind_link(self, key: str) -> bool:
        if not isinstance(self.fs, LocalFileSystem):
            return False
        return os.path.realpath(self._path(key)) != os.path.join(os.path.realpath(self._root), key)

    def persist(
        self,
        what: str,
        work: Callable[[], Result],
        stop: threading.Event | None = None,
        answers: tuple[type[Exception], ...] = (FileNotFoundError,),
    ) -> Result:
        """Runs `work` until it succeeds, with growing pauses; see `retries.persist`."""
        try:
            return persist(self.url, what, work, self.redacted, stop or threading.Event(), answers)
        except FileNotFoundError as error:  # a web server's error quotes the whole URL, with its secrets
            raise FileNotFoundError(self.plain(error)) from None

    def names(self, key: str) -> list[str]:
        """Returns the names of the files and folders in a folder; none if the folder is missing. Raises RemoteError."""

        def names() -> list[str]:
            try:
                return [str(name).rstrip("/").rpartition("/")[2] for name in self.fs.ls(self._path(key), detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self.persist(f"listing {key or 'the root'}", names)

    def _make_folder(self, folder: Path) -> None:
        root = Path(self._root)
        make_folder(folder, mode_below(root, root, self._shared))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


def _protect(descriptor: int, folder: Path) -> None:
    """Makes a file no more open than its folder, whatever the umask. Does nothing on mounts without permissions."""
    mode, allowed = stat.S_IMODE(os.fstat(descriptor).st_mode), mode_in(folder, FILE_MODE)
    if mode & ~allowed:
        with suppress(OSError):
            os.fchmod(descriptor, mode & allowed)


def _abandon(stream: Any) -> None:
    """Discards a stream without completing its file. Closing an upload would complete the file with too few bytes."""
    try:
        if isinstance(stream, AbstractBufferedFile):
            stream.discard()
            stream.closed = True
        else:
            stream.close()
    except Exception as error:
        logger.info("an unfinished upload could not be discarded: %s", type(error).__name__)
