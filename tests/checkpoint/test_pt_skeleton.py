"""Files made from an image: what torch, Python's zipfile and the index say of them."""

import ctypes
import math
import os
import struct
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.file_names import INDEX_RECORD
from mcore_ckpt.checkpoint.index import BLOCK_BYTES, FileIndex, decode_index
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.checkpoint.pt_skeleton import build_skeleton
from mcore_ckpt.formats.native.file_plan import StructureCache, plan_file
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.save.capture import FileTensors, arena_bytes, capture_copies
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region
from tests.support.checkpoints import Alone, write_alone

PATH = "optim/state.pt"
DESCRIPTOR = 0x08074B50  # the signature of a zip data descriptor: APPNOTE.TXT 4.3.9.3
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.complex64,
)

Tensors = dict[tuple[str, ...], torch.Tensor]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits, NaNs included; of a bool, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def request_of(tensors: Tensors, tree: tuple[str, ...] = ()) -> WriteRequest:
    writes = tuple(
        TensorWrite(path, ShardKey(path[0], path[-1]), Region.whole(tuple(t.shape)), t, tuple(t.shape))
        for path, t in tensors.items()
    )
    return WriteRequest(PATH, "optimizer", writes, tree=tree)


def write(
    folder: Path, tensors: Tensors, images: StructureCache | None = None, tree: tuple[str, ...] = ()
) -> WrittenFile:
    return write_alone(folder, request_of(tensors, tree), images)


def index_of(data: bytes, written: WrittenFile) -> FileIndex:
    place = written.index
    assert place is not None
    raw = data[place.offset : place.offset + place.size]
    assert zlib.crc32(raw) == place.crc32
    return decode_index(raw, PATH, place.offset)


def leaf(tree: Any, path: tuple[str, ...]) -> torch.Tensor:
    for part in path:
        tree = tree[part]
    return tree


def check(folder: Path, written: WrittenFile, tensors: Tensors) -> None:
    """The file holds exactly these tensors, whoever reads it."""
    file = folder / PATH
    for mmap in (False, True):
        opened = torch.load(file, weights_only=True, mmap=mmap)
        for path, tensor in tensors.items():
            found = leaf(opened, path)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert bits(found) == bits(tensor), (path, mmap)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[-1] == INDEX_RECORD
    data = file.read_bytes()
    assert (written.size, written.crc32) == (len(data), zlib.crc32(data))
    shards = index_of(data, written).shards
    assert [(s.key.name, s.key.kind) for s in shards] == [(path[0], path[-1]) for path in tensors]
    for shard, tensor in zip(shards, tensors.values(), strict=True):
        raw = data[shard.offset : shard.offset + shard.nbytes]
        assert raw == bits(tensor)
        if raw:  # Python's zipfile and torch look only into the directory; other programs, at what follows the bytes.
            assert struct.unpack_from("<II", data, shard.offset + shard.nbytes) == (DESCRIPTOR, zlib.crc32(raw))
        assert shard.crc32 == tuple(zlib.crc32(raw[i : i + BLOCK_BYTES]) for i in range(0, len(raw), BLOCK_BYTES))


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
leaves = st.builds(random_tensor, shapes, st.sampled_from(DTYPES), st.integers(0, 99))
kinds = st.dictionaries(st.sampled_from(["param", "exp_avg", "exp_avg_sq"]), leaves, max_size=3)
trees = st.dictionaries(st.sampled_from(["decoder.weight", "mtp.ä", "b"]), kinds)


@settings(deadline=None, max_examples=40)
@given(tree=trees)
def test_any_tree(tree: dict[str, dict[str, torch.Tensor]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tree")
    tensors: Tensors = {(name, kind): tensor for name, branch in tree.items() for kind, tensor in branch.items()}
    check(folder, write(folder, tensors), tensors)


def test_tensors_listed_in_another_order_than_their_tree_are_not_swapped(tmp_path: Path) -> None:
    """Pickle walks the tree: all of `a` before `b`. Of equal sizes, nothing in the file would show a swap."""
    order = [("a", "param"), ("b", "param"), ("a", "exp_avg")]
    tensors: Tensors = {path: random_tensor((10,), torch.float32, seed) for seed, path in enumerate(order)}
    try:
        write(tmp_path, tensors)
    except ValueError:
        return  # refused is as good
    opened = torch.load(tmp_path / PATH, weights_only=True)
    assert [bits(leaf(opened, path)) for path in order] == [bits(tensor) for tensor in tensors.values()]


def test_sizes_around_a_block_and_not_of_one_piece(tmp_path: Path) -> None:
    sizes = (BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5)
    tensors: Tensors = {(f"t{n}", "param"): random_tensor((n,), torch.uint8, n) for n in sizes}
    tensors["transposed", "param"] = random_tensor((300, 700), torch.float32).T
    tensors["strided", "param"] = random_tensor((50, 60), torch.bfloat16)[::3, 5:40:2]
    check(tmp_path, write(tmp_path, tensors), tensors)


def test_thousands_of_tensors(tmp_path: Path) -> None:
    tensors: Tensors = {
        (f"layers.{i}", "param"): random_tensor((i % 5, 3), DTYPES[i % len(DTYPES)], i) for i in range(2100)
    }
    check(tmp_path, write(tmp_path, tensors), tensors)


def test_a_rank_that_owns_nothing_writes_an_empty_state(tmp_path: Path) -> None:
    written = write(tmp_path, {}, tree=("state",))
    check(tmp_path, written, {})
    assert torch.load(tmp_path / PATH, weights_only=True) == {"state": {}}


def test_views_of_a_bucket_do_not_drag_it_along(tmp_path: Path) -> None:
    bucket = random_tensor((4 << 20,), torch.float32)
    tensors: Tensors = {
        (f"p{i}", "param"): torch.nn.Parameter(bucket[i * 999 : i * 999 + 60].view(6, 10)) for i in range(5)
    }
    written = write(tmp_path, tensors)
    check(tmp_path, written, tensors)
    assert written.size < 20_000


def test_an_image_serves_other_values_and_only_the_same_structure(tmp_path: Path) -> None:
    images = StructureCache()

    def some(seed: int, shape: tuple[int, ...] = (3, 100), dtype: torch.dtype = torch.float32) -> Tensors:
        return {("a", "param"): random_tensor(shape, dtype, seed), ("b", "param"): random_tensor((7,), dtype, seed + 1)}

    image = images.get(request_of(some(0)))
    for folder in ("0", "1", "2", "other0", "other1"):
        (tmp_path / folder).mkdir()
    for number, tensors in enumerate((some(0), some(5), some(9))):
        assert images.get(request_of(tensors)) is image
        check(tmp_path / str(number), write(tmp_path / str(number), tensors, images), tensors)
    for number, tensors in enumerate((some(1, shape=(4, 75)), some(1, dtype=torch.int32))):
        folder = tmp_path / f"other{number}"
        check(folder, write(folder, tensors, images), tensors)


def test_each_save_fills_in_every_byte_of_the_image(tmp_path: Path) -> None:
    """The arena holds an older, larger save: nothing of it may be left in the gaps. In place there is no arena."""
    tensors: Tensors = {(f"t{i}", "param"): random_tensor((i,), torch.int16, i) for i in range(40)}
    plan = plan_file(request_of(tensors), Alone.rank, StructureCache())
    (tmp_path / "in place").mkdir()
    files = [write(tmp_path / "in place", tensors)]
    for poison in (0x00, 0xFF):
        arena = HostMemory()
        buffer = arena.take(1 << 20)
        ctypes.memset(buffer.address, poison, 1 << 20)
        assert arena.take(arena_bytes([plan])) is buffer
        capture = capture_copies([plan], [FileTensors.of(list(tensors.values()))], buffer, None)
        (tmp_path / str(poison)).mkdir()
        with FileWriter(tmp_path / str(poison), capture.writes, Alone()) as writer:
            writer.start()
            files += writer.finish()
    assert files == [files[0]] * 3
    assert len({path.read_bytes() for path in tmp_path.glob(f"*/{PATH}")}) == 1


def test_beyond_4_gib_it_is_zip64(tmp_path: Path) -> None:
    """A sparse file: nothing of the payload is written, and only the small tensors' CRCs are asked for."""
    small = random_tensor((100,), torch.float32)
    big = torch.empty(5 << 30, dtype=torch.uint8)
    image = build_skeleton({"first": small, "big": big, "last": small.clone()}, [small, big, small.clone()])
    crc = zlib.crc32(bits(small))
    index = b'{"some":"index"}'
    tail = image.tail([crc, 0x1234ABCD, crc], index, zlib.crc32(index))
    file = tmp_path / "big.pt"
    with file.open("wb") as out:
        for offset, gap in image.gaps:
            os.pwrite(out.fileno(), gap, offset)
        for slot in (image.slots[0], image.slots[2]):
            os.pwrite(out.fileno(), bits(small), slot.offset)
        os.pwrite(out.fileno(), tail, image.records_end)
    assert image.slots[1].nbytes == 5 << 30
    assert image.slots[2].offset > 5 << 30
    assert file.stat().st_blocks * 512 < 1 << 20, "the payload was written"
    with zipfile.ZipFile(file) as archive:
        records = {record.filename: record for record in archive.infolist()}
        assert [records[f"archive/data/{i}"].file_size for i in range(3)] == [400, 5 << 30, 400]
        assert records["archive/data/1"].CRC == 0x1234ABCD
        # Reading them checks their CRCs and that their headers are where the zip64 fields say.
        assert archive.read("archive/data/0") == archive.read("archive/data/2") == bits(small)
        assert archive.read(INDEX_RECORD) == index
    with file.open("rb") as opened:
        opened.seek(image.index_offset)
        assert opened.read(len(index)) == index
    loaded = torch.load(file, weights_only=True, mmap=True)
    assert torch.equal(loaded["last"].view(torch.int32), small.view(torch.int32))
    assert loaded["big"].shape == (5 << 30,)


def test_payloads_and_gaps_are_the_whole_file_up_to_its_directory() -> None:
    tensors = [random_tensor((n,), torch.float32) for n in (3, 0, 70_000, 1)]
    image = build_skeleton({str(i): tensor for i, tensor in enumerate(tensors)}, tensors)
    spans = sorted([(offset, len(gap)) for offset, gap in image.gaps] + [(s.offset, s.nbytes) for s in image.slots])
    spans.append((image.records_end, 0))
    assert spans[0][0] == 0
    assert all(at + size == following for (at, size), (following, _) in pairwise(spans))


@pytest.mark.parametrize("named", [0, 2])
def test_tensors_that_are_not_those_of_the_tree_are_refused(named: int) -> None:
    tensor = torch.zeros(10)
    with pytest.raises(ValueError, match="archive"):
        build_skeleton({"a": tensor}, [tensor] * named)
    with pytest.raises(ValueError, match="does not match record"):
        build_skeleton({"a": tensor}, [torch.zeros(11)])
