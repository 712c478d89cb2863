"""A root of steps in a remote store, through fsspec: what is there, bytes to it and from it.

Everything is written once, under a folder of its own for each attempt, manifest last: see docs/format.md.
"""

from __future__ import annotations

import logging
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from mcore_ckpt import knobs, layout
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, RemoteError, UnsupportedError
from mcore_ckpt.storage.files import FILE_MODE, make_folder
from mcore_ckpt.storage.in_parallel import for_each
from mcore_ckpt.storage.manifest import Manifest
from mcore_ckpt.storage.reader import parse_manifest

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Stores of objects have no folders, and some file systems take making one for making a bucket.
_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss")
# Stores that tell the MD5 of a file however it was sent.
_TELL_MD5 = ("gs", "gcs")
# The package of a file system that does not come with fsspec, and the extra that installs it.
_PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hdfs": "hdfs"}


@dataclass(frozen=True)
class RemoteRole:
    """The newest attempt of a role at a step that is there whole."""

    attempt: str
    roles: tuple[str, ...]
    created: str


@dataclass(frozen=True)
class RemoteStep:
    """One step of a remote root.

    Attributes:
        found: the newest whole attempt of each role.
        remains: of each role, the attempts that count no more or not yet: replaced ones, and those without a manifest.
        problems: manifests that are no good.
        pinned: somebody has said that it stays, where it was committed: that is kept here, too.
    """

    step: int
    found: dict[str, RemoteRole] = field(default_factory=dict)
    remains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    pinned: bool = False

    @property
    def committed(self) -> frozenset[str]:
        return frozenset(self.found)

    @property
    def declared(self) -> frozenset[str]:
        return frozenset(role for found in self.found.values() for role in found.roles)

    @property
    def is_complete(self) -> bool:
        return bool(self.found) and self.declared <= self.committed

    @property
    def reason(self) -> str:
        """Why it does not count."""
        missing = ", ".join(sorted(self.declared - self.committed))
        text = f"not uploaded by {missing}" if missing else "no manifest in it"
        return "; ".join(self.problems) or f"{layout.step_name(self.step)}: {text}"


class Remote:
    """A root in a remote store. Any thread may call it.

    Args:
        url: as fsspec has them: s3://bucket/prefix, gs://..., hdfs://host/path, file:///path. Credentials come from
            the environment, as the store's own tools have them.

    Raises:
        ValueError: no such URL.
        UnsupportedError: the package that speaks with the store is not installed.

    Example:
        >>> Remote("memory://checkpoints").steps()
        []
    """

    def __init__(self, url: str) -> None:
        self.url = public_url(url)
        self._secrets = _secrets(url)
        scheme = urlsplit(url).scheme
        if not scheme or "::" in url:
            raise ValueError(f"remote is {self.url!r}: use a URL such as s3://bucket/prefix or file:///folder")
        try:
            # Listings of this run's own uploads must not be yesterday's.
            self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            extra = f": pip install 'mcore_ckpt[{_PACKAGES[scheme]}]'" if scheme in _PACKAGES else ""
            raise UnsupportedError(f"remote={self.url!r} needs a package that is missing ({error}){extra}") from None
        except ValueError as error:
            raise ValueError(f"remote is {self.url!r}: {self.redacted(error)}") from None
        except Exception as error:
            raise UnsupportedError(f"remote={self.url!r} cannot be used: {self.redacted(error)}") from None
        self._root = root.rstrip("/")
        self._has_folders = scheme not in _WITHOUT_FOLDERS
        self.tells_md5 = scheme in _TELL_MD5
        self._manifests: dict[str, RemoteRole] = {}

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
        with self.writing(key, knobs.UPLOAD_PART_BYTES) as stream:
            stream.write(data)

    def sizes(self, key: str) -> dict[str, int]:
        """The files below a folder, by their paths below it, and their sizes in bytes. Raises RemoteError."""
        path = self._path(key)
        found = self.persist(f"listing {key}", lambda: self.fs.find(path, detail=True))
        return {name[len(path) + 1 :]: int(info["size"]) for name, info in found.items()}

    def delete(self, key: str) -> None:
        """Removes a folder or file, manifests first: what is half deleted must not look whole. Raises RemoteError.

        What a link leads to stays, and so does the link.
        """
        path = self._path(key)
        if self._is_behind_link(key):
            logger.info("%s is behind a link, and what that leads to may be somebody else's: it stays", path)
            return

        def remove() -> None:
            manifests = [name for name in self.fs.find(path) if name.endswith(f"/{layout.MANIFEST_FILE}")]
            for name in manifests:
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
        """Tries again, after growing pauses, what a store has failed to do.

        Args:
            what: for messages.
            work: may be done again.
            stop: set, to end soon.
            answers: errors that are no failure.

        Raises:
            RemoteError: it has failed each time, or `stop` was set.
            CheckpointError, and one of `answers`: at once.
        """
        pause = knobs.REMOTE_PAUSE_S
        stop = stop or threading.Event()
        for number in range(1, knobs.REMOTE_TRIES + 1):
            if stop.is_set():
                raise RemoteError(f"{self.url}: {what}: stopped")
            try:
                return work()
            except CheckpointError:
                raise
            except answers:
                raise
            except Exception as error:
                if number == knobs.REMOTE_TRIES:
                    raise RemoteError(
                        f"{self.url}: {what} has failed {number} times, at last with {self.redacted(error)}"
                    ) from None
                logger.info("%s: %s has failed, trying again: %s", self.url, what, self.redacted(error))
            # Many ranks that one outage has stopped must not come back in the same instant.
            stop.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, knobs.REMOTE_PAUSE_MOST_S)
        raise AssertionError("unreachable: the last try returns or raises")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    # -- steps ---------------------------------------------------------------------------------------------

    def steps(self) -> list[RemoteStep]:
        """All steps, the oldest first. Raises RemoteError."""
        numbers = {
            step for name in self._names("") if (step := layout.parse_step(name)) is not None and _is_ours(name, step)
        }
        found: list[RemoteStep] = []
        for_each(sorted(numbers), lambda step: found.append(self.step(step)), min(knobs.REMOTE_THREADS, len(numbers)))
        return sorted(found, key=lambda step: step.step)

    def step(self, step: int) -> RemoteStep:
        """One step, whether it is there or not. Raises RemoteError."""
        found: dict[str, RemoteRole] = {}
        remains: dict[str, tuple[str, ...]] = {}
        problems: list[str] = []
        names = self._names(layout.step_name(step))
        for role in filter(layout.is_role, names):
            attempts = list(filter(layout.is_attempt, self._names(f"{layout.step_name(step)}/{role}")))
            whole = [there for attempt in attempts if (there := self._whole(step, role, attempt, problems))]
            newest = max(whole, key=lambda there: (there.created, there.attempt), default=None)
            if newest is not None:
                found[role] = newest
            remains[role] = tuple(attempt for attempt in attempts if newest is None or attempt != newest.attempt)
        return RemoteStep(step, found, remains, tuple(problems), layout.PINNED_FILE in names)

    def manifest(self, key: str) -> Manifest:
        """The manifest of an attempt's folder. Raises FileNotFoundError, CheckpointCorruptError, RemoteError."""
        path = f"{key}/{layout.MANIFEST_FILE}"
        return parse_manifest(self.read_all(path, knobs.MANIFEST_BYTES), self.url_of(path))

    def _whole(self, step: int, role: str, attempt: str, problems: list[str]) -> RemoteRole | None:
        key = layout.remote_dir(step, role, attempt)
        if layout.MANIFEST_FILE not in self._names(key):
            return None
        if key not in self._manifests:
            try:
                manifest = self.manifest(key)
            except FileNotFoundError:
                return None
            except CheckpointCorruptError as error:
                problems.append(str(error))
                return None
            if (manifest.step, manifest.role, manifest.attempt) != (step, role, attempt):
                problems.append(f"{self.url_of(key)}: its manifest is of {manifest.role} at step {manifest.step}")
                return None
            # Nothing is ever written there again, and a large run's takes long to read.
            self._manifests[key] = RemoteRole(attempt, tuple({*manifest.roles, role}), manifest.created)
        return self._manifests[key]

    def _names(self, key: str) -> list[str]:
        def names() -> list[str]:
            try:
                return [str(name).rstrip("/").rpartition("/")[2] for name in self.fs.ls(self._path(key), detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self.persist(f"listing {key or 'the steps'}", names)

    def read_tracker(self) -> int | None:
        """The step the tracker names; None if there is none or it is torn. Raises RemoteError."""
        try:
            data = self.read_all(layout.TRACKER_FILE, knobs.SMALL_BYTES)
        except (FileNotFoundError, CheckpointCorruptError):
            return None
        return layout.parse_tracker(data.decode("ascii", "replace"))


def _is_ours(name: str, step: int) -> bool:
    return name == layout.step_name(step)


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
