"""Files of a planned layout, written from a checkpoint a part at a time: one is read while another is written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mcore_ckpt import knobs
from mcore_ckpt.resharding.planning import PlannedFile
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import OPAQUE, ReadRange
from mcore_ckpt.sources import Sources, Wanted
from mcore_ckpt.staging.arena import Arena
from mcore_ckpt.storage.agreement import Record
from mcore_ckpt.storage.dtypes import torch_dtype
from mcore_ckpt.storage.file_plan import PAGE_BYTES, FilePlan, ImageCache, page_ceil, plan_file, share_out
from mcore_ckpt.storage.manifest import FileRecord
from mcore_ckpt.storage.reader import read_ranges
from mcore_ckpt.storage.requests import ImageWrite, TensorWrite, WrittenFile
from mcore_ckpt.storage.writer import ImageWriter

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Origin:
    """The checkpoint that is read.

    Attributes:
        role_dir: its folder.
        files: the manifest's records, by path.
        sources: finds what a rank of the new layout has.
    """

    role_dir: Path
    files: dict[str, FileRecord]
    sources: Callable[[int], Sources]


@dataclass(frozen=True, eq=False)
class FileNames:
    """A written file, the rank it counts as that of, and the tensors in it."""

    file: WrittenFile
    rank: int
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Part:
    """A range of a file, and whose turn it is: the writers of a shared file are all played here."""

    file: PlannedFile
    plan: FilePlan
    writer: int


@dataclass(frozen=True, eq=False)
class _Batch:
    """Parts that are in memory together; of several files, or one part of a large one."""

    parts: tuple[_Part, ...]
    addresses: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.plan.nbytes for part in self.parts)


class _AllWriters:
    """What the writers of one file tell its owner, where all of them are one process."""

    def __init__(self) -> None:
        self.rank = 0
        self._given: dict[tuple[str, int], Record] = {}

    def give(self, key: str, record: Record) -> None:
        self._given[key, self.rank] = record

    def take(self, key: str, rank: int) -> Record:
        return self._given.pop((key, rank))


def write_files(origin: Origin, files: Iterable[PlannedFile], staging: Path, progress: Progress) -> Iterator[FileNames]:
    """Writes the files durably, and yields each when it is there.

    Takes two buffers of RESHARD_BYTES, and what reading takes, whatever the sizes of the files.

    Args:
        origin: where the bytes are.
        files: what to write.
        staging: the folder to write below.
        progress: told of bytes that have been written.

    Raises:
        CheckpointCorruptError: a block is damaged, or a file cannot be read; names file and tensor.
        CommitError, OSError: writing failed.
    """
    batches = _batches(files)
    buffers = (Arena(), Arena())
    exchange = _AllWriters()

    def read(number: int) -> _Batch | None:
        parts = next(batches, None)
        return None if parts is None else _read(origin, parts, buffers[number % 2])

    with ThreadPoolExecutor(1, thread_name_prefix="reshard-read") as pool:
        number, reading = 0, pool.submit(read, 0)
        while (batch := reading.result()) is not None:
            number += 1
            reading = pool.submit(read, number)
            yield from _write(batch, staging, exchange)
            progress(batch.nbytes)


def _batches(files: Iterable[PlannedFile]) -> Iterator[tuple[_Part, ...]]:
    """Large files in parts, small ones together."""
    waiting: list[_Part] = []
    nbytes = 0
    for file in files:
        parts = _parts(file)
        if len(parts) == 1 and nbytes + page_ceil(parts[0].plan.nbytes) <= knobs.RESHARD_BYTES:
            waiting += parts
            nbytes += page_ceil(parts[0].plan.nbytes)
            continue
        if waiting:
            yield tuple(waiting)
        waiting, nbytes = [], 0
        if len(parts) == 1:
            waiting, nbytes = parts, page_ceil(parts[0].plan.nbytes)
        else:
            yield from ((part,) for part in parts)
    if waiting:
        yield tuple(waiting)


def _parts(file: PlannedFile) -> list[_Part]:
    # Not kept: the images of all files together are as large as their indexes.
    plan = plan_file(file.request, 0, ImageCache())
    end = plan.pt.records_end
    share = share_out(tuple(range(-(-end // knobs.RESHARD_BYTES))), end, PAGE_BYTES)
    return [
        _Part(file, replace(plan, share=share, start=start, stop=stop), writer)
        for writer, start, stop in zip(share.writers, share.cuts, share.cuts[1:], strict=False)
    ]


# -- reading -----------------------------------------------------------------------------------------------


def _read(origin: Origin, parts: Sequence[_Part], buffer: Arena) -> _Batch:
    sizes = [page_ceil(part.plan.nbytes) for part in parts]
    start = buffer.take(max(knobs.RESHARD_BYTES + PAGE_BYTES, sum(sizes)))
    addresses = tuple(start + sum(sizes[:number]) for number in range(len(sizes)))
    reads: list[tuple[ReadRange, torch.Tensor]] = []
    for part, address in zip(parts, addresses, strict=True):
        reads += _reads(part, address, origin.sources(part.file.rank))
    read_ranges(origin.role_dir, origin.files, reads)
    return _Batch(tuple(parts), addresses)


def _reads(part: _Part, address: int, sources: Sources) -> Iterator[tuple[ReadRange, torch.Tensor]]:
    plan = part.plan
    for number, skip, at, nbytes in zip(*plan.parts, strict=True):
        write = plan.request.tensors[number]
        memory = _memory(address + at - plan.start, nbytes, write.tensor.dtype)
        item = write.tensor.element_size()
        for read in _ranges(write, skip // item, (skip + nbytes) // item, plan.path, sources, memory):
            yield read, memory


def _memory(address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8).view(dtype)


def _ranges(
    write: TensorWrite, start: int, stop: int, path: str, sources: Sources, memory: torch.Tensor
) -> Sequence[ReadRange]:
    """The reads of elements `[start, stop)` of a tensor to write."""
    wanted = Wanted(write.key, write.region, is_expert(write.key.name), path)
    if write.key.kind == OPAQUE:
        stored = sources.opaque(wanted)
        assert stored is not None, "planned"
        return (ReadRange(stored, Rows(start, 0, stop - start)),)
    first = write.region.flat[0]
    source = sources.find(replace(wanted, region=write.region.with_flat(first + start, first + stop)))
    assert source is not None, "planned"
    assert torch_dtype(source.dtype) == memory.dtype, "planned"
    if source.outside:
        memory.zero_()
    return source.reads


# -- writing -----------------------------------------------------------------------------------------------


def _write(batch: _Batch, staging: Path, exchange: _AllWriters) -> Iterator[FileNames]:
    writes = [
        ImageWrite(part.plan, None, address, []) for part, address in zip(batch.parts, batch.addresses, strict=True)
    ]
    # Parts of a file shared by several writers are alone in their batch, and files with one writer are writer 0's.
    exchange.rank = batch.parts[0].writer
    with ImageWriter(staging, writes, exchange) as writer:
        writer.start()
        written = {file.path: file for file in writer.finish()}
    for part in batch.parts:
        if part.plan.path in written:
            yield FileNames(written[part.plan.path], part.file.rank, part.plan.names)
