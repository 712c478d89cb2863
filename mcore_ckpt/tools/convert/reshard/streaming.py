"""Writes the planned files from a checkpoint, range by range: a range is read while the range before it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

import torch

from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.formats.contract import Read
from mcore_ckpt.formats.native.file_plan import FilePlan, FileWrite, StructureCache, plan_file
from mcore_ckpt.formats.native.replica_shares import Share
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.io.streams import Placed, cuts_of, memory_at, stream
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.sharding.overlap import rows_into
from mcore_ckpt.sharding.plan import ReadRange
from mcore_ckpt.tools.convert.reshard.planner import PlannedFile


@dataclass(frozen=True, eq=False)
class FileNames:
    """A written file, the rank that the manifest records as its writer, and the names of its tensors."""

    file: WrittenFile
    rank: int
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _FileRange:
    """A range of a file that is read in one batch and written in one batch. It satisfies `io.streams.FilePart`.

    A large file is written as if several ranks shared it, one range each. This process acts for all these ranks, and
    `writer` is the number of the rank that would write this range.
    """

    file: PlannedFile
    plan: FilePlan
    writer: int

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes


class _OwnExchange:
    """Passes records from the writers of a file to its owner. This process acts for all of these ranks.

    `rank` is the number of the writer whose records are passed next.
    """

    def __init__(self) -> None:
        self.rank = 0
        self._given: dict[tuple[str, int], Record] = {}

    def give(self, key: str, record: Record) -> None:
        self._given[key, self.rank] = record

    def take(self, key: str, rank: int) -> Record:
        return self._given.pop((key, rank))


def write_planned_files(
    read: Read, files: Iterable[PlannedFile], staging: Path, progress: Callable[[int], None]
) -> Iterator[FileNames]:
    """Writes the files durably into the folder `staging`, and yields each file when that file is complete.

    Needs two buffers of STREAM_BYTES and the memory that `read` needs, for files of any size. `progress` is called with
    the number of bytes that were written since the last call.

    Raises:
        CheckpointCorruptError: a block is damaged, or a file cannot be read. The message names the file and the tensor.
        CommitError, OSError: writing failed.
    """
    exchange = _OwnExchange()
    for batch in stream(map(_ranges, files), lambda batch: read(list(chain.from_iterable(map(_reads_of, batch))))):
        yield from _write(batch, staging, exchange)
        progress(sum(placed.part.nbytes for placed in batch))


def _ranges(file: PlannedFile) -> list[_FileRange]:
    # Plan each file just before it is written, and drop the plan afterwards, because all plans together take as much
    # memory as the indexes of all files.
    plan = plan_file(file.request, 0, StructureCache())
    cuts = cuts_of(plan.pt.records_end)
    share = Share(tuple(range(len(cuts) - 1)), cuts)
    return [
        _FileRange(file, replace(plan, share=share, start=start, stop=stop), writer)
        for writer, (start, stop) in enumerate(pairwise(cuts))
    ]


def _reads_of(placed: Placed[_FileRange]) -> Iterator[tuple[ReadRange, torch.Tensor]]:
    """Yields the stored ranges that fill a range of a file, each with the memory to read it into."""
    file_range, plan = placed.part, placed.part.plan
    for number, skip, at, nbytes in zip(*plan.parts, strict=True):
        located = file_range.file.located[number]
        item = located.dtype.itemsize
        memory = memory_at(placed.buffer, placed.offset + at - plan.start, nbytes, located.dtype)
        if located.outside:
            memory.zero_()
        for read in located.reads:
            for rows in rows_into(read.rows, skip // item, (skip + nbytes) // item):
                yield ReadRange(read.stored, rows), memory


def _write(batch: Sequence[Placed[_FileRange]], staging: Path, exchange: _OwnExchange) -> Iterator[FileNames]:
    ranges = [placed.part for placed in batch]
    writes = [FileWrite(placed.part.plan, buffer=placed.buffer, offset=placed.offset) for placed in batch]
    # All ranges of the batch have the same writer number: if a file has several writers, each of its ranges is alone in
    # a batch; if a file has one writer, this writer has number 0.
    exchange.rank = ranges[0].writer
    with FileWriter(staging, writes, exchange) as writer:
        writer.start()
        written = {file.path: file for file in writer.finish()}
    for each in ranges:
        if each.plan.path in written:
            yield FileNames(written[each.plan.path], each.file.rank, each.plan.names)
