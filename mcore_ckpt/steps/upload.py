"""Uploads one committed checkpoint to a remote store: its files first, its manifest last.

While a file is sent, its CRC is compared with the manifest. If the two differ, the file is withdrawn before it is
complete. After a file has arrived, its size in the store is compared with the manifest. If the store reports an ETag or
an MD5 of the file, this value is compared with the checksum of the sent bytes. If the ETag is not an MD5 (encryption,
other stores), the file is read back.

Local bytes are read once, in parts of 16 MiB. Four files are sent at a time, and memory holds a few parts of each file.
Before the manifest is sent, one listing must show all files, because the store may have been tidied up while this
process was suspended.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.reading import open_file, parse_manifest
from mcore_ckpt.errors import CheckpointCorruptError, RemoteError
from mcore_ckpt.io import limits, tuning
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.disk_space import NOTHING, Need
from mcore_ckpt.io.files import drop_from_cache
from mcore_ckpt.io.store import Store
from mcore_ckpt.io.threads import for_each
from mcore_ckpt.steps.choice import newest
from mcore_ckpt.steps.remote_steps import RemoteStep, RemoteSteps
from mcore_ckpt.steps.worth import lack_of

logger = logging.getLogger(__name__)

# The ETag of an S3 object is the MD5 of its bytes. If the object was sent in parts, the ETag is the MD5 of the parts'
# MD5s, followed by the number of parts. The ETag of an encrypted object is something else, so a different ETag does not
# show that the bytes differ.
_ETAG = re.compile(r'"?([0-9a-f]{32}(?:-[0-9]+)?)"?')


class Upload:
    """The upload of one role's checkpoint at one step. A second call of `run` sends only files that have not arrived.

    The role's folder must not be deleted meanwhile. Once `stop` is set, the upload soon ends with an error. `key` is
    the folder of this attempt in the store. Raises CheckpointCorruptError or OSError if the manifest cannot be read.
    """

    def __init__(self, store: Store, role_dir: Path, stop: threading.Event) -> None:
        self._store = store
        self._role_dir = role_dir
        self._stop = stop
        path = role_dir / file_names.MANIFEST_FILE
        self._manifest_bytes = path.read_bytes()
        self.manifest = parse_manifest(self._manifest_bytes, path)
        self.key = file_names.remote_dir(self.manifest.step, self.manifest.role, self.manifest.attempt)
        self._arrived: set[str] = set()

    def run(self) -> None:
        """Uploads the checkpoint. Returns when the whole checkpoint is in the store.

        First checks that all files are here, and sends nothing if a file is missing. Raises CheckpointCorruptError if a
        file is missing or differs from the manifest, and RemoteError if the store failed, has too little space, or
        `stop` was set.
        """
        lack = lack_of(self._role_dir)
        if lack is not None:
            raise CheckpointCorruptError(str(lack))
        self._check_space()
        # The largest files go first, so that the threads do not end up waiting for one large file.
        missing = [file for file in self.manifest.files if file.path not in self._arrived]
        for_each(sorted(missing, key=lambda file: -file.size), self._send, tuning.UPLOAD_FILES)
        self._check_all_there()
        self._persist(f"writing the manifest of {self.key}", self._finish)

    def _check_space(self) -> None:
        """Checks, before the first byte is sent, that the files that have not arrived fit into the store."""
        files = [(file.path, file.size) for file in self.manifest.files if file.path not in self._arrived]
        need = Need.of([*files, (file_names.MANIFEST_FILE, len(self._manifest_bytes))])
        shortage = shortage_of(self._store, need)
        if shortage is None:
            return
        # An earlier try may have sent files or parts of files. This try overwrites these bytes, so their space counts
        # as free.
        there = self._store.sizes(self.key)
        sent = [(path, there[path]) for path, _ in files if path in there]
        shortage = shortage_of(self._store, need, Need.of(sent))
        if shortage is not None:
            raise RemoteError(
                f"{self._store.url_of(self.key)}: the checkpoint does not fit into the remote store: {shortage}. "
                "Nothing has been sent, and the local checkpoint is intact. Delete files there: the upload is "
                "tried again after the next commit"
            )

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
                    f"{self._role_dir / record.path}: is damaged, because it has another CRC than the manifest gives; "
                    "the step is not uploaded"
                )
        self._check_arrived(key, record, sent)

    def _parts(self, record: FileRecord, part_bytes: int) -> Iterator[memoryview]:
        with open_file(self._role_dir, record) as descriptor:
            buffer = memoryview(bytearray(min(part_bytes, record.size)))
            start = 0
            while start < record.size:
                if self._stop.is_set():
                    raise RemoteError(f"{self._store.url_of(self.key)}: the upload was stopped")
                part = buffer[: min(part_bytes, record.size - start)]
                filled = 0
                while filled < len(part):
                    count = os.preadv(descriptor, [part[filled:]], start + filled)
                    if not count:
                        raise CheckpointCorruptError(
                            f"{self._role_dir / record.path}: became shorter while it was uploaded"
                        )
                    filled += count
                # These bytes are not read again, so leave the page cache to the files that the training reads.
                drop_from_cache(descriptor, start, filled)
                yield part
                start += filled

    def _check_arrived(self, key: str, record: FileRecord, sent: SentBytes) -> None:
        info = self._store.info(key)
        if info["size"] != record.size:
            raise OSError(
                f"{self._store.url_of(key)}: has {info['size']} bytes in the store, but {record.size} were sent"
            )
        if not sent.is_what_came(info) and self._crc_there(key, record.size) != record.crc32:
            raise OSError(f"{self._store.url_of(key)}: has another CRC in the store than the bytes that were sent")

    def _crc_there(self, key: str, size: int) -> int:
        """Reads a file back from the store once and returns its CRC.

        Reading a file back is needed if no checksum of the store matches.
        """
        crc = 0
        for start in range(0, size, tuning.UPLOAD_PART_BYTES):
            if self._stop.is_set():
                raise RemoteError(f"{self._store.url_of(key)}: the upload was stopped")
            crc = crc32(self._store.read_once(key, start, min(start + tuning.UPLOAD_PART_BYTES, size)), crc)
        return crc

    def _check_all_there(self) -> None:
        """Checks that all files are still in the store, because a manifest must not list a missing file.

        Another process may have deleted some of them, for instance while this process was suspended.
        """
        there = self._store.sizes(self.key)
        lost = [file.path for file in self.manifest.files if there.get(file.path) != file.size]
        if lost:
            self._arrived -= set(lost)
            raise RemoteError(
                f"{self._store.url_of(self.key)}: {len(lost)} uploaded files are no longer there: {lost[0]}, ..."
            )

    def _finish(self) -> None:
        key = f"{self.key}/{file_names.MANIFEST_FILE}"
        self._store.replace(key, self._manifest_bytes)
        if self._store.read_all(key, limits.MANIFEST_BYTES) != self._manifest_bytes:
            raise OSError(f"{self._store.url_of(key)}: differs in the store from what was sent")

    def _persist(self, what: str, work: Callable[[], None]) -> None:
        # Retry after every error of the store, even after FileNotFoundError, because the file was just written.
        self._store.persist(what, work, self._stop, answers=())


def shortage_of(store: Store, need: Need, overwritten: Need = NOTHING) -> str | None:
    """Says what is short if files that replace `overwritten` do not fit into a store; None if they may fit."""
    try:
        space = store.space()
    except OSError:
        return None  # sending the files will raise the error
    if space is None or not space.is_certain:
        return None
    amount = space.taken_by(need) - space.taken_by(overwritten)
    limit = space.shortage(amount)
    return None if limit is None else limit.describe(amount)


def part_size(size: int) -> int:
    """Returns the size of the parts in which a file of `size` bytes is sent, in bytes. The last part may be shorter."""
    least = -(-size // tuning.UPLOAD_PARTS_MOST)
    return max(tuning.UPLOAD_PART_BYTES, -(-least // tuning.UPLOAD_PART_MULTIPLE) * tuning.UPLOAD_PART_MULTIPLE)


class SentBytes:
    """Computes the checksums of a file that is sent in parts, and compares them with what the store reports.

    `with_md5`: whether the store reports the MD5 of the whole file. Otherwise this MD5 is not computed, because the
    computation takes as much time as sending.
    """

    def __init__(self, with_md5: bool) -> None:
        self._parts: list[bytes] = []
        self._whole = hashlib.md5(usedforsecurity=False) if with_md5 else None
        self.crc32 = 0

    def add(self, part: memoryview | bytes) -> None:
        """Adds the next part of the file."""
        self.crc32 = crc32(part, self.crc32)
        self._parts.append(hashlib.md5(part, usedforsecurity=False).digest())
        if self._whole is not None:
            self._whole.update(part)

    def is_what_came(self, info: Mapping[str, Any]) -> bool:
        """True if the store's checksum (an ETag or an MD5) fits the sent bytes. False if the store has no checksum."""
        if self._whole is not None:
            return info.get("md5Hash") == base64.b64encode(self._whole.digest()).decode()
        one = self._parts[0].hex() if len(self._parts) == 1 else ""
        several = f"{hashlib.md5(b''.join(self._parts), usedforsecurity=False).hexdigest()}-{len(self._parts)}"
        match = _ETAG.fullmatch(str(info.get("ETag")))
        return match is not None and match[1] in (one, several)


def tidy_up(
    remote: RemoteSteps,
    uploaded: Manifest,
    pending: Collection[str],
    too_old: Callable[[Sequence[RemoteStep]], Sequence[RemoteStep]],
    pinned: Mapping[int, bool],
    metrics: Mapping[int, Mapping[str, float]],
    deleted: Callable[[int, float], object] = lambda step, seconds: None,
) -> None:
    """Moves the remote tracker after an upload, copies pins, and deletes steps and attempts that are no longer needed.

    Args:
        remote: the steps in the store. Its methods may raise RemoteError.
        uploaded: the manifest that was uploaded. Other attempts of its role are deleted (see `superseded`), so no other
            process may be uploading them.
        pending: folders of attempts that this process will continue to upload. These folders stay.
        too_old: returns the steps that need not stay.
        pinned: for each local step, whether it is pinned. Remote steps that are not local keep their pins.
        metrics: the metrics of each local step.
        deleted: called with the number of each deleted step, and the seconds that its deletion took.
    """
    steps = remote.steps()
    for position, step in enumerate(steps):
        gone = [key for key in superseded(step, uploaded) if key not in pending]
        for key in gone:
            remote.delete(key)
        # If manifests have no commit numbers, the attempt that was just uploaded may have replaced an attempt that
        # seemed newer, so the step is read again.
        if gone or step.step == uploaded.step:
            steps[position] = remote.step(step.step)
    last = newest(steps)
    if last is not None and remote.read_tracker() != last.step:
        text = str(last.step).encode()
        remote.store.persist("moving the tracker", lambda: remote.store.replace(file_names.TRACKER_FILE, text))
    for step in steps:
        if pinned.get(step.step, step.pinned) != step.pinned:
            _pin(remote, step.step, pinned[step.step])
    judged = [
        replace(step, pinned=pinned.get(step.step, step.pinned), local_metrics=metrics.get(step.step, {}))
        for step in steps
    ]
    for step in too_old(judged):
        if step.is_shared:
            continue
        started = time.monotonic()
        remote.delete(file_names.step_name(step.step))
        deleted(step.step, time.monotonic() - started)


def _pin(remote: RemoteSteps, step: int, stays: bool) -> None:
    """Pins or unpins a step in the store. A pin in the root is not enough, because the root's disk may be lost."""
    key = f"{file_names.step_name(step)}/{file_names.PINNED_FILE}"
    if stays:
        # The object is not empty, because some stores and their tools mistake an empty object for a folder.
        remote.store.persist("pinning", lambda: remote.store.replace(key, b"pinned\n"))
    else:
        remote.delete(key)


def superseded(step: RemoteStep, uploaded: Manifest) -> list[str]:
    """Returns the folders of attempts that `load` no longer uses, among the uploaded role's attempts in one step."""
    role = uploaded.role
    attempts = {*step.others.get(role, ()), *([step.found[role].attempt] if role in step.found else [])}
    # In its own step, the attempt that was just uploaded stays, even if its time is earlier than the time of another
    # attempt because a clock was set back.
    stays = uploaded.attempt if step.step == uploaded.step else step.found[role].attempt if role in step.found else None
    return [file_names.remote_dir(step.step, role, attempt) for attempt in sorted(attempts - {stays})]
