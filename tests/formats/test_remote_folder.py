"""Rows of tensors out of a remote store: the same bytes as the native reader's, and no more requests than they need."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.formats.native import remote_folder
from mcore_ckpt.formats.native.ranges import read_stored
from mcore_ckpt.formats.native.remote_folder import RemoteFolder, plan_fetches
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.store import Store
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region

BLOCK = 64
FILE = "optim/tensors.bin"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(tuning, "REMOTE_READ_BYTES", 5 * BLOCK)
    monkeypatch.setattr(tuning, "REMOTE_GAP_BYTES", BLOCK)


@st.composite
def rows_of(draw: st.DrawFn, numel: int) -> Rows:
    """Any rows that a tensor of so many elements has, to places that do not overlap."""
    row = draw(st.integers(1, numel))
    start = draw(st.integers(0, numel - row))
    stride = draw(st.integers(row, max(row, numel)))
    rows = draw(st.integers(1, (numel - start - row) // stride + 1))
    gap = draw(st.integers(0, 3))
    if rows == 1:
        return Rows(start, draw(st.integers(0, 5)), row)
    return Rows(start, draw(st.integers(0, 5)), row, rows, stride, row + gap)


@st.composite
def tensors_and_rows(draw: st.DrawFn) -> list[tuple[torch.dtype, int, Rows]]:
    """Tensors of a file, one after the other: dtype, elements, and what is wanted of each."""
    dtypes = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64])
    result = []
    for _ in range(draw(st.integers(1, 4))):
        numel = draw(st.integers(1, 300))
        result.append((draw(dtypes), numel, draw(rows_of(numel))))
    return result


def written(path: Path, wanted: list[tuple[torch.dtype, int, Rows]]) -> list[ReadRange]:
    """A file of these tensors, no two bytes near each other alike, each at an odd place."""
    data, reads = bytearray(), []
    for number, (dtype, numel, rows) in enumerate(wanted):
        data += b"\xff" * 7
        payload = bytes((31 * i + number) % 251 for i in range(numel * dtype.itemsize))
        memory = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        crcs = tuple(_native.crc32_blocks(memory.data_ptr(), memory.nbytes, BLOCK))
        region = Region.whole((numel,))
        key = ShardKey(f"t{number}", "exp_avg")
        reads.append(ReadRange(StoredShard(key, region, dtype_name(dtype), FILE, len(data), len(payload), crcs), rows))
        data += payload
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return reads


def targets_of(reads: list[ReadRange]) -> list[torch.Tensor]:
    sizes = [r.rows.destination + r.rows.rows * max(r.rows.destination_stride, r.rows.row) + 3 for r in reads]
    return [torch.zeros(size, dtype=getattr(torch, read.stored.dtype)) for size, read in zip(sizes, reads, strict=True)]


@settings(max_examples=150, deadline=None)
@given(wanted=tensors_and_rows())
def test_rows_arrive_as_the_native_reader_brings_them(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[torch.dtype, int, Rows]]
) -> None:
    root = tmp_path_factory.mktemp("remote")
    reads = written(root / "key" / FILE, wanted)
    native, found = targets_of(reads), targets_of(reads)
    # Without CRCs: the native reader's blocks have another size.
    bare = [
        ReadRange(
            StoredShard(r.stored.key, r.stored.region, r.stored.dtype, FILE, r.stored.offset, r.stored.nbytes, None),
            r.rows,
        )
        for r in reads
    ]
    read_stored(root / "key", list(zip(bare, native, strict=True)))
    folder = RemoteFolder(Store(f"file://{root}"), "key")
    record = FileRecord(FILE, "optimizer", 0, (root / "key" / FILE).stat().st_size, 0)
    nbytes = folder.fill({FILE: record}, list(zip(reads, found, strict=True)))
    for here, there in zip(found, native, strict=True):
        assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))
    assert nbytes <= record.size


@settings(max_examples=150, deadline=None)
@given(wanted=tensors_and_rows())
def test_requests_are_of_whole_blocks_that_are_wanted_and_bounded(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[torch.dtype, int, Rows]]
) -> None:
    reads = written(tmp_path_factory.mktemp("remote") / FILE, wanted)
    fetches = list(plan_fetches(list(zip(reads, targets_of(reads), strict=True))))
    for fetch in fetches:
        assert fetch.stop - fetch.start <= tuning.REMOTE_READ_BYTES
    for read in reads:
        item = getattr(torch, read.stored.dtype).itemsize
        touched = {
            position * item // BLOCK
            for number in range(read.rows.rows)
            for position in range(
                read.rows.start + number * read.rows.source_stride,
                read.rows.start + number * read.rows.source_stride + read.rows.row,
            )
        }
        parts = [part for fetch in fetches for part in fetch.parts if part.read is read]
        covered = [block for p in parts for block in range(p.start // BLOCK, -(-p.stop // BLOCK))]
        assert sorted(covered) == sorted(touched)


def test_no_rows_are_no_request(tmp_path: Path) -> None:
    (read,) = written(tmp_path / FILE, [(torch.float32, 10, Rows(0, 0, 0))])
    assert list(plan_fetches([(read, torch.empty(0))])) == []
