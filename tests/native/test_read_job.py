import errno
import os
import random
import sys
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_ckpt.io import _native

KIBIBYTE = 1 << 10
POISON = 0xA5
PAGE = 4096

# What add() is told to read a tensor of 100 bytes whole, and what is different for every other 10 bytes of it.
WHOLE: dict[str, Any] = {
    "file": 0,
    "offset": 0,
    "nbytes": 100,
    "crcs": [1],
    "start": 0,
    "row_bytes": 100,
    "rows": 1,
    "source_stride": 0,
    "destination": 4096,
    "destination_stride": 0,
}
ROWS = {"row_bytes": 10, "rows": 4, "source_stride": 20, "destination_stride": 20}

many_files = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class StoredFile:
    """A file of random bytes, tensors in it, and their checksums."""

    path: Path
    data: bytearray
    block_bytes: int
    tensors: list[tuple[int, int]]
    crcs: Sequence[list[int] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.crcs = [
            [
                zlib.crc32(self.data[at : min(at + self.block_bytes, offset + nbytes)])
                for at in self.blocks(offset, nbytes)
            ]
            for offset, nbytes in self.tensors
        ]
        self.path.write_bytes(self.data)

    def blocks(self, offset: int, nbytes: int) -> range:
        return range(offset, offset + nbytes, self.block_bytes)

    def without_crcs(self) -> None:
        self.crcs = [None for _ in self.tensors]

    def damage(self, at: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([self.data[at] ^ 0x10]))


def stored(path: Path, sizes: list[int], seed: int, block_bytes: int) -> StoredFile:
    order = random.Random(seed)
    tensors, end = [], order.randint(0, 5000)
    for size in sizes:
        tensors.append((end, size))
        end += size + order.choice([0, 1, 63, 5000, 100_000])
    return StoredFile(path, bytearray(order.randbytes(end)), block_bytes, tensors)


class Reads:
    """Reads of stored tensors into one poisoned buffer, never touching each other."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.expected = bytearray([POISON]) * nbytes
        self.end = 1
        self.wanted: list[tuple[int, int, int]] = []  # of each read: file, start and stop in the file

    def add(self, job: _native.ReadJob, number: int, file: StoredFile, tensor: int, start: int, stop: int) -> None:
        offset, nbytes = file.tensors[tensor]
        address = self.memory.data_ptr() + self.end
        read = job.add(number, offset, nbytes, file.crcs[tensor], start, stop - start, 1, 0, address, 0)
        assert read == len(self.wanted)
        self.expected[self.end : self.end + stop - start] = file.data[offset + start : offset + stop]
        self.end += stop - start + 3
        self.wanted.append((number, offset + start, offset + stop))

    def check(self) -> None:
        assert self.memory.numpy().tobytes() == bytes(self.expected)


def job_of(
    files: list[StoredFile], threads: int = 2, piece_bytes: int = 16 * KIBIBYTE, direct: bool = True
) -> _native.ReadJob:
    return _native.ReadJob(
        [str(file.path) for file in files],
        threads=threads,
        piece_bytes=piece_bytes,
        block_bytes=files[0].block_bytes,
        direct=direct,
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, int, int, int]], int]:
    """Sizes of the tensors of each file, reads (file, tensor, start, stop), block size."""
    size = st.integers(0, 300) | st.integers(0, 70_000)
    files = draw(st.lists(st.lists(size, min_size=1, max_size=6), min_size=1, max_size=3))
    reads = []
    for _ in range(draw(st.integers(0, 15))):
        file = draw(st.integers(0, len(files) - 1))
        tensor = draw(st.integers(0, len(files[file]) - 1))
        start = draw(st.integers(0, files[file][tensor]))
        reads.append((file, tensor, start, draw(st.integers(start, files[file][tensor]))))
    return files, reads, draw(st.sampled_from([1000, 4096, 16 * KIBIBYTE]))


@many_files
@given(
    plan=plans(),
    seed=st.integers(0, 2**31),
    threads=st.integers(1, 4),
    piece_bytes=st.sampled_from([0, 4096, 10_000, 1 << 20]),
    direct=st.booleans(),
)
def test_any_ranges_arrive_and_nothing_else(
    tmp_path: Path,
    plan: tuple[list[list[int]], list[tuple[int, int, int, int]], int],
    seed: int,
    threads: int,
    piece_bytes: int,
    direct: bool,
) -> None:
    sizes, reads, block_bytes = plan
    files = [stored(tmp_path / str(i), of_file, seed + i, block_bytes) for i, of_file in enumerate(sizes)]
    job = job_of(files, threads, piece_bytes, direct)
    wanted = Reads(sum(stop - start + 3 for _, _, start, stop in reads) + 1)
    for file, tensor, start, stop in reads:
        wanted.add(job, file, files[file], tensor, start, stop)
    job.run()
    wanted.check()


@many_files
@given(plan=plans(), seed=st.integers(0, 2**31), threads=st.integers(1, 4), data=st.data())
def test_bytes_of_a_damaged_block_go_nowhere(
    tmp_path: Path,
    plan: tuple[list[list[int]], list[tuple[int, int, int, int]], int],
    seed: int,
    threads: int,
    data: st.DataObject,
) -> None:
    sizes, reads, block_bytes = plan
    files = [stored(tmp_path / str(i), of_file, seed + i, block_bytes) for i, of_file in enumerate(sizes)]
    job = job_of(files, threads)
    wanted = Reads(sum(stop - start + 3 for _, _, start, stop in reads) + 1)
    blocks: dict[tuple[int, int], list[int]] = {}
    ends = []
    for number, (file, tensor, start, stop) in enumerate(reads):
        ends.append(wanted.end)
        wanted.add(job, file, files[file], tensor, start, stop)
        offset, nbytes = files[file].tensors[tensor]
        for at in files[file].blocks(offset, nbytes):
            if max(at, offset + start) < min(at + block_bytes, offset + stop):
                blocks.setdefault((file, at), []).append(number)
    if not blocks:
        return
    file, at = data.draw(st.sampled_from(sorted(blocks)))
    (end,) = {
        min(at + block_bytes, offset + nbytes)
        for offset, nbytes in files[file].tensors
        if at in files[file].blocks(offset, nbytes)
    }
    files[file].damage(data.draw(st.integers(at, end - 1)))

    with pytest.raises(_native.DamagedBlock) as error:
        job.run()
    read, offset, nbytes = error.value.args
    assert (read, offset, nbytes) == (blocks[file, at][0], at, end - at)
    got = wanted.memory.numpy().tobytes()
    for number, (of_file, start, stop) in enumerate(wanted.wanted):
        if of_file == file:
            low, high = max(start, at), min(stop, end)
            position = ends[number] + low - start
            assert low >= high or got[position : position + high - low] == bytes([POISON]) * (high - low)
    # Elsewhere there is what belongs there, or nothing yet.
    assert all(byte in (POISON, right) for byte, right in zip(got, wanted.expected, strict=True))


@dataclass
class Rows:
    file: int
    tensor: int
    start: int
    row_bytes: int
    rows: int
    source_stride: int
    destination_stride: int

    def ranges(self) -> list[tuple[int, int]]:
        """Of the tensor, one for each row that is not empty."""
        starts = [self.start + k * self.source_stride for k in range(self.rows)]
        return [(start, start + self.row_bytes) for start in starts if self.row_bytes]

    def extent(self) -> int:
        return self.rows * max(self.destination_stride, self.row_bytes)

    def add(self, job: _native.ReadJob, file: StoredFile, destination: int) -> int:
        offset, nbytes = file.tensors[self.tensor]
        crcs = file.crcs[self.tensor]
        what = (self.start, self.row_bytes, self.rows, self.source_stride)
        return job.add(self.file, offset, nbytes, crcs, *what, destination, self.destination_stride)


@st.composite
def rows_of_tensors(draw: st.DrawFn) -> tuple[list[list[int]], list[Rows], int]:
    """Sizes of the tensors of each file, reads of rows of them, block size."""
    files = draw(st.lists(st.lists(st.integers(0, 20_000), min_size=1, max_size=3), min_size=1, max_size=2))
    reads = []
    for _ in range(draw(st.integers(1, 8))):
        file = draw(st.integers(0, len(files) - 1))
        tensor = draw(st.integers(0, len(files[file]) - 1))
        nbytes = files[file][tensor]
        start = draw(st.integers(0, nbytes))
        row_bytes = draw(st.integers(0, min(64, nbytes - start)) | st.integers(0, nbytes - start))
        source_stride = row_bytes + draw(st.just(0) | st.integers(0, 200) | st.integers(0, 10_000))
        most = (nbytes - start - row_bytes) // max(source_stride, 1) + 1
        rows = draw(st.integers(0, min(most, 400)))
        destination_stride = row_bytes + draw(st.just(0) | st.integers(0, 100))
        if rows == 1 and draw(st.booleans()):
            source_stride = destination_stride = 0
        reads.append(Rows(file, tensor, start, row_bytes, rows, source_stride, destination_stride))
    return files, reads, draw(st.sampled_from([16, 100, 1000, 4096]))


class RowReads:
    """Reads of rows into one poisoned buffer, the expected bytes copied one row at a time."""

    def __init__(self, job: _native.ReadJob, files: list[StoredFile], reads: list[Rows]) -> None:
        size = sum(read.extent() + 3 for read in reads) + 1
        self.memory = torch.full((size,), POISON, dtype=torch.uint8)
        self.expected = torch.full((size,), POISON, dtype=torch.uint8).numpy()
        self.places: list[list[int]] = []  # of each read, of each row
        end = 1
        for number, read in enumerate(reads):
            file = files[read.file]
            assert read.add(job, file, self.memory.data_ptr() + end) == number
            offset = file.tensors[read.tensor][0]
            places = [end + k * read.destination_stride for k in range(read.rows)]
            for place, (start, stop) in zip(places, read.ranges(), strict=False):
                row = file.data[offset + start : offset + stop]
                self.expected[place : place + len(row)] = bytearray(row)
            self.places.append(places)
            end += read.extent() + 3

    def check(self) -> None:
        assert self.memory.numpy().tobytes() == self.expected.tobytes()


@many_files
@given(
    plan=rows_of_tensors(),
    seed=st.integers(0, 2**31),
    threads=st.integers(1, 4),
    piece_bytes=st.sampled_from([0, 4096, 1 << 20]),
)
def test_any_rows_arrive_and_nothing_else(
    tmp_path: Path, plan: tuple[list[list[int]], list[Rows], int], seed: int, threads: int, piece_bytes: int
) -> None:
    sizes, reads, block_bytes = plan
    files = [stored(tmp_path / str(i), of_file, seed + i, block_bytes) for i, of_file in enumerate(sizes)]
    job = job_of(files, threads, piece_bytes, direct=False)
    wanted = RowReads(job, files, reads)
    job.run()
    wanted.check()


@many_files
@given(plan=rows_of_tensors(), seed=st.integers(0, 2**31), threads=st.integers(1, 4), data=st.data())
def test_a_damaged_block_matters_to_the_rows_in_it(
    tmp_path: Path, plan: tuple[list[list[int]], list[Rows], int], seed: int, threads: int, data: st.DataObject
) -> None:
    sizes, reads, block_bytes = plan
    files = [stored(tmp_path / str(i), of_file, seed + i, block_bytes) for i, of_file in enumerate(sizes)]
    blocks = [
        (file, tensor, at, min(at + block_bytes, nbytes))
        for file, of_file in enumerate(sizes)
        for tensor, nbytes in enumerate(of_file)
        for at in range(0, nbytes, block_bytes)
    ]
    if not blocks:
        return
    file, tensor, begin, end = data.draw(st.sampled_from(blocks))
    offset = files[file].tensors[tensor][0]
    files[file].damage(offset + data.draw(st.integers(begin, end - 1)))
    job = job_of(files, threads, direct=False)
    wanted = RowReads(job, files, reads)

    meeting = []  # numbers of reads, and where in the buffer their bytes of that block would go
    for number, read in enumerate(reads):
        if (read.file, read.tensor) != (file, tensor):
            continue
        for place, (start, stop) in zip(wanted.places[number], read.ranges(), strict=False):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                meeting.append((number, place + low - start, place + high - start))
    if not meeting:
        job.run()
        wanted.check()
        return
    with pytest.raises(_native.DamagedBlock) as error:
        job.run()
    assert error.value.args == (meeting[0][0], offset + begin, end - begin)
    got = wanted.memory.numpy()
    assert all((got[low:high] == POISON).all() for _, low, high in meeting)
    # Elsewhere there is what belongs there, or nothing yet.
    assert ((got == POISON) | (got == wanted.expected)).all()


@many_files
@given(plan=rows_of_tensors(), seed=st.integers(0, 2**31), threads=st.integers(1, 4), direct=st.booleans())
def test_tensors_without_crcs_arrive_as_they_are(
    tmp_path: Path, plan: tuple[list[list[int]], list[Rows], int], seed: int, threads: int, direct: bool
) -> None:
    sizes, reads, block_bytes = plan
    files = [stored(tmp_path / str(i), of_file, seed + i, block_bytes) for i, of_file in enumerate(sizes)]
    for file in files:
        file.without_crcs()
    job = job_of(files, threads, direct=direct)
    wanted = RowReads(job, files, reads)
    job.run()
    wanted.check()


def test_a_block_is_checked_if_one_of_its_reads_has_its_crc(tmp_path: Path) -> None:
    file = StoredFile(tmp_path / "a", bytearray(random.Random(1).randbytes(3 * PAGE)), PAGE, [(0, 3 * PAGE)])
    crcs = file.crcs[0]
    file.damage(PAGE + 5)
    memory = torch.full((6 * PAGE,), POISON, dtype=torch.uint8)
    job = job_of([file], threads=1)
    job.add(0, 0, 3 * PAGE, None, 0, 3 * PAGE, 1, 0, memory.data_ptr(), 0)
    job.add(0, 0, 3 * PAGE, crcs, PAGE, PAGE, 1, 0, memory.data_ptr() + 4 * PAGE, 0)
    with pytest.raises(_native.DamagedBlock) as error:
        job.run()
    assert error.value.args == (1, PAGE, PAGE)
    got = memory.numpy()
    assert (got[PAGE : 2 * PAGE] == POISON).all(), "a damaged block has been applied"
    assert (got[4 * PAGE :] == POISON).all()


def test_halves_of_rows_from_two_tensors_make_one(tmp_path: Path) -> None:
    height, width = 300, 700
    file = stored(tmp_path / "a", [height * width, height * width], 1, 4096)
    job = job_of([file], threads=3)
    memory = torch.full((height, 2 * width), POISON, dtype=torch.uint8)
    for tensor in range(2):
        rows = Rows(0, tensor, 0, width, height, width, 2 * width)
        rows.add(job, file, memory.data_ptr() + tensor * width)
    job.run()
    halves = [
        torch.frombuffer(file.data[offset : offset + nbytes], dtype=torch.uint8).view(height, width)
        for offset, nbytes in file.tensors
    ]
    assert torch.equal(memory, torch.cat(halves, dim=1))


def test_large_rows_arrive(tmp_path: Path) -> None:
    height, width = 40, 50_000
    file = stored(tmp_path / "a", [height * width], 1, 1 << 20)
    job = job_of([file], piece_bytes=1 << 20)
    wanted = RowReads(job, [file], [Rows(0, 0, 5, width // 2, height, width, width // 2 + 13)])
    job.run()
    wanted.check()


def test_blocks_between_rows_are_not_read(tmp_path: Path) -> None:
    block = 100 * KIBIBYTE
    file = StoredFile(tmp_path / "a", bytearray(random.Random(1).randbytes(12 * block)), block, [(0, 12 * block)])
    for number in (0, 2, 3, 5, 6, 8, 9, 11):
        file.damage(number * block + 7)
    job = job_of([file], piece_bytes=1 << 20)
    wanted = RowReads(job, [file], [Rows(0, 0, block + 99, block // 2, 4, 3 * block, block // 2)])
    job.run()
    wanted.check()
    assert job.progress() == 4 * block


def test_neighbouring_blocks_of_rows_are_read_together_and_once(tmp_path: Path) -> None:
    nbytes = 100 * PAGE
    file = StoredFile(tmp_path / "a", bytearray(random.Random(1).randbytes(nbytes)), PAGE, [(0, nbytes)])
    job = job_of([file], threads=1, piece_bytes=1 << 20)
    reads = [Rows(0, 0, start, 30, nbytes // 500, 500, 30) for start in (0, 100, 470)]
    wanted = RowReads(job, [file], reads)
    job.run()
    wanted.check()
    assert job.progress() == nbytes


def test_one_block_is_read_once_for_all_who_want_it(tmp_path: Path) -> None:
    file = stored(tmp_path / "a", [50_000], 1, 10_000)
    job = job_of([file], piece_bytes=1 << 20)
    wanted = Reads(60_000)
    for start, stop in [(10_500, 19_500), (12_000, 12_001), (9_999, 20_001), (10_000, 20_000), (11_000, 11_000)]:
        wanted.add(job, 0, file, 0, start, stop)
    job.run()
    wanted.check()
    offset = file.tensors[0][0]
    assert job.progress() == -(-(offset + 30_000) // PAGE) * PAGE - offset // PAGE * PAGE


def test_small_gaps_are_read_large_ones_are_not(tmp_path: Path) -> None:
    file = StoredFile(tmp_path / "a", bytearray(300 * KIBIBYTE), 4096, [(0, 100), (60_000, 100), (280_000, 100)])
    job = job_of([file], piece_bytes=1 << 20)
    wanted = Reads(1000)
    for tensor in range(3):
        wanted.add(job, 0, file, tensor, 0, 100)
    job.run()
    wanted.check()
    assert job.progress() == 15 * PAGE + PAGE


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("keep", [0, 1, 4096, 39_999])
def test_a_cut_file(tmp_path: Path, keep: int, direct: bool) -> None:
    file = StoredFile(tmp_path / "a", bytearray(random.Random(1).randbytes(40_000)), 4096, [(0, 40_000)])
    os.truncate(file.path, keep)
    job = job_of([file], direct=direct)
    wanted = Reads(40_004)
    wanted.add(job, 0, file, 0, 0, 40_000)
    with pytest.raises(OSError, match="the file ends") as error:
        job.run()
    assert error.value.errno == errno.ENODATA
    assert error.value.filename == str(file.path)
    if direct is False and keep == 39_999:
        assert f"at byte {keep}" in str(error.value)


def test_a_tensor_that_ends_with_the_file(tmp_path: Path) -> None:
    file = StoredFile(tmp_path / "a", bytearray(random.Random(1).randbytes(40_001)), 4096, [(39_990, 11)])
    job = job_of([file])
    wanted = Reads(20)
    wanted.add(job, 0, file, 0, 0, 11)
    job.run()
    wanted.check()


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    file = stored(tmp_path / "a", [100], 1, 4096)
    file.path.unlink()
    for expected in (FileNotFoundError, IsADirectoryError):
        job = job_of([file])
        wanted = Reads(200)
        wanted.add(job, 0, file, 0, 0, 100)
        with pytest.raises(expected) as error:
            job.run()
        assert error.value.filename == str(file.path)
        assert wanted.memory.eq(POISON).all()
        file.path.mkdir(exist_ok=True)


def long_job(path: Path, threads: int, is_damaged: bool) -> tuple[_native.ReadJob, int, torch.Tensor]:
    """A job that reads 8 GiB of zeros, of which the first block may be damaged; the bytes, and the memory to keep.

    So much that not all is read even if the thread that finds the damage has to wait for a processor.
    """
    block, count = 1 << 20, 8192
    path.touch()
    os.truncate(path, count * block)
    job = _native.ReadJob([str(path)], threads=threads, piece_bytes=block, block_bytes=block, direct=False)
    target = torch.empty(block, dtype=torch.uint8)
    crc = zlib.crc32(bytes(block))
    for number in range(count):
        expected = crc + 1 if is_damaged and number == 0 else crc
        job.add(0, number * block, block, [expected], 0, block, 1, 0, target.data_ptr(), 0)
    return job, count * block, target


def test_an_error_ends_the_work_of_all_threads(tmp_path: Path) -> None:
    job, nbytes, _target = long_job(tmp_path / "zeros", threads=4, is_damaged=True)
    with pytest.raises(_native.DamagedBlock):
        job.run()
    at_return = job.progress()
    assert at_return < nbytes
    with pytest.raises(ValueError, match="has run"):
        job.run()
    assert job.progress() == at_return


def test_cancel_from_another_thread(tmp_path: Path) -> None:
    job, nbytes, _target = long_job(tmp_path / "zeros", threads=2, is_damaged=False)

    def cancel() -> None:
        while job.progress() == 0:
            pass
        job.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(RuntimeError, match=r"^cancelled$"):
        job.run()
    thread.join()
    assert 0 < job.progress() < nbytes


def test_an_error_is_told_rather_than_that_somebody_gave_up(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    # With O_DIRECT it would be opened twice, and the second time nobody might be there any more.
    job = _native.ReadJob([str(path)], threads=1, piece_bytes=4096, block_bytes=4096, direct=False)
    target = torch.full((8192,), POISON, dtype=torch.uint8)
    job.add(0, 0, 8192, [0, 0], 0, 8192, 1, 0, target.data_ptr(), 0)

    def cancel() -> None:
        with path.open("wb"):  # opens once the job, without the GIL, opens it for reading
            job.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(OSError, match="reading at byte 0") as error:
        job.run()
    thread.join()
    assert error.value.errno == errno.ESPIPE


def test_cancelled(tmp_path: Path) -> None:
    file = stored(tmp_path / "a", [100_000], 1, 4096)
    job = job_of([file])
    wanted = Reads(100_004)
    wanted.add(job, 0, file, 0, 0, 100_000)
    job.cancel()
    with pytest.raises(RuntimeError, match=r"^cancelled$"):
        job.run()
    assert wanted.memory.eq(POISON).all()
    assert job.progress() == 0


def test_nothing_to_read() -> None:
    job = _native.ReadJob(["/nowhere"], threads=3, piece_bytes=4096, block_bytes=4096)
    assert job.add(0, 5, 0, [], 0, 0, 1, 0, 0, 0) == 0
    assert job.add(0, 5, 10, [7], 3, 0, 1, 0, 0, 0) == 1
    assert job.add(0, 5, 10, [7], 10, 0, 5, 0, 0, 0) == 2
    assert job.add(0, 5, 10, [7], 10, 2**64 - 1, 0, 0, 0, 0) == 3
    job.run()
    assert job.progress() == 0


def test_scratch_memory_is_what_its_settings_say() -> None:
    job = _native.ReadJob([], threads=3, piece_bytes=1 << 20, block_bytes=4096)
    assert 3 << 20 <= job.scratch_bytes <= 3 * ((1 << 20) + PAGE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": 1}, "no file 1 among 1"),
        ({"row_bytes": 101}, r"101 bytes from byte 0 on are not all in a tensor of 100 bytes"),
        ({"start": 1}, r"100 bytes from byte 1 on are not all in a tensor of 100 bytes"),
        ({"start": 101, "row_bytes": 0}, "from byte 101 on are not all in"),
        ({"start": 101, "rows": 0}, "from byte 101 on are not all in"),
        ({"start": 2**64 - 1, "row_bytes": 2}, "are not all in"),
        ({"row_bytes": 2**64 - 1}, "are not all in"),
        (ROWS | {"start": 31}, "4 rows of 10 bytes from byte 31 on are not all in a tensor of 100 bytes"),
        (ROWS | {"rows": 6}, "6 rows of 10 bytes from byte 0 on are not all in"),
        (ROWS | {"source_stride": 31}, "are not all in"),
        (ROWS | {"rows": 2**64 - 1}, "are not all in"),
        (ROWS | {"source_stride": 2**63}, "are not all in"),
        (ROWS | {"source_stride": 2**64 // 3 + 1}, "are not all in"),  # 3 strides are 2 bytes modulo 2**64
        (ROWS | {"source_stride": 9}, "overlap, with strides of 9 and 20 bytes"),
        (ROWS | {"destination_stride": 9}, "overlap, with strides of 20 and 9 bytes"),
        (ROWS | {"destination_stride": 0}, "overlap"),
        (ROWS | {"destination_stride": 2**63}, "no memory is large enough for 4 rows of 10 bytes"),
        (ROWS | {"destination_stride": 2**64 // 3 + 1}, "no memory is large enough"),
        (ROWS | {"destination": 2**64 - 70}, "no memory is large enough"),
        ({"destination": 2**64 - 100}, "no memory is large enough for 100 bytes"),
        ({"crcs": []}, "0 CRCs for 1 blocks"),
        ({"crcs": [1, 2]}, "2 CRCs for 1 blocks"),
        ({"crcs": None, "row_bytes": 101}, "are not all in a tensor of 100 bytes"),
        ({"destination": 0}, "null address for 100 bytes"),
        ({"offset": 2**63 - 50}, "no file has"),
        ({"offset": 2**63}, "no file has"),
        ({"device": 0}, "need pinned buffers"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, object], message: str) -> None:
    job = _native.ReadJob(["/a"], threads=1, piece_bytes=4096, block_bytes=4096)
    with pytest.raises(ValueError, match=message):
        job.add(**(WHOLE | change))


@pytest.mark.parametrize(
    "change",
    [
        {"source_stride": 1, "destination_stride": 2**64 - 1},  # of one row
        ROWS | {"start": 30},
        ROWS | {"source_stride": 10, "destination_stride": 10},
        ROWS | {"rows": 5},
        {"destination": 2**64 - 101},
        {"crcs": None},
    ],
)
def test_what_just_fits_is_not_refused(change: dict[str, object]) -> None:
    job = _native.ReadJob(["/a"], threads=1, piece_bytes=4096, block_bytes=4096)
    assert job.add(**(WHOLE | change)) == 0


@pytest.mark.parametrize(
    "change", [{"threads": 0}, {"block_bytes": 0}, {"piece_bytes": 2**64 - 1}, {"block_bytes": 2**63 + 1}]
)
def test_settings_that_cannot_be_meant_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"threads|block"):
        _native.ReadJob([], **({"threads": 1, "piece_bytes": 4096, "block_bytes": 4096} | change))


def test_buffers_that_do_not_fit_into_memory(tmp_path: Path) -> None:
    nbytes = 1 << 50
    job = _native.ReadJob([str(tmp_path / "a")], threads=2, piece_bytes=0, block_bytes=nbytes)
    target = torch.zeros(1)
    job.add(0, 0, nbytes, [0], 0, 1, 1, 0, target.data_ptr(), 0)
    with pytest.raises(MemoryError, match="bytes of host memory"):
        job.run()


def test_a_damaged_block_is_a_value_error_with_three_numbers() -> None:
    assert issubclass(_native.DamagedBlock, ValueError)


@pytest.mark.skipif(torch.cuda.is_available() and _native.built_with_cuda, reason="needs a machine without a GPU")
def test_without_a_gpu_reads_to_one_are_refused() -> None:
    job = _native.ReadJob(["/a"], threads=1, piece_bytes=4096, block_bytes=4096, pinned=True)
    with pytest.raises(RuntimeError, match="CUDA"):
        job.add(0, 0, 4, [1], 0, 4, 1, 0, 4096, 0, device=0)


def test_a_job_keeps_the_owner_of_a_destination(tmp_path: Path) -> None:
    file = StoredFile(tmp_path / "a", bytearray(b"\x09" * 5000), 4096, [(0, 5000)])
    buffer = _native.HostBuffer(8192)
    references = sys.getrefcount(buffer)
    job = job_of([file])
    job.add(0, 0, 5000, file.crcs[0], 0, 5000, 1, 0, buffer.address, 0, owner=buffer)
    assert sys.getrefcount(buffer) == references + 1
    view = memoryview(buffer)
    del buffer
    job.run()
    assert bytes(view[:5001]) == b"\x09" * 5000 + b"\0"
    held = sys.getrefcount(view.obj)
    del job
    after = sys.getrefcount(view.obj)  # not inside the assert, which pytest rewrites so that it holds view.obj
    assert after == held - 1


def test_jobs_use_the_same_buffers_again_until_they_are_freed(tmp_path: Path) -> None:
    file = stored(tmp_path / "a", [2_000_000], 1, 4096)
    _native.free_idle_buffers()
    for _ in range(4):
        job = job_of([file], threads=2, piece_bytes=1 << 20)
        wanted = Reads(2_000_010)
        wanted.add(job, 0, file, 0, 0, 2_000_000)
        job.run()
        wanted.check()
    assert 1 << 20 <= _native.free_idle_buffers() <= job.scratch_bytes
    assert _native.free_idle_buffers() == 0


def test_references_do_not_leak() -> None:
    job = _native.ReadJob(["/a"], threads=1, piece_bytes=4096, block_bytes=4096)
    crcs = [123456789]
    before = sys.getrefcount(crcs)
    job.add(0, 0, 4, crcs, 0, 4, 1, 0, 4096, 0)
    assert sys.getrefcount(crcs) == before
