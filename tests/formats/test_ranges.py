"""Reading back: any range, and nothing of a block that is not what was written."""

import gc
import os
import pickle
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.checkpoint.plain_files import pickle_plain, read_plain, write_plain
from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CommitError
from mcore_ckpt.formats.native import ranges
from mcore_ckpt.formats.native.ranges import read_ranges
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.pages import PAGE_BYTES
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region
from tests.support.checkpoints import write_alone

PATH = "optim/state.pt"
NAME = "decoder.layers.3.weight"
ITEM = 4
NUMEL = (3 * BLOCK_BYTES + 4000) // ITEM
BLOCKS = 4
POISON = 0xA5
CHUNK = 2 * BLOCK_BYTES


@dataclass(frozen=True)
class Written:
    """One file of two tensors; the larger one has 4 blocks, the last of them short."""

    folder: Path
    record: FileRecord
    shard: StoredShard
    tensor: torch.Tensor

    @property
    def path(self) -> Path:
        return self.folder / PATH

    def read(self, start: int, stop: int, destination: int = 0, space: int | None = None) -> torch.Tensor:
        """The poisoned target after a read."""
        target = poisoned(space if space is not None else stop - start + destination)
        self.read_into(target, start, stop, destination)
        return target

    def read_into(self, target: torch.Tensor, start: int, stop: int, destination: int = 0) -> int:
        read = ReadRange(self.shard, Rows(start, destination, stop - start))
        return read_ranges(self.folder, {PATH: self.record}, [(read, target)])

    def damage(self, at: int, mask: int = 0x10) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ mask]))


def poisoned(elements: int) -> torch.Tensor:
    return torch.full((elements * ITEM,), POISON, dtype=torch.uint8)


def random_floats(numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randint(0, 256, (numel * ITEM,), dtype=torch.uint8, generator=generator).view(torch.float32)


def write(folder: Path) -> Written:
    tensors = {"small": random_floats(10), NAME: random_floats(NUMEL)}
    writes = tuple(
        TensorWrite(("state", name), ShardKey(name, "exp_avg"), Region.whole(tuple(t.shape)), t, tuple(t.shape))
        for name, t in tensors.items()
    )
    written = write_alone(folder, WriteRequest(PATH, "optimizer", writes))
    record = FileRecord(PATH, written.kind, 3, written.size, written.crc32, written.index, Holds(((0, 1),)))
    index = read_index(folder, record)
    return Written(folder, record, index.shards[1], tensors[NAME])


@pytest.fixture
def written(tmp_path: Path, small_chunks: None) -> Written:
    return write(tmp_path)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("unharmed"))


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Two blocks at a time, so that a few blocks take several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "READ_BYTES", CHUNK)
        yield


ends = st.one_of(
    st.integers(0, NUMEL),
    st.builds(lambda k, d: min(max(k * BLOCK_BYTES // ITEM + d, 0), NUMEL), st.integers(0, BLOCKS), st.integers(-3, 3)),
)


@settings(deadline=None, max_examples=60)
@given(ends=st.lists(ends, min_size=2, max_size=2).map(sorted), destination=st.integers(0, 5), after=st.integers(0, 5))
def test_any_range(unharmed: Written, ends: list[int], destination: int, after: int) -> None:
    start, stop = ends
    space = destination + stop - start + after
    expected = poisoned(space)
    expected[destination * ITEM : (space - after) * ITEM] = unharmed.tensor[start:stop].view(torch.uint8)
    assert torch.equal(unharmed.read(start, stop, destination, space), expected)


def test_only_blocks_of_the_range_are_read(unharmed: Written) -> None:
    per_block = BLOCK_BYTES // ITEM
    for at, nbytes in ((per_block + 5, BLOCK_BYTES), (NUMEL - 1, 4000)):
        # Whole pages, where there is a disk behind the file.
        assert nbytes <= unharmed.read_into(poisoned(1), at, at + 1) <= nbytes + 2 * PAGE_BYTES
    for at in (0, 7, per_block, NUMEL):
        assert unharmed.read_into(poisoned(1), at, at) == 0


def test_many_ranges_of_several_files_at_once(tmp_path: Path) -> None:
    """Each goes to its own place, whatever the order they are asked for in, and no read is nothing to do."""
    files = []
    for name in "abc":
        (tmp_path / name).mkdir()
        files.append(write(tmp_path / name))
    paths = [f"{name}/{PATH}" for name in "abc"]
    records = {path: structs.replace(file.record, path=path) for path, file in zip(paths, files, strict=True)}
    reads, targets, step = [], [], NUMEL // 7
    for start in range(0, NUMEL, step):
        for path, file in zip(reversed(records), reversed(files), strict=True):
            targets.append((poisoned(step), file.tensor[start : start + step]))
            shard = replace(file.shard, file=path)
            reads.append((ReadRange(shard, Rows(start, 0, min(step, NUMEL - start))), targets[-1][0]))
    nbytes = read_ranges(tmp_path, records, reads)
    # A block that two ranges share may be read for each of them.
    assert 3 * NUMEL * ITEM <= nbytes <= 3 * (NUMEL * ITEM + 7 * (BLOCK_BYTES + 2 * PAGE_BYTES))
    for target, tensor in targets:
        assert torch.equal(target[: tensor.nbytes], tensor.view(torch.uint8))
        assert (target[tensor.nbytes :] == POISON).all()
    assert read_ranges(tmp_path, records, []) == 0


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("within", [0, 1777, -1])
def test_a_flipped_bit_is_named_and_not_applied(written: Written, block: int, within: int) -> None:
    low = block * BLOCK_BYTES
    high = min(low + BLOCK_BYTES, written.shard.nbytes)
    at = written.shard.offset
    written.damage(at + (low + within if within >= 0 else high + within))
    target = poisoned(NUMEL)
    with pytest.raises(CheckpointCorruptError) as raised:
        written.read_into(target, 0, NUMEL)
    for part in (str(written.path), f"{NAME} (exp_avg)", f"bytes [{at + low}, {at + high})"):
        assert part in str(raised.value)
    assert (target[low:high] == POISON).all(), "something of the block was applied"
    for other in range(0, len(target), BLOCK_BYTES):
        found, wanted = (t[other : other + BLOCK_BYTES] for t in (target, written.tensor.view(torch.uint8)))
        assert (found == POISON).all() or (other != low and torch.equal(found, wanted))


def test_a_range_that_touches_a_bad_block_by_one_element_is_refused_and_its_neighbours_are_not(
    written: Written,
) -> None:
    per_block = BLOCK_BYTES // ITEM
    written.damage(written.shard.offset + BLOCK_BYTES + 9)
    for start, stop in ((per_block - 3, per_block + 1), (2 * per_block - 1, 2 * per_block)):
        with pytest.raises(CheckpointCorruptError):
            written.read(start, stop)
    for start, stop in ((0, per_block), (2 * per_block, NUMEL)):
        assert torch.equal(written.read(start, stop).view(torch.int32), written.tensor[start:stop].view(torch.int32))


def missing(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (missing, r"missing; .* \d+ bytes, written by rank 3"),
        (cut, r"has \d+ bytes, not the \d+ of the manifest"),
        (longer, r"has \d+ bytes, not the \d+ of the manifest"),
        (a_folder, "state.pt"),
    ],
)
def test_a_file_that_is_not_the_manifests(written: Written, harm: Callable[[Path], None], reason: str) -> None:
    harm(written.path)
    for read in (lambda: written.read(0, 9), lambda: read_index(written.folder, written.record)):
        with pytest.raises(CheckpointCorruptError, match=reason) as raised:
            read()
        assert str(written.path) in str(raised.value)


def test_a_file_of_the_same_size_in_its_place(written: Written) -> None:
    written.path.write_bytes(bytes(written.record.size))
    with pytest.raises(CheckpointCorruptError, match=r"the index at byte \d+ has a wrong CRC"):
        read_index(written.folder, written.record)
    with pytest.raises(CheckpointCorruptError, match="wrong CRC"):
        written.read(0, NUMEL)


def test_a_file_cut_after_it_was_looked_at(written: Written) -> None:
    cut_at = written.shard.offset + 3 * BLOCK_BYTES + 100
    os.truncate(written.path, cut_at)
    found = replace(written, record=structs.replace(written.record, size=cut_at))
    target = poisoned(1)
    with pytest.raises(CheckpointCorruptError, match="the file was cut") as raised:
        found.read_into(target, NUMEL - 1, NUMEL)
    assert str(written.path) in str(raised.value)
    assert (target == POISON).all()


def test_an_index_with_a_good_checksum_and_bad_numbers(written: Written) -> None:
    assert written.record.index is not None
    forged = b'{"format":"mcore_ckpt.index","version":9}'
    with written.path.open("r+b") as file:
        file.seek(written.record.index.offset)
        file.write(forged)
    place = structs.replace(written.record.index, size=len(forged), crc32=zlib.crc32(forged))
    with pytest.raises(CheckpointCorruptError, match="index: not an index of version 1"):
        read_index(written.folder, structs.replace(written.record, index=place))


def test_a_manifest_that_is_missing_damaged_or_newer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="not a checkpoint"):
        read_manifest(tmp_path)
    for content, reason in (
        (b"", "not JSON"),
        (b"{}", "not a manifest"),
        (b'{"format":"mcore_ckpt","format_version":3}', "newer"),
    ):
        (tmp_path / "manifest.json").write_bytes(content)
        with pytest.raises(CheckpointCorruptError, match=rf"manifest\.json: .*{reason}"):
            read_manifest(tmp_path)


def plain_record(path: Path) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(path.name, "rng", 0, len(data), zlib.crc32(data))


def test_a_plain_file_round_trips_and_every_flipped_byte_is_found(tmp_path: Path) -> None:
    value = {"python": (3, (1, 2), None), "torch": torch.arange(5), "float": 0.25}
    done = write_plain(tmp_path, "rng.pt", "rng", pickle_plain(value))
    record = plain_record(tmp_path / "rng.pt")
    assert (record.size, record.crc32) == (done.size, done.crc32)
    read = read_plain(tmp_path, record)
    assert read.pop("torch").equal(value.pop("torch"))
    assert read == value
    data = (tmp_path / "rng.pt").read_bytes()
    for at in range(0, len(data), 7):
        (tmp_path / "rng.pt").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CheckpointCorruptError, match=r"rng\.pt: has a wrong CRC"):
            read_plain(tmp_path, record)


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("form", ["zip", "bare", "torch"])
def test_a_hostile_pickle_is_not_executed(form: str, tmp_path: Path) -> None:
    """Its CRC in the record is right, so the only guard is how it is opened."""
    marker, file = tmp_path / "executed", tmp_path / "rng.pt"
    if form == "torch":
        torch.save({"python": Hostile(marker)}, file)
    elif form == "bare":
        file.write_bytes(pickle.dumps({"python": Hostile(marker)}))
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"python": Hostile(marker)}))
            archive.writestr("archive/version", "3\n")
            archive.writestr("archive/byteorder", "little")
    with pytest.raises(CheckpointCorruptError, match="cannot be read as plain values"):
        read_plain(tmp_path, plain_record(file))
    assert not marker.exists()


@pytest.mark.parametrize("value", [[1, 2], torch.zeros(3), "text"])
def test_a_plain_file_that_holds_no_dict(value: object, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "rng.pt")
    with pytest.raises(CheckpointCorruptError, match="not a dict"):
        read_plain(tmp_path, plain_record(tmp_path / "rng.pt"))


def test_what_a_hung_gpu_may_still_write_to_is_never_freed(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hung:
        def __init__(self, *arguments: object, **named: object) -> None:
            self.owners: list[object] = []

        def add(self, *arguments: object, owner: object) -> None:
            self.owners.append(owner)

        def run(self) -> None:
            raise _native.DeviceStuck(3, 600.0)

    monkeypatch.setattr(_native, "ReadJob", Hung)
    target = poisoned(10)
    freed = weakref.ref(target)
    with pytest.raises(CommitError, match="GPU 3 has not done its work for 600 s"):
        written.read_into(target, 0, 10)
    del target
    gc.collect()
    assert freed() is not None
    ranges._hung.clear()
