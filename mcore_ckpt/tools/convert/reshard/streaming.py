"""Writes the planned files from a checkpoint, range by range: one range is read while another is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    """A written file and the names of its tensors.

    Attributes:
        file: the file.
        rank: the world rank that the manifest records as its writer.
        names: the names of the tensors in the file.
    """

    file: WrittenFile
    rank: int
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _FileRange:
    """A range of a file that is read as a whole and written as a whole. It satisfies `io.streams.FilePart`.

    A large file is written as if several ranks shared it, one range each. This process acts for all these writers.

    Attributes:
        file: the file.
        plan: the plan of this range.
        writer: the number of the writer that has this range.
    """

    file: PlannedFile
    plan: FilePlan
    writer: int

    @property
    def nbytes(self) -> int:
        """The size of the range in bytes."""
        return self.plan.nbytes


class _OwnExchange:
    """Passes records from the writers of a file to the owner of the file. This process acts for all of them.

    Attributes:
        rank: the number of the writer that this process acts for.
    """

    def __init__(self) -> None:
        self.rank = 0
        self._given: dict[tuple[str, int], Record] = {}

    def give(self, key: str, record: Record) -> None:
        """Keeps a record for the owner of the file."""
        self._given[key, self.rank] = record

    def take(self, key: str, rank: int) -> Record:
        """Returns the record that writer `rank` gave."""
        return self._given.pop((key, rank))


def write_planned_files(
    read: Read, files: Iterable[PlannedFile], staging: Path, progress: Callable[[int], None]
) -> Iterator[FileNames]:
    """Writes the files durably, and yields each when it is complete.

    It needs two buffers of STREAM_BYTES and the memory that `read` needs, whatever the sizes of the files.

    Args:
        read: fills tensors with ranges of the checkpoint.
        files: the files to write.
        staging: the folder that the files' paths are relative to.
        progress: called with the number of bytes that were written since the last call.

    Raises:
        CheckpointCorruptError: a block is damaged, or a file cannot be read. The message names the file and the tensor.
        CommitError, OSError: writing failed.
    """
    exchange = _OwnExchange()
    for batch in stream(map(_ranges, files), lambda batch: read(_reads(batch))):
        yield from _write(batch, staging, exchange)
        progress(sum(placed.part.nbytes for placed in batch))


def _ranges(file: PlannedFile) -> list[_FileRange]:
    # Plan each file only when it is needed and keep no plan, because the plans of all files together are as large as
    # the indexes of the files.
    plan = plan_file(file.request, 0, StructureCache())
    cuts = cuts_of(plan.pt.records_end)
    share = Share(tuple(range(len(cuts) - 1)), cuts)
    return [
        _FileRange(file, replace(plan, share=share, start=start, stop=stop), writer)
        for writer, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]


# -- reading -----------------------------------------------------------------------------------------------


def _reads(batch: Sequence[Placed[_FileRange]]) -> list[tuple[ReadRange, torch.Tensor]]:
    """Lists the stored ranges that fill the ranges of a batch, each with its memory."""
    return [read for placed in batch for read in _reads_of(placed)]


def _reads_of(placed: Placed[_FileRange]) -> Iterator[tuple[ReadRange, torch.Tensor]]:
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


# -- writing -----------------------------------------------------------------------------------------------


def _write(batch: Sequence[Placed[_FileRange]], staging: Path, exchange: _OwnExchange) -> Iterator[FileNames]:
    ranges = [placed.part for placed in batch]
    writes = [FileWrite(placed.part.plan, buffer=placed.buffer, offset=placed.offset) for placed in batch]
    # All ranges of the batch have the same writer number. If a file has several writers, each of its ranges is the only
    # one in its batch. If a file has one writer, that writer has number 0.
    exchange.rank = ranges[0].writer
    with FileWriter(staging, writes, exchange) as writer:
        writer.start()
        written = {file.path: file for file in writer.finish()}
    for each in ranges:
        if each.plan.path in written:
            yield FileNames(written[each.plan.path], each.file.rank, each.plan.names)
