"""Files of a planned layout, written from a checkpoint a part at a time: one is read while another is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.formats.contract import Read
from mcore_ckpt.formats.native.file_plan import FilePlan, ImageWrite, StructureCache, plan_file
from mcore_ckpt.formats.native.replica_shares import Share
from mcore_ckpt.formats.native.writer import ImageWriter
from mcore_ckpt.io.streams import Placed, cuts_of, memory_at, stream
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.sharding.overlap import rows_into
from mcore_ckpt.sharding.plan import ReadRange
from mcore_ckpt.tools.reshard.planner import PlannedFile

Progress = Callable[[int], None]


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

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes


class _AllWriters:
    """What the writers of one file tell its owner, where all of them are one process."""

    def __init__(self) -> None:
        self.rank = 0
        self._given: dict[tuple[str, int], Record] = {}

    def give(self, key: str, record: Record) -> None:
        self._given[key, self.rank] = record

    def take(self, key: str, rank: int) -> Record:
        return self._given.pop((key, rank))


def write_planned_files(
    read: Read, files: Iterable[PlannedFile], staging: Path, progress: Progress
) -> Iterator[FileNames]:
    """Writes the files durably, and yields each when it is there.

    Takes two buffers of STREAM_BYTES, and what reading takes, whatever the sizes of the files.

    Args:
        read: fills tensors with ranges of the checkpoint.
        files: what to write.
        staging: the folder to write below.
        progress: told of bytes that have been written.

    Raises:
        CheckpointCorruptError: a block is damaged, or a file cannot be read; names file and tensor.
        CommitError, OSError: writing failed.
    """
    exchange = _AllWriters()
    for batch in stream(map(_parts, files), lambda batch: read(_reads(batch))):
        yield from _write(batch, staging, exchange)
        progress(sum(placed.part.nbytes for placed in batch))


def _parts(file: PlannedFile) -> list[_Part]:
    # Not kept: the images of all files together are as large as their indexes.
    plan = plan_file(file.request, 0, StructureCache())
    cuts = cuts_of(plan.pt.records_end)
    share = Share(tuple(range(len(cuts) - 1)), cuts)
    return [
        _Part(file, replace(plan, share=share, start=start, stop=stop), writer)
        for writer, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]


# -- reading -----------------------------------------------------------------------------------------------


def _reads(batch: Sequence[Placed[_Part]]) -> list[tuple[ReadRange, torch.Tensor]]:
    """The stored ranges of all parts of a batch, each with the memory that it goes into."""
    return [read for placed in batch for read in _reads_of_part(placed.part, placed.address)]


def _reads_of_part(part: _Part, address: int) -> Iterator[tuple[ReadRange, torch.Tensor]]:
    plan = part.plan
    for number, skip, at, nbytes in zip(*plan.parts, strict=True):
        located = part.file.located[number]
        item = located.dtype.itemsize
        memory = memory_at(address + at - plan.start, nbytes, located.dtype)
        if located.outside:
            memory.zero_()
        for read in located.reads:
            for rows in rows_into(read.rows, skip // item, (skip + nbytes) // item):
                yield ReadRange(read.stored, rows), memory


# -- writing -----------------------------------------------------------------------------------------------


def _write(batch: Sequence[Placed[_Part]], staging: Path, exchange: _AllWriters) -> Iterator[FileNames]:
    parts = [placed.part for placed in batch]
    writes = [ImageWrite(placed.part.plan, None, placed.address, []) for placed in batch]
    # Parts of a file shared by several writers are alone in their batch, and files with one writer are writer 0's.
    exchange.rank = parts[0].writer
    with ImageWriter(staging, writes, exchange) as writer:
        writer.start()
        written = {file.path: file for file in writer.finish()}
    for part in parts:
        if part.plan.path in written:
            yield FileNames(written[part.plan.path], part.file.rank, part.plan.names)
