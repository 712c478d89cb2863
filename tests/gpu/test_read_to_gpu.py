import functools
import random
import zlib
from pathlib import Path

import pytest
import torch

from mcore_ckpt.io import _native

BLOCK = 1 << 20
POISON = 0xA5


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    data = random.Random(1).randbytes(50_000_003)
    (tmp_path / "file").write_bytes(data)
    return data


def job_of(folder: Path, threads: int) -> _native.ReadJob:
    return _native.ReadJob(
        [str(folder / "file")], threads=threads, piece_bytes=4 * BLOCK, block_bytes=BLOCK, pinned=True
    )


@functools.cache
def crcs(data: bytes) -> list[int]:
    return [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


def add(job: _native.ReadJob, data: bytes, start: int, nbytes: int, address: int) -> None:
    job.add(0, 0, len(data), crcs(data), start, nbytes, 1, 0, address, 0, device=torch.cuda.current_device())


@pytest.mark.parametrize("threads", [1, 4])
def test_ranges_arrive_on_the_gpu_and_nothing_else(tmp_path: Path, data: bytes, threads: int) -> None:
    order = random.Random(threads)
    for _ in range(20):
        job = job_of(tmp_path, threads)
        wanted = torch.full((60_000_000,), POISON, dtype=torch.uint8, device="cuda")
        expected = bytearray([POISON]) * wanted.numel()
        end = 1
        while end < 45_000_000:
            start = order.randrange(len(data))
            stop = min(len(data), start + order.choice([1, 1000, 12_000_000]))
            add(job, data, start, stop - start, wanted.data_ptr() + end)
            expected[end : end + stop - start] = data[start:stop]
            end += stop - start + 5
        job.run()
        assert wanted.cpu().numpy().tobytes() == bytes(expected)


@pytest.mark.parametrize(
    ("row_bytes", "source_stride", "destination_stride"),
    [(1, 300, 2), (11_008, 22_016, 11_008), (11_008, 11_008, 22_016), (3_000_000, 3_000_001, 3_000_005), (7, 7, 7)],
)
def test_rows_arrive_on_the_gpu_and_nothing_else(
    tmp_path: Path, data: bytes, row_bytes: int, source_stride: int, destination_stride: int
) -> None:
    start, rows = 12_345, (len(data) - 12_345 - row_bytes) // source_stride + 1
    wanted = torch.full((rows * destination_stride + 2,), POISON, dtype=torch.uint8, device="cuda")
    expected = torch.full((rows * destination_stride + 2,), POISON, dtype=torch.uint8)
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8)[start:]
    shape = (rows, row_bytes)
    expected[1:].as_strided(shape, (destination_stride, 1), 1).copy_(source.as_strided(shape, (source_stride, 1)))
    job = job_of(tmp_path, 3)
    what = (start, row_bytes, rows, source_stride, wanted.data_ptr() + 1, destination_stride)
    job.add(0, 0, len(data), crcs(data), *what, device=torch.cuda.current_device())
    job.run()
    assert torch.equal(wanted.cpu(), expected)


# No GPU copies such rows with one call.
def test_rows_that_are_far_apart_arrive_on_the_gpu(tmp_path: Path, data: bytes) -> None:
    stride = (1 << 31) + 512
    try:
        wanted = torch.empty(2 * stride + 1000, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("needs 4 GiB of GPU memory")
    job = job_of(tmp_path, 1)
    job.add(
        0, 0, len(data), crcs(data), 5, 1000, 3, 2000, wanted.data_ptr(), stride, device=torch.cuda.current_device()
    )
    job.run()
    for row in range(3):
        assert wanted[row * stride :][:1000].cpu().numpy().tobytes() == data[5 + row * 2000 :][:1000]


def test_what_is_queued_on_the_gpu_comes_first(tmp_path: Path, data: bytes) -> None:
    wanted = torch.empty(len(data), dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(500_000_000)
    wanted.fill_(POISON)
    job = job_of(tmp_path, 2)
    add(job, data, 0, len(data), wanted.data_ptr())
    job.run()
    assert wanted.cpu().numpy().tobytes() == data


def test_bytes_of_a_damaged_block_do_not_reach_the_gpu(tmp_path: Path, data: bytes) -> None:
    with (tmp_path / "file").open("r+b") as file:
        file.seek(7 * BLOCK + 5)
        file.write(bytes([data[7 * BLOCK + 5] ^ 1]))
    wanted = torch.full((len(data),), POISON, dtype=torch.uint8, device="cuda")
    job = job_of(tmp_path, 3)
    add(job, data, 0, len(data), wanted.data_ptr())
    with pytest.raises(_native.DamagedBlock) as error:
        job.run()
    assert error.value.args == (0, 7 * BLOCK, BLOCK)
    assert wanted[7 * BLOCK : 8 * BLOCK].eq(POISON).all()


def test_host_memory_is_no_gpu_memory(tmp_path: Path, data: bytes) -> None:
    target = torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not in GPU memory"):
        job_of(tmp_path, 1).add(0, 0, 10, [1], 0, 10, 1, 0, target.data_ptr(), 0, device=torch.cuda.current_device())
