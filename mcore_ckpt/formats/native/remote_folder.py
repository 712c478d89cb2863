"""Reads a checkpoint from a remote store. From a tensor it fetches only the blocks that hold wanted elements.

Wanted rows become runs of whole CRC blocks. Runs that are close together share a request of at most 8 MiB, and 16
requests run at a time. Each block is checked before its rows are copied. Nothing is written to a disk. Weights in
`huggingface/` are not read from a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.damage import Damage
from mcore_ckpt.checkpoint.element_sizes import item_bytes
from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.index_entries import IndexEntries
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.plain_files import parse_plain
from mcore_ckpt.checkpoint.reading import check_size, parse_entries, read_remote_manifest, wrong_crc
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io import _native, limits, tuning
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.threads import for_each
from mcore_ckpt.sharding.overlap import Rows, rows_from
from mcore_ckpt.sharding.plan import ReadRange, StoredShard


class ReadableStore(Protocol):
    """Where files are read by key: a remote store (`io.store.Store`), or another node (`fast.peer_store.PeerStore`)."""

    def url_of(self, key: str) -> str: ...
    def read(self, key: str, start: int, stop: int) -> bytes | bytearray: ...
    def read_into(self, key: str, start: int, memory: memoryview) -> None: ...
    def read_all(self, key: str, most: int) -> bytes: ...
    def sizes(self, key: str) -> dict[str, int]: ...


@dataclass(frozen=True, eq=False)
class RemoteFolder:
    """A checkpoint's folder in a remote store or on another node; implements `formats.native.folder.Folder`.

    Attributes:
        store: the store.
        key: the folder's key in the store.
    """

    store: ReadableStore
    key: str

    def __str__(self) -> str:
        return self.place

    @property
    def place(self) -> str:
        return self.store.url_of(self.key)

    def manifest(self) -> Manifest:
        try:
            return read_remote_manifest(self.store, self.key)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"{self}/{file_names.MANIFEST_FILE}: is missing: the upload did not finish; load another step"
            ) from None

    def check(self, records: Sequence[FileRecord]) -> None:
        for record in records:
            self._check(record)

    def _check(self, record: FileRecord) -> None:
        size = self._sizes.get(record.path)
        if size is None:
            raise CheckpointCorruptError(
                f"{self}/{record.path}: is missing; according to the manifest, rank {record.rank} wrote {record.size} "
                "bytes"
            )
        if size != record.size:
            raise CheckpointCorruptError(
                f"{self}/{record.path}: has {size} bytes, not the {record.size} of the manifest: cut or replaced"
            )

    def index(self, record: FileRecord) -> IndexEntries:
        assert record.index is not None
        check_size(self._url(record.path), "an index", record.index.size, limits.INDEX_BYTES)
        self._check(record)
        start = record.index.offset
        return parse_entries(
            bytes(self._read(record.path, start, start + record.index.size)), record, self._url(record.path)
        )

    def plain(self, record: FileRecord) -> dict[str, Any]:
        check_size(self._url(record.path), "a small file", record.size, limits.PLAIN_BYTES)
        self._check(record)
        return parse_plain(bytes(self._read(record.path, 0, record.size)), record, self._url(record.path))

    def fill(
        self, files: Mapping[str, FileRecord], reads: Sequence[tuple[ReadRange, torch.Tensor]], check: bool = True
    ) -> int:
        """Does the same as `ranges.read_ranges`, but returns the number of bytes fetched."""
        for path in {read.stored.file for read, _ in reads}:
            self._check(files[path])
        fetches = list(plan_fetches(reads))
        buffers = _Buffers(max((fetch.stop - fetch.start for fetch in fetches), default=0))
        threads = min(tuning.REMOTE_THREADS, len(fetches))
        for_each(fetches, partial(self._fetch, buffers=buffers, check=check), threads)
        return sum(fetch.stop - fetch.start for fetch in fetches)

    def verify(self, files: Sequence[FileRecord]) -> list[Damage]:
        return [damage for file in files if (damage := self._damage(file)) is not None]

    def _damage(self, file: FileRecord) -> Damage | None:
        crc = 0
        try:
            self._check(file)
            for start in range(0, file.size, tuning.REMOTE_READ_BYTES):
                data = self._read(file.path, start, min(start + tuning.REMOTE_READ_BYTES, file.size))
                crc = crc32(memoryview(data), crc)
        except CheckpointCorruptError as error:
            return Damage(str(error), file.path, file.rank)
        if crc == file.crc32:
            return None
        return Damage(wrong_crc(self._url(file.path)), file.path, file.rank)

    def _fetch(self, fetch: Fetch, buffers: _Buffers, check: bool) -> None:
        with buffers.one() as buffer:
            data = memoryview(buffer)[: fetch.stop - fetch.start]
            with self._naming(fetch.file):
                self.store.read_into(f"{self.key}/{fetch.file}", fetch.start, data)
            self._deliver(fetch, torch.frombuffer(data, dtype=torch.uint8), check)

    def _deliver(self, fetch: Fetch, memory: torch.Tensor, check: bool) -> None:
        for part in fetch.parts:
            stored = part.read.stored
            first = stored.offset + part.start - fetch.start
            blocks = memory[first : first + part.stop - part.start]
            if check:
                self._check_blocks(stored, part, blocks)
            with torch.no_grad():
                copy_from_blocks(part, blocks)

    def _check_blocks(self, stored: StoredShard, part: BlockRun, blocks: torch.Tensor) -> None:
        if stored.crc32 is None:
            return
        block = part.start // BLOCK_BYTES
        found = _native.crc32_blocks(blocks.data_ptr(), blocks.nbytes, BLOCK_BYTES)
        for number, crc in enumerate(found, block):
            if crc != stored.crc32[number]:
                start = stored.offset + number * BLOCK_BYTES
                stop = min(start + BLOCK_BYTES, stored.offset + stored.nbytes)
                raise CheckpointCorruptError(
                    f"{self._url(stored.file)}: tensor {stored.key}: bytes [{start}, {stop}) have a wrong CRC: "
                    "they are damaged"
                )

    def _read(self, path: str, start: int, stop: int) -> bytes | bytearray:
        with self._naming(path):
            return self.store.read(f"{self.key}/{path}", start, stop)

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{self._url(path)}: is missing: was it deleted meanwhile?") from None

    def _url(self, path: str) -> str:
        return f"{self}/{path}"

    @cached_property
    def _sizes(self) -> dict[str, int]:
        # List the folder once, because a thousand ranks with one request for each of a thousand files would take long.
        return self.store.sizes(self.key)


class _Buffers:
    """Memory for fetches, which threads use in turn. Fresh memory for each fetch would cost more than its CRCs."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._idle: list[bytearray] = []

    @contextmanager
    def one(self) -> Iterator[bytearray]:
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = bytearray(self._nbytes)
        try:
            yield buffer
        finally:
            self._idle.append(buffer)


@dataclass(frozen=True, eq=False)
class BlockRun:
    """A run of whole blocks, bytes `[start, stop)` of a stored tensor, and the read that needs elements of this run."""

    read: ReadRange
    memory: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Fetch:
    """One request to the store: bytes `[start, stop)` of a file, and the runs of blocks in this range."""

    file: str
    start: int
    stop: int
    parts: tuple[BlockRun, ...]


def plan_fetches(reads: Iterable[tuple[ReadRange, torch.Tensor]]) -> Iterator[Fetch]:
    """Plans the requests that fetch all wanted blocks. Blocks that are near each other share a request.

    A block that two reads need is fetched twice only if it is at the border of two requests.
    """
    parts = [part for read, memory in reads for part in _parts(read, memory)]
    parts.sort(key=lambda part: (part.read.stored.file, part.read.stored.offset + part.start))
    group: list[BlockRun] = []
    for part in parts:
        if group and not _is_near(group, part):
            yield _fetch_of(group)
            group = []
        group.append(part)
    if group:
        yield _fetch_of(group)


def _is_near(group: Sequence[BlockRun], part: BlockRun) -> bool:
    first, stop = group[0].read.stored, max(other.read.stored.offset + other.stop for other in group)
    start = part.read.stored.offset + part.start
    whole = max(stop, part.read.stored.offset + part.stop) - (first.offset + group[0].start)
    return (
        part.read.stored.file == first.file
        and start - stop <= tuning.REMOTE_GAP_BYTES
        and whole <= tuning.REMOTE_READ_BYTES
    )


def _fetch_of(group: Sequence[BlockRun]) -> Fetch:
    stored = group[0].read.stored
    stop = max(part.read.stored.offset + part.stop for part in group)
    return Fetch(stored.file, stored.offset + group[0].start, stop, tuple(group))


def _parts(read: ReadRange, memory: torch.Tensor) -> Iterator[BlockRun]:
    """Yields the runs of blocks that have bytes of a wanted row. No run is longer than REMOTE_READ_BYTES."""
    most = max(1, tuning.REMOTE_READ_BYTES // BLOCK_BYTES)
    for first, last in _block_runs(read):
        for block in range(first, last + 1, most):
            stop = min((min(block + most - 1, last) + 1) * BLOCK_BYTES, read.stored.nbytes)
            yield BlockRun(read, memory, block * BLOCK_BYTES, stop)


def _block_runs(read: ReadRange) -> list[tuple[int, int]]:
    """Returns the numbers of the blocks that have bytes of a wanted row, as inclusive runs."""
    rows = _in_bytes(read)
    runs: list[tuple[int, int]] = []
    number = 0
    while rows.row and number < rows.rows:
        start = rows.start + number * rows.source_stride
        first, last = start // BLOCK_BYTES, (start + rows.row - 1) // BLOCK_BYTES
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
        # Skip the rows that end in these blocks, because there can be millions of them.
        ends_by = (runs[-1][1] + 1) * BLOCK_BYTES - rows.start - rows.row
        number = max(number, ends_by // rows.source_stride if rows.source_stride else 0) + 1
    return runs


def copy_from_blocks(part: BlockRun, blocks: torch.Tensor) -> None:
    """Copies the wanted elements that lie in a run of blocks to their target memory.

    Args:
        part: the run's place in the stored tensor, and the read that needs elements of the run.
        blocks: the bytes of the run, uint8, in host memory.
    """
    # Copy bytes and not elements, because elements are not always aligned in the fetched bytes.
    target = part.memory.view(-1).view(torch.uint8)
    for rows in rows_from(_in_bytes(part.read), part.start, part.stop):
        _copy_rows(target, blocks, rows, part.start)


def _in_bytes(read: ReadRange) -> Rows:
    rows, item = read.rows, item_bytes(read.stored.dtype)
    return Rows(
        rows.start * item,
        rows.destination * item,
        rows.row * item,
        rows.rows,
        rows.source_stride * item,
        rows.destination_stride * item,
    )


def _copy_rows(target: torch.Tensor, source: torch.Tensor, rows: Rows, first: int) -> None:
    shape = (rows.rows, rows.row)
    offset = target.storage_offset()
    there = target.as_strided(shape, (rows.destination_stride or rows.row, 1), offset + rows.destination)
    here = source.as_strided(shape, (rows.source_stride or rows.row, 1), source.storage_offset() + rows.start - first)
    there.copy_(here)
