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
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from mcore_ckpt.errors import CheckpointCorruptError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import FILE_MODE, make_folder
from mcore_ckpt.io.retries import persist

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Stores of objects have no folders, and some file systems take making one for making a bucket.
_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss")
# Stores that tell the MD5 of a file however it was sent.
_TELL_MD5 = ("gs", "gcs")
# The package of a file system that does not come with fsspec, and the extra that installs it.
_PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hdfs": "hdfs"}


class Store:
    """A folder of a remote store, and the files below it by their keys. Any thread may call it.

    Args:
        url: as fsspec has them: s3://bucket/prefix, gs://..., hdfs://host/path, file:///path. Credentials come from
            the environment, as the store's own tools have them.

    Raises:
        InvalidArgumentError: not a URL that fsspec knows.
        UnsupportedError: the package that speaks with the store is not installed.

    Example:
        >>> Store("memory://checkpoints").names("")
        []
    """

    def __init__(self, url: str) -> None:
        self.url = public_url(url)
        self._secrets = _secrets(url)
        scheme = urlsplit(url).scheme
        if not scheme or "::" in url:
            raise InvalidArgumentError(
                f"remote is {self.url!r}: use a URL such as s3://bucket/prefix or file:///folder"
            )
        try:
            # Listings of this run's own uploads must not be yesterday's.
            self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            extra = f": pip install 'mcore_ckpt[{_PACKAGES[scheme]}]'" if scheme in _PACKAGES else ""
            raise UnsupportedError(f"remote={self.url!r} needs a package that is missing ({error}){extra}") from None
        except ValueError as error:
            raise InvalidArgumentError(f"remote is {self.url!r}: {self.redacted(error)}") from None
        except Exception as error:
            raise UnsupportedError(f"remote={self.url!r} cannot be used: {self.redacted(error)}") from None
        self._root = root.rstrip("/")
        self._has_folders = scheme not in _WITHOUT_FOLDERS
        self.tells_md5 = scheme in _TELL_MD5

    def url_of(self, key: str) -> str:
        """For messages."""
        return f"{self.url}/{key}"

    def redacted(self, error: BaseException) -> str:
        """What an error says, without what is secret in the URL."""
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    # -- bytes ---------------------------------------------------------------------------------------------

    def read(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `[start, stop)` of a file. Raises RemoteError, FileNotFoundError."""
        return self.persist(f"reading {key}", lambda: self.read_once(key, start, stop))

    def read_once(self, key: str, start: int, stop: int) -> bytes:
        """As `read`. Raises what the file system raises."""
        data = bytes(self.fs.cat_file(self._path(key), start=start, end=stop)) if stop > start else b""
        if len(data) != stop - start:
            raise OSError(f"{len(data)} bytes came of the {stop - start} from {start} on")
        return data

    def read_all(self, key: str, most: int) -> bytes:
        """A small file. Raises RemoteError, FileNotFoundError, CheckpointCorruptError if it is larger than `most`."""
        size = int(self.persist(f"looking at {key}", lambda: self.info(key)["size"]))
        if size > most:
            raise CheckpointCorruptError(
                f"{self.url_of(key)}: has {size} bytes, more than {most}: it is not what its name says"
            )
        return bytes(self.persist(f"reading {key}", lambda: self.fs.cat_file(self._path(key))))

    def info(self, key: str) -> dict[str, Any]:
        """What the store says of a file, once. Raises what its file system raises."""
        return dict(self.fs.info(self._path(key)))

    @contextmanager
    def writing(self, key: str, part_bytes: int) -> Iterator[Any]:
        """A stream to a file, once: whatever fails, it does not become what the store takes for the file's end."""
        path = self._path(key)
        is_local = isinstance(self.fs, LocalFileSystem)
        if is_local:
            make_folder(Path(path).parent)
        elif self._has_folders:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        stream = self.fs.open(path, "wb", block_size=part_bytes)
        try:
            if is_local:
                _protect(stream.fileno())
            yield stream
            if is_local:
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            _abandon(stream)
            raise
        stream.close()

    def replace(self, key: str, data: bytes) -> None:
        """Writes a small file, once."""
        with self.writing(key, tuning.UPLOAD_PART_BYTES) as stream:
            stream.write(data)

    def sizes(self, key: str) -> dict[str, int]:
        """The files below a folder, by their paths below it, and their sizes in bytes. Raises RemoteError."""
        path = self._path(key)
        found = self.persist(f"listing {key}", lambda: self.fs.find(path, detail=True))
        return {name[len(path) + 1 :]: int(info["size"]) for name, info in found.items()}

    def delete(self, key: str, first: str) -> None:
        """Removes a folder or file. Raises RemoteError.

        Files named `first` (a checkpoint's manifests) go before all others, so that a half deleted folder never looks
        whole. What a link leads to stays, and so does the link.
        """
        path = self._path(key)
        if self._is_behind_link(key):
            logger.info("%s is behind a link, and what that leads to may be somebody else's: it stays", path)
            return

        def remove() -> None:
            for name in self.fs.find(path):
                if name.endswith(f"/{first}"):
                    self.fs.rm_file(name)
            with suppress(FileNotFoundError):  # a store of objects has no folder without files
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
        """Runs `work`, and tries again what the store fails to do; see `retries.persist`."""
        return persist(self.url, what, work, self.redacted, stop or threading.Event(), answers)

    def names(self, key: str) -> list[str]:
        """The names of the files and folders in a folder; none if it is not there. Raises RemoteError."""

        def names() -> list[str]:
            try:
                return [str(name).rstrip("/").rpartition("/")[2] for name in self.fs.ls(self._path(key), detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self.persist(f"listing {key or 'the root'}", names)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


def public_url(url: str) -> str:
    """A URL without user, password and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(an unreadable URL)"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")).rstrip("/")


def _secrets(url: str) -> list[str]:
    parts = urlsplit(url)
    return [text for text in (parts.netloc.rpartition("@")[0], parts.password, parts.query) if text]


def _protect(descriptor: int) -> None:
    """Nobody else may write to a file, whatever the umask says; some mounts know no permissions."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode & ~FILE_MODE:
        with suppress(OSError):
            os.fchmod(descriptor, mode & FILE_MODE)


def _abandon(stream: Any) -> None:
    """Closing would complete the file with what has been written of it."""
    try:
        if isinstance(stream, AbstractBufferedFile):
            stream.discard()
            stream.closed = True
        else:
            stream.close()
    except Exception as error:
        logger.info("an upload could not be withdrawn: %s", type(error).__name__)
