"""Reads a checkpoint from a remote store. Fetches only the blocks that hold wanted elements.

Wanted rows become runs of whole CRC blocks. Runs that are close together share a request of at most 8 MiB, and 16
requests are under way at a time. Each block is checked before its rows are copied. These reads write nothing to a disk.
Weights in `huggingface/` are not read from a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.damage import Damage
from mcore_ckpt.checkpoint.element_sizes import item_bytes
from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.index_entries import IndexEntries
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.plain_files import parse_plain
from mcore_ckpt.checkpoint.reading import check_crc, check_size, parse_entries, read_remote_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.formats.contract import ReadTarget
from mcore_ckpt.io import _native, limits, tuning
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import write_file
from mcore_ckpt.io.threads import for_each
from mcore_ckpt.sharding.overlap import Rows, rows_from
from mcore_ckpt.sharding.plan import ReadRange, StoredShard


class ReadableStore(Protocol):
    """A remote store (`io.store.Store`) or another node (`fast.peer_store.PeerStore`), whose files are read by key."""

    def url_of(self, key: str) -> str: ...
    def read(self, key: str, start: int, stop: int) -> bytes | bytearray: ...
    def read_into(self, key: str, start: int, memory: memoryview) -> None: ...
    def read_all(self, key: str, most: int) -> bytes: ...
    def sizes(self, key: str) -> dict[str, int]: ...


@dataclass(frozen=True, eq=False)
class RemoteFolder:
    """A checkpoint's folder in a remote store or on another node; implements `formats.native.folder.Folder`.

    Attributes:
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
            size = self._sizes.get(record.path)
            if size is None:
                raise CheckpointCorruptError(
                    f"{self._url(record.path)}: is missing; according to the manifest, rank {record.rank} wrote "
                    f"{record.size} bytes"
                )
            if size != record.size:
                raise CheckpointCorruptError(
                    f"{self._url(record.path)}: has {size} bytes, but the manifest says {record.size}: the file was "
                    "cut or replaced"
                )

    def index(self, record: FileRecord) -> IndexEntries:
        assert record.index is not None
        check_size(self._url(record.path), "an index", record.index.size, limits.INDEX_BYTES)
        self.check([record])
        data = self._read(record.path, record.index.offset, record.index.offset + record.index.size)
        return parse_entries(bytes(data), record, self._url(record.path))

    def plain(self, record: FileRecord) -> dict[str, Any]:
        check_size(self._url(record.path), "a small file", record.size, limits.PLAIN_BYTES)
        self.check([record])
        return parse_plain(bytes(self._read(record.path, 0, record.size)), record, self._url(record.path))

    def fill(self, files: Mapping[str, FileRecord], reads: Sequence[ReadTarget], check: bool = True) -> int:
        """Does the same as `ranges.read_ranges`, but returns the number of bytes fetched."""
        self.check([files[path] for path in {read.stored.file for read, _ in reads}])
        fetches = list(plan_fetches(reads))
        buffers = _Buffers(max((fetch.stop - fetch.start for fetch in fetches), default=0))
        threads = min(tuning.REMOTE_THREADS, len(fetches))
        for_each(fetches, partial(self._fetch, buffers=buffers, check=check), threads)
        return sum(fetch.stop - fetch.start for fetch in fetches)

    def fetch(self, record: FileRecord, target: Path) -> None:
        write_file(target, self._checked_pieces(record))

    def verify(self, files: Sequence[FileRecord]) -> list[Damage]:
        return [damage for file in files if (damage := self._damage(file)) is not None]

    def _damage(self, file: FileRecord) -> Damage | None:
        try:
            for _ in self._checked_pieces(file):
                pass
        except CheckpointCorruptError as error:
            return Damage(str(error), file.path, file.rank)
        return None

    def _checked_pieces(self, file: FileRecord) -> Iterator[memoryview]:
        """Yields the bytes of a file in pieces.

        Raises CheckpointCorruptError: the file is missing or truncated, or its CRC is wrong. The CRC is compared after
        the last piece.
        """
        crc = 0
        self.check([file])
        for start in range(0, file.size, tuning.REMOTE_READ_BYTES):
            piece = memoryview(self._read(file.path, start, min(start + tuning.REMOTE_READ_BYTES, file.size)))
            crc = crc32(piece, crc)
            yield piece
        check_crc(crc, file, self._url(file.path))

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
                _copy_wanted(part, blocks)

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
        # List the folder once. If each of a thousand ranks sent a request for each of a thousand files, the requests
        # would take long.
        return self.store.sizes(self.key)


class _Buffers:
    """A pool of buffers for fetches.

    For each fetch, a thread takes an idle buffer, or a new one, and gives it back afterwards. Allocating fresh memory
    for each fetch would take longer than computing the CRCs of the fetched bytes.
    """

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
    """A run of whole blocks: the bytes `[start, stop)` of a stored tensor.

    `read` needs elements of this run, and `memory` is where the elements go.
    """

    read: ReadRange
    memory: torch.Tensor
    start: int
    stop: int

    @property
    def file(self) -> str:
        return self.read.stored.file

    @property
    def in_file(self) -> tuple[int, int]:
        """The run's first byte in the file, and the byte after the run's last byte."""
        return self.read.stored.offset + self.start, self.read.stored.offset + self.stop


@dataclass(frozen=True, eq=False)
class Fetch:
    """One request to the store: bytes `[start, stop)` of a file, and the runs of blocks in this range."""

    file: str
    start: int
    stop: int
    parts: tuple[BlockRun, ...]


def plan_fetches(reads: Iterable[ReadTarget]) -> Iterator[Fetch]:
    """Plans the requests that fetch all wanted blocks. Blocks that are near each other share a request.

    A block that two reads need is fetched once, except at the border of two requests.
    """
    parts = [part for read, memory in reads for part in _parts(read, memory)]
    parts.sort(key=lambda part: (part.file, part.in_file[0]))
    group: list[BlockRun] = []
    stop = 0  # the end of the group in the file
    for part in parts:
        first, end = part.in_file
        if group:
            start, is_close = group[0].in_file[0], first - stop <= tuning.REMOTE_GAP_BYTES
            is_short = max(stop, end) - start <= tuning.REMOTE_READ_BYTES
            if part.file != group[0].file or not is_close or not is_short:
                yield Fetch(group[0].file, start, stop, tuple(group))
                group, stop = [], 0
        group.append(part)
        stop = max(stop, end)
    if group:
        yield Fetch(group[0].file, group[0].in_file[0], stop, tuple(group))


def _parts(read: ReadRange, memory: torch.Tensor) -> Iterator[BlockRun]:
    """Yields the runs of blocks that have bytes of a wanted row. A run has at most REMOTE_READ_BYTES."""
    most = max(1, tuning.REMOTE_READ_BYTES // BLOCK_BYTES)
    for first, last in _block_runs(read):
        for block in range(first, last + 1, most):
            stop = min((min(block + most - 1, last) + 1) * BLOCK_BYTES, read.stored.nbytes)
            yield BlockRun(read, memory, block * BLOCK_BYTES, stop)


def _block_runs(read: ReadRange) -> list[tuple[int, int]]:
    """Returns the runs of blocks that have bytes of a wanted row: the numbers of each run's first and last block."""
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
        # Do not visit the rows that end in these blocks, because there can be millions of these rows.
        ends_by = (runs[-1][1] + 1) * BLOCK_BYTES - rows.start - rows.row
        number = max(number, ends_by // rows.source_stride if rows.source_stride else 0) + 1
    return runs


def _copy_wanted(part: BlockRun, blocks: torch.Tensor) -> None:
    """Copies the wanted elements of a run to their memory.

    `blocks` is a uint8 tensor in host memory with the run's bytes.
    """
    # Copy bytes and not elements, because elements are not always aligned in the fetched bytes.
    target = part.memory.view(-1).view(torch.uint8)
    for rows in rows_from(_in_bytes(part.read), part.start, part.stop):
        shape = (rows.rows, rows.row)
        destination = target.storage_offset() + rows.destination
        source = blocks.storage_offset() + rows.start - part.start
        there = target.as_strided(shape, (rows.destination_stride or rows.row, 1), destination)
        there.copy_(blocks.as_strided(shape, (rows.source_stride or rows.row, 1), source))


def _in_bytes(read: ReadRange) -> Rows:
    item = item_bytes(read.stored.dtype)
    return Rows(*(each * item for each in read.rows))._replace(rows=read.rows.rows)
