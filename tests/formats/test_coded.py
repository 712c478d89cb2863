"""Coded shards: whatever rows of them are read, their values are what was coded, and other programs can tell."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.checkpoint.index import SCALE_REGION, FileIndex, decode_index, encode_index
from mcore_ckpt.checkpoint.manifest import decode_manifest, encode_manifest
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.native.coded import decoded
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.io.json_fields import FieldError
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import MODEL, PARAM, Coding, ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Piece, Region
from tests.support.checkpoints import manifest_of, write_alone

NAME = "decoder.layers.0.mlp.linear_fc1.weight"
ROWS, ROW = 6, 10
WHOLE = Region.whole((ROWS, ROW))
# What one rank owns.
OWNED = WHOLE.with_flat(7, 53)
VALUES = torch.randn(ROWS, ROW, generator=torch.Generator().manual_seed(1))
SCALE = torch.tensor([0.37])
BASIS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def halves() -> tuple[torch.Tensor, torch.Tensor]:
    """The upper halves of all values, and the lower ones of those that are owned."""
    lower = VALUES.view(torch.int16).view(ROWS, ROW, 2)[..., 0]
    upper = (VALUES.view(torch.int32) - lower.int()) >> 16
    return upper.short().view(torch.bfloat16), lower.reshape(-1)[slice(*OWNED.flat)].contiguous()


def write(kind: str, tensor: torch.Tensor, region: Region = OWNED, coding: Coding | None = None) -> TensorWrite:
    path = (NAME,) if kind == MODEL else ("state", NAME, kind)
    return TensorWrite(path, ShardKey(NAME, kind), region, tensor, tuple(tensor.shape), coding=coding)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> NativeReader:
    """Halves beside a model in two files, each with half of the rows; and moments of fp16 and fp8."""
    folder = tmp_path_factory.mktemp("coded")
    upper, lower = halves()
    fp16 = VALUES.reshape(-1)[slice(*OWNED.flat)].half()
    fp8 = VALUES.reshape(-1)[slice(*OWNED.flat)].to(torch.float8_e4m3fn).view(torch.uint8)
    state = [
        write(PARAM, lower, coding=Coding("int16", upper=MODEL)),
        write("exp_avg", fp16, coding=Coding("float16", scale="exp_avg_scale")),
        write("exp_avg_scale", SCALE, SCALE_REGION),
        write("exp_avg_sq", fp8, coding=Coding("uint8", scale="exp_avg_sq_scale")),
        write("exp_avg_sq_scale", SCALE, SCALE_REGION),
        replace(write("Q", BASIS, Region.whole((2, 2))), beside=PARAM),
    ]
    requests = [WriteRequest("optim/state.pt", "optimizer", tuple(state), tree=("state",))]
    for number in range(2):
        rows = slice(number * ROWS // 2, (number + 1) * ROWS // 2)
        piece = Piece((0, 0), (ROWS // 2, ROW), (rows.start, 0))
        region = Region((ROWS, ROW), (ROWS // 2, ROW), (piece,), (0, ROWS * ROW // 2))
        tensor = upper[rows].contiguous()
        requests.append(WriteRequest(f"model/{number}.pt", "model", (write(MODEL, tensor, region),)))
    files = [(0, write_alone(folder, request)) for request in requests]
    manifest = manifest_of(files, 1, 2, "0" * 32, "actor", ("actor",))
    manifest = replace(
        manifest, tensors=(NAME,), files=tuple(structs.replace(f, holds=Holds(((0, 0),))) for f in manifest.files)
    )
    return NativeReader(LocalFolder(folder), manifest)


def stored(reader: NativeReader, kind: str) -> StoredShard:
    key = ShardKey(NAME, kind)
    (shard,) = reader.shards(key, reader.files(key))
    return shard


def test_only_kinds_with_values_are_listed(reader: NativeReader) -> None:
    assert reader.kinds(NAME) == (PARAM, "exp_avg", "exp_avg_sq")
    assert all(reader.info(ShardKey(NAME, kind)).dtype == torch.float32 for kind in reader.kinds(NAME))  # type: ignore[union-attr]


def test_what_belongs_to_a_shard_is_found_for_exactly_this_shard(reader: NativeReader) -> None:
    key = ShardKey(NAME, PARAM)
    assert reader.bound_kinds(key) == ("Q",)
    found = reader.bound_to(key, OWNED)
    assert found is not None
    target = torch.zeros(2, 2)
    reader.read([(ReadRange(found["Q"], Rows(0, 0, 4)), target)])
    assert torch.equal(target, BASIS)
    assert reader.bound_to(key, WHOLE) is None
    assert reader.bound_to(ShardKey(NAME, MODEL), WHOLE) == {}


def test_the_format_is_as_new_as_it_needs_to_be(reader: NativeReader) -> None:
    assert reader.manifest.format_version == 2
    assert decode_manifest(encode_manifest(reader.manifest)) == reader.manifest
    plain = replace(reader.manifest, files=reader.manifest.files[1:])
    assert plain.format_version == 1
    assert b'"version"' not in encode_manifest(plain)


def test_another_program_needs_only_torch(reader: NativeReader) -> None:
    folder = reader.folder.place
    state = torch.load(folder / "optim/state.pt", weights_only=True)["state"][NAME]
    model = torch.cat([torch.load(folder / f"model/{n}.pt", weights_only=True)[NAME] for n in range(2)])
    upper = model.view(-1)[slice(*OWNED.flat)].view(torch.int16).int() << 16
    wanted = VALUES.view(-1)[slice(*OWNED.flat)]
    assert torch.equal((upper + state["param"].int()).view(torch.float32), wanted)
    assert torch.equal(state["exp_avg"].float() * state["exp_avg_scale"], wanted.half().float() * SCALE)
    fp8 = state["exp_avg_sq"].view(torch.float8_e4m3fn).float() * state["exp_avg_sq_scale"]
    assert torch.equal(fp8, wanted.to(torch.float8_e4m3fn).float() * SCALE)


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """Rows of the owned range."""
    numel = OWNED.numel
    row = draw(st.integers(1, numel))
    stride = draw(st.integers(row, row + 9))
    count = draw(st.integers(1, max(1, (numel - row) // stride + 1)))
    start = draw(st.integers(0, numel - row - (count - 1) * stride))
    gap, first = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    return Rows(start, first, row, count, stride, row + gap) if count > 1 else Rows(start, first, row)


@given(parts=st.lists(st.tuples(st.sampled_from([PARAM, "exp_avg", "exp_avg_sq", MODEL]), rows()), max_size=4))
def test_any_rows(reader: NativeReader, parts: list[tuple[str, Rows]]) -> None:
    owned = VALUES.view(-1)[slice(*OWNED.flat)]
    values = {
        PARAM: owned,
        "exp_avg": owned.half().float() * SCALE,
        "exp_avg_sq": owned.to(torch.float8_e4m3fn).float() * SCALE,
    }
    reads, wanted = [], []
    for kind, part in parts:
        if kind == MODEL:  # plain shards may be read together with coded ones
            shard = reader.shards(ShardKey(NAME, MODEL), reader.files(ShardKey(NAME, MODEL)))[0]
            reads.append((ReadRange(shard, Rows(3, 0, 5)), torch.zeros(5, dtype=torch.bfloat16)))
            wanted.append(halves()[0].view(-1)[3:8])
            continue
        target = torch.full((OWNED.numel * 5 + 10,), -1.0)
        expected = target.clone()
        for number in range(part.rows):
            source = part.start + number * part.source_stride
            there = part.destination + number * part.destination_stride
            expected[there : there + part.row] = values[kind][source : source + part.row]
        reads.append((ReadRange(stored(reader, kind), part), target))
        wanted.append(expected)
    reader.read(reads)
    assert all(torch.equal(target, expected) for (_, target), expected in zip(reads, wanted, strict=True))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20))
def test_halves_of_any_bits_make_up_the_value(bits: list[int]) -> None:
    value = torch.tensor(bits, dtype=torch.int32)
    lower = value.view(torch.int16)[::2]
    upper = ((value - lower.int()) >> 16).short().view(torch.bfloat16)
    assert torch.equal(decoded(lower, None, upper).view(torch.int32), value)


def test_a_model_without_the_upper_halves_is_damage(reader: NativeReader) -> None:
    files = [file for file in reader.manifest.files if file.path != "model/1.pt"]
    part = NativeReader(reader.folder, replace(reader.manifest, files=tuple(files)))
    with pytest.raises(CheckpointCorruptError, match=r"optim/state.pt: .*\(param\): has only the lower 16 bits"):
        part.read([(ReadRange(stored(part, PARAM), Rows(0, 0, 1)), torch.zeros(1))])


# -- the index -----------------------------------------------------------------------------------------------

Edit = Callable[[list[dict[str, Any]]], Any]
EDITS: dict[str, Edit] = {
    "no-scale": lambda tensors: tensors.pop(2),
    "scale-of-another-shape": lambda tensors: tensors[2].update(
        local_shape=[1, 1], global_shape=[1, 1], pieces=[[[0, 0], [1, 1], [0, 0]]]
    ),
    "scale-of-another-dtype": lambda tensors: tensors[2].update(dtype="int32"),
    "scale-itself-coded": lambda tensors: tensors[1].update(scale="exp_avg"),
    "scaled-integers": lambda tensors: tensors[0].update(scale="exp_avg_scale"),
    "both": lambda tensors: tensors[1].update(upper="model"),
    "no-name": lambda tensors: tensors[1].update(scale=5),
    "halves-of-floats": lambda tensors: tensors[0].update(dtype="float16"),
    "beside-nothing": lambda tensors: tensors[5].update(beside="model"),
    "beside-itself": lambda tensors: tensors[5].update(beside="Q"),
    "beside-and-a-part": lambda tensors: tensors[5].update(flat=[0, 2], nbytes=8),
    "upper-nowhere": lambda tensors: tensors[0].update(upper="param_upper"),
    "upper-of-another-dtype": lambda tensors: tensors[0].update(upper="exp_avg"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_codings_that_cannot_be_are_refused(edit: Edit, reader: NativeReader) -> None:
    key = ShardKey(NAME, PARAM)
    shards = [shard for file in reader.files(key) for shard in reader.folder.index(file).of(NAME).shards]
    record = json.loads(encode_index(FileIndex(tuple(shards), ())))
    assert decode_index(json.dumps(record).encode(), "a", 1 << 40).version == 2
    edit(record["tensors"])
    with pytest.raises(FieldError):
        decode_index(json.dumps(record).encode(), "a", 1 << 40)


def test_the_dtypes_that_the_fields_name(reader: NativeReader) -> None:
    codings = {kind: stored(reader, kind).as_stored.dtype for kind in (PARAM, "exp_avg", "exp_avg_sq")}
    assert codings == {PARAM: "int16", "exp_avg": "float16", "exp_avg_sq": dtype_name(torch.uint8)}
