"""Writes one rank's ranges of indexed files, and completes the files that the rank owns."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from mcore_ckpt.checkpoint.manifest import IndexPlace, WrittenFile
from mcore_ckpt.errors import CommitError
from mcore_ckpt.formats.native.file_plan import FilePlan, FileWrite, slot_across
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.device_waits import saying_what_hangs
from mcore_ckpt.io.disk_watch import in_job
from mcore_ckpt.io.files import make_folders, overwrite
from mcore_ckpt.ranks.rounds import Record


class Exchange(Protocol):
    """Sends the CRCs from a file's writers to the file's owner. `ranks.rounds.Agreement` implements this protocol."""

    rank: int

    def give(self, key: str, record: Record) -> None: ...
    def take(self, key: str, rank: int) -> Record: ...


class Mended(NamedTuple):
    """A tensor that begins in the range of rank `other`, but is stored with the bytes of rank `stored`."""

    tensor: str
    other: int
    stored: int


class FileWriter:
    """Writes one rank's ranges of indexed files durably, on native threads.

    Args:
        role_dir: the folder that the files' paths are relative to.
        writes: the ranges. Their memory must not change until `finish` has returned. Memory in `sources` may change
            earlier, when `wait_for_sources` has returned.
        exchange: connects this rank with the other writers of shared files.
        device_timeout_s: how many seconds to wait for a GPU that makes no progress.

    Attributes:
        mended: the differences between replicas that `finish` has found in the files that this rank owns.

    Example:
        >>> with FileWriter(role_dir, writes, agreement) as writer:  # doctest: +SKIP
        ...     writer.start()
        ...     written = writer.finish()
    """

    def __init__(
        self, role_dir: Path, writes: Sequence[FileWrite], exchange: Exchange, device_timeout_s: float = float("inf")
    ) -> None:
        self._role_dir = role_dir
        self._writes = writes
        self._exchange = exchange
        self._heads: dict[int, bytes] = {}
        self.mended: list[Mended] = []
        self._job = _native.WriteJob(
            threads=tuning.IO_THREADS, piece_bytes=tuning.WRITE_BYTES, device_timeout=device_timeout_s
        )

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops all writing. When this method has returned, no thread writes any more."""
        with in_job(self._job):
            self._job.close()
        self._writes = ()  # the ranges would keep host memory alive

    def start(self) -> None:
        """Starts to write. Raises OSError if a folder cannot be made."""
        for write in self._writes:
            plan = write.plan
            make_folders(self._role_dir, plan.path)
            path = str(self._role_dir / plan.path)
            self._job.add_file(
                path,
                plan.layout,
                plan.start,
                plan.stop,
                sources=write.sources,
                owner=write.owner,
                device=write.device,
                on_device=write.on_device,
                buffer=write.buffer,
                offset=write.offset,
                ready=write.ready,
            )
        self._job.start()

    def wait_for_sources(self) -> None:
        """Waits until all ranges with `sources` are written. From then on these sources may change.

        Raises the errors of `finish`.
        """
        for number, write in enumerate(self._writes):
            if write.sources is not None:
                self._wait(number)

    def finish(self) -> list[WrittenFile]:
        """Waits until the bytes are on the disk, and returns the files that this rank owns.

        Raises:
            OSError: the disk is full, a folder is gone, ...; the message names the file.
            CommitError: another writer of a shared file has failed, the GPU hangs, or the writing was cancelled.
        """
        written, shared = [], []
        for number, write in enumerate(self._writes):
            crcs = self._wait(number)
            share = write.plan.share
            if share.owner != self._exchange.rank:
                self._finish(number, None)
                head = base64.b64encode(self._heads[number]).decode()
                part = {"structure": write.plan.structure, "crc32": crcs, "head": head}
                self._exchange.give(write.plan.path, part)
            elif len(share.writers) > 1:
                shared.append((number, write.plan, _Part(crcs, self._heads[number])))
            else:
                written.append(self._complete(number, write.plan, [_Part(crcs, b"")]))
        # Take CRCs only after this rank has given its own CRCs for all files. Otherwise two ranks would wait for each
        # other forever if each owns a file in which the other rank has a range.
        for number, plan, own in shared:
            written.append(self._complete(number, plan, [*self._parts_of_others(plan), own]))
        return written

    def limit_device_wait(self, seconds: float) -> None:
        """Sets how many seconds, from this call on, the writing waits for a GPU that makes no progress."""
        self._job.limit_device_wait(seconds)

    def progress(self) -> int:
        """Returns the number of bytes of tensors that have been written so far."""
        return self._job.progress()

    def times(self) -> tuple[float, float]:
        """Returns, in seconds after `start`, when the training state was copied, and when the last write ended."""
        return self._job.times()

    def _wait(self, number: int) -> list[int]:
        try:
            with saying_what_hangs(), in_job(self._job):
                crcs = self._job.wait(number)
        except RuntimeError as error:
            raise CommitError(f"{self._role_dir}: writing was stopped: {error}") from None
        assert crcs is not None, "wait returns None only after a timeout"
        # Copy the head during the first wait, because the sources may change as soon as `wait_for_sources` has
        # returned.
        if number not in self._heads:
            self._heads[number] = self._writes[number].head()
        return crcs

    def _finish(self, number: int, tail: bytes | None, patches: Sequence[tuple[int, int]] = ()) -> None:
        with in_job(self._job):
            self._job.finish(number, tail, patches)

    def _parts_of_others(self, plan: FilePlan) -> list[_Part]:
        parts = []
        for rank in plan.share.writers[:-1]:
            record = self._exchange.take(plan.path, rank)
            if record["structure"] != plan.structure:
                raise CommitError(
                    f"{self._role_dir / plan.path}: rank {rank} has other tensors than rank {self._exchange.rank}, "
                    "but replicas must have the same tensors: set shared_writes=False"
                )
            parts.append(_Part(record["crc32"], base64.b64decode(record["head"])))
        return parts

    def _complete(self, number: int, plan: FilePlan, parts: list[_Part]) -> WrittenFile:
        heads = self._different_heads(plan, parts)
        blocks = plan.layout.join(list(plan.share.cuts), [part.crcs for part in parts])
        slots = plan.layout.slot_crcs(blocks)
        index = plan.index.encode(blocks)
        index_crc = crc32(index)
        tail = plan.pt.tail(slots, index, index_crc)
        patches = [(offset, slots[slot]) for offset, slot in plan.layout.foreign_descriptors(list(plan.share.cuts))]
        self._finish(number, tail, patches)
        if heads:
            overwrite(self._role_dir / plan.path, heads)
        return WrittenFile(
            plan.path,
            plan.request.kind,
            size=plan.pt.records_end + len(tail),
            crc32=crc32(tail, plan.layout.file_crc(slots)),
            index=IndexPlace(plan.pt.index_offset, len(index), index_crc, plan.index.version),
            holds=plan.holds,
        )

    def _different_heads(self, plan: FilePlan, parts: list[_Part]) -> dict[int, bytes]:
        """Compares each range's head with the bytes that the previous range's writer has written in the head's place.

        Returns the heads that differ, by their offset in the file, and puts their CRCs into `parts`. The caller writes
        these heads into the file; otherwise the first bytes of a tensor would come from one replica and the remaining
        bytes from another.
        """
        different: dict[int, bytes] = {}
        for number, cut in enumerate(plan.share.cuts[1:-1]):
            crcs, head = parts[number].crcs, parts[number + 1].head
            crc = crc32(head)
            if not head or crc == crcs[-1]:
                continue
            crcs[-1] = crc
            different[cut - len(head)] = head
            slot = slot_across(plan.pt.slots, cut)
            assert slot is not None
            self.mended.append(Mended(plan.request.tensors[slot].key.name, *plan.share.writers[number : number + 2]))
        return different


class _Part(NamedTuple):
    """The facts that a file's owner needs about a writer's range: the CRCs of the range's blocks, and its `head`."""

    crcs: list[int]
    head: bytes
