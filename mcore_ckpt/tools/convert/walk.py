"""Runs every conversion: several processes write files, and all files appear together once they are complete.

A tool opens a reader, plans, and chooses writers and a destination. Then `write_together` does the following, in this
order:

1. *Open.* All processes compare their plans. The coordinator checks that the destination may be written and that there
   is enough space, removes leftovers, and makes the staging folders.
2. *Write.* Each process writes its share of the files. When all files are there, the coordinator checks their sizes,
   writes what is still missing (`CheckpointWriter.finish`), and makes all names durable.
3. *Test*, if a test was asked for. Each process reads back a part of the written files and compares it with the source.
4. *Publish.* The coordinator puts everything in place.

If a process fails, all processes raise its error, and the staging folders are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from mcore_ckpt.errors import CommitError
from mcore_ckpt.formats.contract import CheckpointWriter, FileReport
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.sharding.assignment import share_of
from mcore_ckpt.steps import commit
from mcore_ckpt.tools.convert.destinations import Destination
from mcore_ckpt.tools.examine.progress import Progress, no_progress, summed

Writers: TypeAlias = Sequence[tuple[str, CheckpointWriter]]
"""The writers, each with the name of its folder in the destination. Several may write into the same folder."""

Plan = TypeVar("Plan")


def check_together(agreement: Agreement, destination: Destination) -> None:
    """Checks that a destination may be written, before a source is downloaded or read. All processes raise the error.

    Raises InvalidArgumentError.
    """

    def combine(_: Sequence[Record]) -> Record:
        destination.check()
        return {}

    decide(agreement, f"looking at {destination.path}", dict, combine, CommitError)


def plan_together(
    agreement: Agreement, topic: str, plan: Callable[[], Plan], identity: Callable[[Plan], Record], what: str
) -> Plan:
    """Plans on all processes. If one process fails, all processes raise its error.

    `identity` returns the part of a plan that must be the same on all processes, as plain JSON values. For messages,
    `topic` says what the processes do, and `what` names the part that must be the same.
    """
    plans: list[Plan] = []

    def work() -> Record:
        plans.append(plan())
        return identity(plans[0])

    decide(agreement, topic, work, lambda records: same_everywhere(records, what, CommitError), CommitError)
    return plans[0]


def write_together(
    agreement: Agreement,
    writers: Writers,
    destination: Destination,
    mode: int,
    progress: Progress = no_progress,
    test: bool = False,
) -> int:
    """Writes, tests and publishes. `writers` must be the same on all processes.

    Args:
        mode: the mode of new folders (`mode_as`).
        test: True to read everything back and compare it with the source before the result appears.

    Returns the number of bytes of data that all processes together have written.

    Raises:
        CheckpointError: all processes raise it. The previous contents of the destination are in place, unless the
            message says otherwise.
        Exception: with `Alone`, also any other error of the writers.
    """
    try:
        folders = _open(agreement, writers, destination, mode)
        _write(agreement, writers, folders, destination, progress)
        if test:
            _test(agreement, writers, folders, destination.path)
        topic = f"putting {destination.path} in place"
        decide(agreement, topic, dict, lambda _: {}, CommitError, act=destination.publish)
    finally:
        if agreement.is_coordinator:
            destination.close()
    return sum(_sizes(writers))


def _sizes(writers: Writers) -> list[int]:
    return [file.nbytes for _, writer in writers for file in writer.files]


def _open(agreement: Agreement, writers: Writers, destination: Destination, mode: int) -> list[Path]:
    """Opens the destination. Returns the folder of each writer."""
    names = [name for name, _ in writers]

    def work() -> Record:
        return {"files": [[name, file.name, file.nbytes] for name, writer in writers for file in writer.files]}

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere(records, "the files to write", CommitError)
        return {"attempt": destination.open(names, _sizes(writers), mode)}

    attempt = decide(agreement, f"opening {destination.path}", work, combine, CommitError)["attempt"]
    return [destination.folder(name, attempt) for name in names]


def _write(
    agreement: Agreement, writers: Writers, folders: Sequence[Path], destination: Destination, progress: Progress
) -> None:
    mine = _share(agreement, writers)
    total = sum(writer.files[number].nbytes for (_, writer), own in zip(writers, mine, strict=True) for number in own)
    wrote = summed(progress, total)

    def work() -> Record:
        return {
            "reports": [
                [[report.number, report.size, report.details] for report in _write_own(writer, own, folder, wrote)]
                for (_, writer), own, folder in zip(writers, mine, folders, strict=True)
            ]
        }

    def combine(records: Sequence[Record]) -> Record:
        for at, (_, writer) in enumerate(writers):
            by_rank = [[FileReport(*each) for each in record["reports"][at]] for record in records]
            _check_files(writer, by_rank, folders[at])
            writer.finish([report for reports in by_rank for report in reports], folders[at])
        destination.seal()
        return {}

    decide(agreement, f"writing {destination.path}", work, combine, CommitError)


def _share(agreement: Agreement, writers: Writers) -> list[list[int]]:
    """Returns, for each writer, the numbers of the files that this process writes."""
    places = [(at, number) for at, (_, writer) in enumerate(writers) for number in range(len(writer.files))]
    mine: list[list[int]] = [[] for _ in writers]
    for each in share_of(_sizes(writers), agreement.rank, agreement.world_size):
        at, number = places[each]
        mine[at].append(number)
    return mine


def _write_own(
    writer: CheckpointWriter, numbers: Sequence[int], folder: Path, wrote: Callable[[int], None]
) -> Sequence[FileReport]:
    if not folder.is_dir():
        raise CommitError(
            f"{folder}: rank 0 made this folder, but this rank does not see it: use a folder on a file system that all "
            "ranks share"
        )
    return writer.write(numbers, folder, wrote)


class _SizedFile(NamedTuple):
    path: str
    size: int


def _check_files(writer: CheckpointWriter, by_rank: Sequence[Sequence[FileReport]], folder: Path) -> None:
    names = [file.name for file in writer.files]
    written = (
        (rank, _SizedFile(names[report.number], report.size))
        for rank, reports in enumerate(by_rank)
        for report in reports
    )
    commit.check_files(folder, written)


def _test(agreement: Agreement, writers: Writers, folders: Sequence[Path], path: Path) -> None:
    def work() -> Record:
        for (_, writer), folder in zip(writers, folders, strict=True):
            writer.check(folder, agreement.rank, agreement.world_size)
        return {}

    decide(agreement, f"testing {path}", work, lambda _: {}, CommitError)
