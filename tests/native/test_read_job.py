import errno
import os
import random
import sys
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_ckpt import _native

KIBIBYTE = 1 << 10
POISON = 0xA5
PAGE = 4096

many_files = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class StoredFile:
    """A file of random bytes, tensors in it, and their checksums."""

    path: Path
    data: bytearray
    block_bytes: int
    tensors: list[tuple[int, int]]
    crcs: list[list[int]] = field(init=False)

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
        read = job.add(number, offset, nbytes, file.crcs[tensor], start, stop, address)
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


def test_an_error_ends_the_work_of_all_threads(tmp_path: Path) -> None:
    files = [stored(tmp_path / str(i), [500_000], i, 4096) for i in range(2)]
    files[0].damage(files[0].tensors[0][0])
    job = job_of(files, threads=4, piece_bytes=4096)
    wanted = Reads(1_000_010)
    for number, file in enumerate(files):
        wanted.add(job, number, file, 0, 0, 500_000)
    with pytest.raises(_native.DamagedBlock):
        job.run()
    at_return = job.progress()
    assert at_return < 500_000
    before = wanted.memory.clone()
    with pytest.raises(ValueError, match="has run"):
        job.run()
    assert job.progress() == at_return
    assert torch.equal(before, wanted.memory)


def test_cancel_from_another_thread(tmp_path: Path) -> None:
    block, count = 1 << 20, 8192
    path = tmp_path / "zeros"
    path.touch()
    os.truncate(path, count * block)
    job = _native.ReadJob([str(path)], threads=2, piece_bytes=block, block_bytes=block, direct=False)
    target = torch.empty(block, dtype=torch.uint8)
    crc = zlib.crc32(bytes(block))
    for number in range(count):
        job.add(0, number * block, block, [crc], 0, block, target.data_ptr())

    def cancel() -> None:
        while job.progress() == 0:
            pass
        job.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(RuntimeError, match=r"^cancelled$"):
        job.run()
    thread.join()
    assert 0 < job.progress() < count * block


def test_an_error_is_told_rather_than_that_somebody_gave_up(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    # With O_DIRECT it would be opened twice, and the second time nobody might be there any more.
    job = _native.ReadJob([str(path)], threads=1, piece_bytes=4096, block_bytes=4096, direct=False)
    target = torch.full((8192,), POISON, dtype=torch.uint8)
    job.add(0, 0, 8192, [0, 0], 0, 8192, target.data_ptr())

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
    assert job.add(0, 5, 0, [], 0, 0, 0) == 0
    assert job.add(0, 5, 10, [7], 3, 3, 0) == 1
    job.run()
    assert job.progress() == 0


def test_scratch_memory_is_what_its_settings_say() -> None:
    job = _native.ReadJob([], threads=3, piece_bytes=1 << 20, block_bytes=4096)
    assert 3 << 20 <= job.scratch_bytes <= 3 * ((1 << 20) + PAGE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": 1}, "no file 1 among 1"),
        ({"start": 5, "stop": 4}, r"\[5, 4\) is no range"),
        ({"stop": 101}, r"\[0, 101\) is no range of a tensor of 100 bytes"),
        ({"crcs": []}, "0 CRCs for 1 blocks"),
        ({"crcs": [1, 2]}, "2 CRCs for 1 blocks"),
        ({"destination": 0}, "null address for 100 bytes"),
        ({"offset": 2**63 - 50}, "no file has"),
        ({"offset": 2**63}, "no file has"),
        ({"on_device": True}, "need pinned buffers"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, object], message: str) -> None:
    job = _native.ReadJob(["/a"], threads=1, piece_bytes=4096, block_bytes=4096)
    read = {"file": 0, "offset": 0, "nbytes": 100, "crcs": [1], "start": 0, "stop": 100, "destination": 4096} | change
    with pytest.raises(ValueError, match=message):
        job.add(**read)


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
    job.add(0, 0, nbytes, [0], 0, 1, target.data_ptr())
    with pytest.raises(MemoryError, match="bytes of host memory"):
        job.run()


def test_a_damaged_block_is_a_value_error_with_three_numbers() -> None:
    assert issubclass(_native.DamagedBlock, ValueError)


@pytest.mark.skipif(torch.cuda.is_available() and _native.built_with_cuda, reason="needs a machine without a GPU")
def test_without_a_gpu_reads_to_one_are_refused() -> None:
    job = _native.ReadJob(["/a"], threads=1, piece_bytes=4096, block_bytes=4096, pinned=True)
    with pytest.raises(RuntimeError, match="CUDA"):
        job.add(0, 0, 4, [1], 0, 4, 4096, on_device=True)


def test_references_do_not_leak() -> None:
    job = _native.ReadJob(["/a"], threads=1, piece_bytes=4096, block_bytes=4096)
    crcs = [123456789]
    before = sys.getrefcount(crcs)
    job.add(0, 0, 4, crcs, 0, 4, 4096)
    assert sys.getrefcount(crcs) == before
