"""The walk of all conversions, with writers of plain bytes: what several processes write appears whole, or not."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CheckpointMismatchError, CommitError, InvalidArgumentError
from mcore_ckpt.formats.contract import FileReport, FileToWrite
from mcore_ckpt.io.access import FOLDER_MODE
from mcore_ckpt.ranks.rounds import Agreement, Alone
from mcore_ckpt.steps.new_folder import Replaceable
from mcore_ckpt.tools.convert.destinations import NewFolder
from mcore_ckpt.tools.convert.walk import check_together, plan_together, write_together

SIZES = (5, 1, 4, 2)


@dataclass
class Plain:
    """Writes files of zeros. `finish` lists what was reported."""

    sizes: Sequence[int] = SIZES
    prefix: str = "file"
    told: int = 0
    seen: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[FileToWrite]:
        return [FileToWrite(f"{self.prefix}{number}", size) for number, size in enumerate(self.sizes)]

    def write(self, numbers: Sequence[int], folder: Path, progress: Callable[[int], None]) -> list[FileReport]:
        for number in numbers:
            (folder / f"{self.prefix}{number}").write_bytes(bytes(self.sizes[number]))
            progress(self.sizes[number])
        return [FileReport(number, self.sizes[number] + self.told, f"of {number}") for number in numbers]

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        (folder / f"{self.prefix}s").write_text(" ".join(sorted(report.details for report in reports)))

    def check(self, folder: Path, part: int, parts: int) -> None:
        self.seen.append(f"{part} of {parts}: {(folder / f'{self.prefix}s').read_text()}")


def place(path: Path, force: bool = False) -> NewFolder:
    return NewFolder(path, Replaceable(force, "a test", lambda _: True))


def on_ranks(count: int, work: Callable[[Agreement], Any]) -> list[Any]:
    """What each of several processes returns or raises; each is a thread."""
    ends: list[Any] = [None] * count
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> None:
        try:
            ends[rank] = work(Agreement(store, rank, count, "walk", 20.0))
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_files_appear_with_what_belongs_to_them(ranks: int, tmp_path: Path) -> None:
    told: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(ranks)}
    seen: list[str] = []

    def work(agreement: Agreement) -> int:
        writers = [("a", Plain(seen=seen)), ("a", Plain((3,), "more", seen=seen)), ("b/c", Plain(seen=seen))]
        progress = told[agreement.rank].append
        return write_together(
            *(agreement, writers, place(tmp_path / "out"), FOLDER_MODE),
            progress=lambda done, total: progress((done, total)),
            test=True,
        )

    assert on_ranks(ranks, work) == [2 * sum(SIZES) + 3] * ranks
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    numbered = [f"file{number}" for number in range(len(SIZES))]
    wanted = [*(f"a/{name}" for name in (*numbered, "files", "more0", "mores")), *(f"b/c/{n}" for n in numbered)]
    assert files == sorted([*wanted, "b/c/files"])
    assert (tmp_path / "out/b/c/files").read_text() == "of 0 of 1 of 2 of 3"
    assert all(steps[-1][0] == steps[-1][1] for steps in told.values())
    assert sum(steps[-1][1] for steps in told.values()) == 2 * sum(SIZES) + 3
    assert len(seen) == 3 * ranks
    assert {line.partition(":")[0] for line in seen} == {f"{rank} of {ranks}" for rank in range(ranks)}


class Failing(Plain):
    """Fails on the process that writes the largest file."""

    def write(self, numbers: Sequence[int], folder: Path, progress: Callable[[int], None]) -> list[FileReport]:
        if 0 in numbers:
            raise OSError(28, "No space left on device")
        return super().write(numbers, folder, progress)


class Differing(Plain):
    """Does not find what was written."""

    def check(self, folder: Path, part: int, parts: int) -> None:
        if part == parts - 1:
            raise CheckpointMismatchError("differs")


@pytest.mark.parametrize(
    ("writer", "error"),
    [
        (Failing(), r"No space left on device"),
        (Plain(told=1), r"has written 6 bytes to .*file0, but rank 0 sees 5"),
        (Differing(), "differs"),
    ],
    ids=["a writer fails", "a file is not seen whole", "the test fails"],
)
@pytest.mark.parametrize("there", [True, False], ids=["an empty folder above", "a new folder above"])
def test_nothing_is_left_of_a_failure(writer: Plain, error: str, there: bool, tmp_path: Path) -> None:
    target = tmp_path / "far" / "above" / "out"
    if there:
        target.parent.mkdir(parents=True)
    ends = on_ranks(
        2, lambda agreement: write_together(agreement, [(".", writer)], place(target), FOLDER_MODE, test=True)
    )
    for end in ends:
        with pytest.raises((CommitError, CheckpointMismatchError), match=error):
            raise end
    assert list(tmp_path.rglob("*")) == ([target.parent.parent, target.parent] if there else [])


def test_processes_with_other_plans_write_nothing(tmp_path: Path) -> None:
    def work(agreement: Agreement) -> int:
        return write_together(agreement, [(".", Plain((1 + agreement.rank,)))], place(tmp_path / "out"), FOLDER_MODE)

    for end in on_ranks(2, work):
        with pytest.raises(CommitError, match=r"the files to write: rank 0 has .* rank 1 has"):
            raise end
    assert not list(tmp_path.iterdir())


def test_the_plans_are_compared_and_a_failed_one_is_told() -> None:
    def plan(agreement: Agreement, differs: bool) -> int:
        if agreement.rank == 1 and not differs:
            raise CheckpointMismatchError("cannot be planned")
        return agreement.rank

    for differs, error in ((True, "the plan: rank 0 has {'n': 0}"), (False, "rank 1: cannot be planned")):
        ends = on_ranks(
            2,
            lambda agreement, differs=differs: plan_together(
                agreement, "planning", lambda: plan(agreement, differs), lambda n: {"n": n}, "the plan"
            ),
        )
        assert [error in str(end) for end in ends] == [True, True]


def test_what_may_not_be_replaced_is_named_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    for end in on_ranks(2, lambda agreement: check_together(agreement, place(tmp_path))):
        with pytest.raises(InvalidArgumentError, match="exists already and is not empty"):
            raise end


@pytest.mark.parametrize("error", [KeyError("bug"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_the_errors_of_a_process_that_works_alone_are_its_own(error: BaseException, tmp_path: Path) -> None:
    class Raising(Plain):
        def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
            raise error

    with pytest.raises(type(error)) as raised:
        write_together(Alone(), [(".", Raising())], place(tmp_path / "out"), FOLDER_MODE)
    assert raised.value is error
    assert not list(tmp_path.iterdir())
