"""Local checkpoint -> remote store: the files, compared with what the manifest says of them, and the manifest last."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.reading import open_file, parse_manifest
from mcore_ckpt.errors import CheckpointCorruptError, RemoteError
from mcore_ckpt.io import limits, tuning
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import drop_from_cache
from mcore_ckpt.io.store import Store
from mcore_ckpt.io.threads import for_each
from mcore_ckpt.steps.remote_steps import RemoteStep, RemoteSteps
from mcore_ckpt.steps.retention import PreservationPolicy, too_old

logger = logging.getLogger(__name__)

# Of an object that was put in one request, or in parts: the MD5 of the parts' MD5s, and their number. Of an encrypted
# one it is not what it seems, so that a difference says nothing.
_ETAG = re.compile(r'"?([0-9a-f]{32}(?:-[0-9]+)?)"?')


class Upload:
    """The upload of one role's checkpoint. What has arrived in one call of `run` need not go again in the next.

    Args:
        store: where to.
        role_dir: the checkpoint, which must stay there.
        stop: set, to end soon.

    Raises:
        CheckpointCorruptError, OSError: its manifest cannot be read.
    """

    def __init__(self, store: Store, role_dir: Path, stop: threading.Event) -> None:
        self._store = store
        self._role_dir = role_dir
        self._stop = stop
        path = role_dir / file_names.MANIFEST_FILE
        self._manifest_bytes = path.read_bytes()
        self.manifest = parse_manifest(self._manifest_bytes, path)
        self.key = key_of(self.manifest)
        self._arrived: set[str] = set()

    def run(self) -> None:
        """Returns when the checkpoint is in the store, whole.

        Raises:
            RemoteError: the store has failed, again and again, or `stop` was set.
            CheckpointCorruptError: a local file is missing or not what the manifest says.
        """
        # The largest first: the last file on its way should be a small one.
        missing = [file for file in self.manifest.files if file.path not in self._arrived]
        for_each(sorted(missing, key=lambda file: -file.size), self._send, tuning.UPLOAD_FILES)
        self._check_all_there()
        self._persist(f"writing the manifest of {self.key}", self._finish)

    def _send(self, record: FileRecord) -> None:
        self._persist(f"uploading {self.key}/{record.path}", lambda: self._send_once(record))
        self._arrived.add(record.path)

    def _send_once(self, record: FileRecord) -> None:
        key = f"{self.key}/{record.path}"
        part_bytes = part_size(record.size)
        sent = SentBytes(self._store.tells_md5)
        with self._store.writing(key, part_bytes) as stream:
            for part in self._parts(record, part_bytes):
                sent.add(part)
                stream.write(part)
            if sent.crc32 != record.crc32:
                raise CheckpointCorruptError(
                    f"{self._role_dir / record.path}: has another CRC than the manifest says: damaged; the step is not "
                    "uploaded"
                )
        self._check_arrived(key, record, sent)

    def _parts(self, record: FileRecord, part_bytes: int) -> Iterator[memoryview]:
        with open_file(self._role_dir, record) as descriptor:
            buffer = memoryview(bytearray(min(part_bytes, record.size)))
            start = 0
            while start < record.size:
                if self._stop.is_set():
                    raise RemoteError(f"{self._store.url_of(self.key)}: stopped")
                part = buffer[: min(part_bytes, record.size - start)]
                filled = 0
                while filled < len(part):
                    count = os.preadv(descriptor, [part[filled:]], start + filled)
                    if not count:
                        raise CheckpointCorruptError(f"{self._role_dir / record.path}: was cut while it was uploaded")
                    filled += count
                # What training reads should stay in the page cache, not what is read once.
                drop_from_cache(descriptor, start, filled)
                yield part
                start += filled

    def _check_arrived(self, key: str, record: FileRecord, sent: SentBytes) -> None:
        info = self._store.info(key)
        if info["size"] != record.size:
            raise OSError(f"{self._store.url_of(key)}: has {info['size']} bytes there, {record.size} were sent")
        if not sent.is_what_came(info) and self._crc_there(key, record.size) != record.crc32:
            raise OSError(f"{self._store.url_of(key)}: has another CRC there than the bytes that were sent")

    def _crc_there(self, key: str, size: int) -> int:
        """Read back: this store does not say what it has got. Once: what it cannot give back is to be sent again."""
        crc = 0
        for start in range(0, size, tuning.UPLOAD_PART_BYTES):
            if self._stop.is_set():
                raise RemoteError(f"{self._store.url_of(key)}: stopped")
            crc = crc32(self._store.read_once(key, start, min(start + tuning.UPLOAD_PART_BYTES, size)), crc)
        return crc

    def _check_all_there(self) -> None:
        """Somebody may have tidied up while this process was stopped: a manifest must not stand for what is gone."""
        there = self._store.sizes(self.key)
        lost = [file.path for file in self.manifest.files if there.get(file.path) != file.size]
        if lost:
            self._arrived -= set(lost)
            raise RemoteError(f"{self._store.url_of(self.key)}: {len(lost)} files are gone again: {lost[0]}, ...")

    def _finish(self) -> None:
        key = f"{self.key}/{file_names.MANIFEST_FILE}"
        self._store.replace(key, self._manifest_bytes)
        if self._store.read_all(key, limits.MANIFEST_BYTES) != self._manifest_bytes:
            raise OSError(f"{self._store.url_of(key)}: is not what was sent")

    def _persist(self, what: str, work: Callable[[], None]) -> None:
        # What was just written and is not there has failed, too; a missing bucket says the same.
        self._store.persist(what, work, self._stop, answers=())


def key_of(manifest: Manifest) -> str:
    """The folder of a checkpoint below the remote root."""
    return file_names.remote_dir(manifest.step, manifest.role, manifest.attempt)


def part_size(size: int) -> int:
    """The bytes of each part but the last of a file of `size` bytes.

    Example:
        >>> part_size(1000) == tuning.UPLOAD_PART_BYTES
        True
    """
    least = -(-size // tuning.UPLOAD_PARTS_MOST)
    return max(tuning.UPLOAD_PART_BYTES, -(-least // tuning.UPLOAD_PART_MULTIPLE) * tuning.UPLOAD_PART_MULTIPLE)


class SentBytes:
    """Checksums of a file that goes in parts, and what a store should say of it.

    Args:
        with_md5: the store will tell the MD5 of all of it; computing that costs as much as sending.
    """

    def __init__(self, with_md5: bool) -> None:
        self._parts: list[bytes] = []
        self._whole = hashlib.md5(usedforsecurity=False) if with_md5 else None
        self.crc32 = 0

    def add(self, part: memoryview | bytes) -> None:
        self.crc32 = crc32(part, self.crc32)
        self._parts.append(hashlib.md5(part, usedforsecurity=False).digest())
        if self._whole is not None:
            self._whole.update(part)

    def is_what_came(self, info: Mapping[str, Any]) -> bool:
        """Whether a store's word for a file (an ETag, an MD5) is that of these bytes. False if it says nothing."""
        if self._whole is not None:
            return info.get("md5Hash") == base64.b64encode(self._whole.digest()).decode()
        match = _ETAG.fullmatch(str(info.get("ETag")))
        return match is not None and match[1] in (self._etag_of_one(), self._etag_of_parts())

    def _etag_of_one(self) -> str:
        return self._parts[0].hex() if len(self._parts) == 1 else ""

    def _etag_of_parts(self) -> str:
        return f"{hashlib.md5(b''.join(self._parts), usedforsecurity=False).hexdigest()}-{len(self._parts)}"


def tidy_up(
    remote: RemoteSteps,
    uploaded: Manifest,
    pending: Collection[str],
    policy: PreservationPolicy,
    pinned: Mapping[int, bool],
    latest: int,
) -> None:
    """Behind an upload: the tracker is moved, and what counts no more is deleted.

    Args:
        remote: where.
        uploaded: what was. Other attempts of its role are tidied up: no other process may be uploading them.
        pending: folders of attempts that this process will go on with.
        policy: what is to stay.
        pinned: of the steps that are here, whether they stay. What the store has been told of others goes on.
        latest: the step saved last, which stays: after a rollback it is not the newest.

    Raises:
        RemoteError: the store has failed.
    """
    for step in (steps := remote.steps()):
        for key in superseded(step, uploaded):
            if key not in pending:
                remote.delete(key)
    complete = [step.step for step in steps if step.is_complete]
    if complete and remote.read_tracker() != complete[-1]:
        text = str(complete[-1]).encode()
        remote.store.persist("moving the tracker", lambda: remote.store.replace(file_names.TRACKER_FILE, text))
    for step in steps:
        if pinned.get(step.step, step.pinned) != step.pinned:
            _pin(remote, step.step, pinned[step.step])
    judged = [replace(step, pinned=pinned.get(step.step, step.pinned)) for step in steps]
    for step in too_old(judged, policy, latest):
        remote.delete(file_names.step_name(step.step))


def _pin(remote: RemoteSteps, step: int, stays: bool) -> None:
    """Keeps in the store what was said here: the local step may be lost, with its disk."""
    key = f"{file_names.step_name(step)}/{file_names.PINNED_FILE}"
    if stays:
        # Not empty: some stores and their tools take an object of no bytes for a folder.
        remote.store.persist("pinning", lambda: remote.store.replace(key, b"pinned\n"))
    else:
        remote.delete(key)


def superseded(step: RemoteStep, uploaded: Manifest) -> list[str]:
    """Folders of the uploaded checkpoint's role that are not, or no longer, what to load."""
    role = uploaded.role
    attempts = {*step.remains.get(role, ()), *([step.found[role].attempt] if role in step.found else [])}
    # Of its own step it is the one that counts, whatever a clock that was put back has said of when it was saved.
    stays = uploaded.attempt if step.step == uploaded.step else step.found[role].attempt if role in step.found else None
    return [file_names.remote_dir(step.step, role, attempt) for attempt in sorted(attempts - {stays})]
