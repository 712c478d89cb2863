"""The index inside a file: what goes in comes out, and nothing that contradicts itself does."""

import copy
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.element_sizes import item_bytes
from mcore_ckpt.checkpoint.index import (
    BLOCK_BYTES,
    Alias,
    FileIndex,
    IndexTemplate,
    block_count,
    decode_index,
    encode_index,
)
from mcore_ckpt.io.json_fields import FieldError, decode
from mcore_ckpt.sharding.plan import ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Piece, Region

FILE = "optim/a.pt"
END = 1 << 40

# What can be printed.
names = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)
kinds = st.sampled_from(["model", "param", "exp_avg", "opaque"])
dtypes = st.sampled_from(["float32", "bfloat16", "int16", "bool", "float8_e4m3fn"])
crcs = st.integers(0, 2**32 - 1)


@st.composite
def regions(draw: st.DrawFn) -> Region:
    local = draw(st.lists(st.integers(0, 1000), max_size=3).map(tuple))
    offset = draw(st.tuples(*[st.integers(0, 1000) for _ in local]))
    whole = tuple(n + o for n, o in zip(local, offset, strict=True))
    start, stop = sorted(draw(st.lists(st.integers(0, math.prod(local)), min_size=2, max_size=2)))
    return Region(whole, local, (Piece((0,) * len(local), local, offset),), (start, stop))


@st.composite
def indexes(draw: st.DrawFn) -> FileIndex:
    shards, position = [], 0
    for _ in range(draw(st.integers(0, 4))):
        region, dtype = draw(regions()), draw(dtypes)
        nbytes = region.numel * item_bytes(dtype)
        position += draw(st.integers(0, 500))
        blocks = tuple(draw(crcs) for _ in range(min(block_count(nbytes), 3)))
        blocks += (0,) * (block_count(nbytes) - len(blocks))
        shards.append(StoredShard(ShardKey(draw(names), draw(kinds)), region, dtype, FILE, position, nbytes, blocks))
        position += nbytes
    aliases = draw(st.lists(st.builds(Alias, st.builds(ShardKey, names, kinds), kinds, regions(), dtypes), max_size=2))
    seen = {shard.key for shard in shards}
    assume(len(seen) == len(shards) and len(seen | {alias.key for alias in aliases}) == len(shards) + len(aliases))
    return FileIndex(tuple(shards), tuple(aliases))


@settings(deadline=None)
@given(indexes())
def test_round_trip(index: FileIndex) -> None:
    assert decode_index(encode_index(index), FILE, END) == index


# What would end a record early if it were taken literally.
hostile_names = names | st.sampled_from(['"crc32":[]', '"', "\\", '","crc32":[],"x":"', '"crc32":[1]'])


@settings(deadline=None)
@given(index=indexes(), renamed=st.lists(hostile_names, min_size=6, max_size=6))
def test_a_template_with_crcs_filled_in_is_the_index(index: FileIndex, renamed: list[str]) -> None:
    shards = tuple(replace(s, key=ShardKey(renamed[i], renamed[i])) for i, s in enumerate(index.shards))
    aliases = tuple(replace(a, key=ShardKey(renamed[4 + i], renamed[4 + i])) for i, a in enumerate(index.aliases))
    index = FileIndex(shards, aliases)
    template = IndexTemplate(FileIndex(tuple(replace(shard, crc32=()) for shard in shards), aliases))
    filled_in = [crc for shard in shards for crc in shard.crc32]
    # Twice: it serves one save after another.
    for crcs_of_a_save in ([0] * len(filled_in), filled_in):
        done = template.encode(crcs_of_a_save)
    assert done == encode_index(index)


@pytest.mark.parametrize("count", [3, 5])
def test_a_template_with_another_number_of_crcs_is_refused(count: int) -> None:
    index = decode_index(json.dumps(two_shards()).encode(), FILE, END)
    template = IndexTemplate(FileIndex(tuple(replace(shard, crc32=()) for shard in index.shards), index.aliases))
    template.encode([1] * 4)
    with pytest.raises(ValueError, match=f"{count} CRCs for 4 blocks"):
        template.encode([1] * count)


def two_shards() -> dict[str, Any]:
    """The JSON of an index of two tensors, 96 bytes at 640 and 2 MiB + 2 bytes at 1024."""
    cut = Region((12, 4), (6, 4), (Piece((0, 0), (3, 4), (0, 0)), Piece((3, 0), (3, 4), (6, 0))), (0, 24))
    vector = Region.whole((BLOCK_BYTES + 1,))
    shards = (
        StoredShard(ShardKey("a", "model"), cut, "float32", FILE, 640, 96, (1,)),
        StoredShard(ShardKey("b", "model"), vector, "bfloat16", FILE, 1024, 2 * BLOCK_BYTES + 2, (1, 2, 3)),
    )
    return json.loads(encode_index(FileIndex(shards, (Alias(ShardKey("a", "param"), "model", cut, "float32"),))))


Edit = Callable[[dict[str, Any]], Any]

EDITS: dict[str, Edit] = {
    "another-format": lambda r: r.update(format="mcore_ckpt"),
    "another-version": lambda r: r.update(version=3),
    "another-block": lambda r: r.update(block_bytes=4096),
    "no-tensors": lambda r: r.pop("tensors"),
    "tensors-an-object": lambda r: r.update(tensors={}),
    "name-a-number": lambda r: r["tensors"][0].update(name=5),
    "overlap": lambda r: r["tensors"][1].update(offset=735),
    "same-place": lambda r: r["tensors"][1].update(offset=640),
    "leaves-the-payload": lambda r: r["tensors"][1].update(offset=END - 5),
    "offset-negative": lambda r: r["tensors"][0].update(offset=-1),
    "crc-of-33-bits": lambda r: r["tensors"][0].update(crc32=[2**32]),
    "pieces-many": lambda r: r["tensors"][0].update(pieces=r["tensors"][0]["pieces"] * 65),
    "tensor-twice": lambda r: r["tensors"][1].update({k: r["tensors"][0][k] for k in ("name", "kind")}),
    "offset-a-float": lambda r: r["tensors"][0].update(offset=640.0),
    "offset-true": lambda r: r["tensors"][0].update(offset=True),
    "offset-beyond-int64": lambda r: r["tensors"][0].update(offset=2**63),
    "too-few-bytes": lambda r: r["tensors"][0].update(nbytes=92),
    "a-crc-too-few": lambda r: r["tensors"][1].update(crc32=[1, 2]),
    "a-crc-too-many": lambda r: r["tensors"][0].update(crc32=[1, 2]),
    "unknown-dtype": lambda r: r["tensors"][0].update(dtype="object"),
    "enormous-shape": lambda r: r["tensors"][1].update(local_shape=[2**61, 2**61]),
    "enormous-and-whole": lambda r: r["tensors"][1].update(
        local_shape=[2**40, 2**40], global_shape=[2**40, 2**40], pieces=[[[0, 0], [2**40, 2**40], [0, 0]]]
    ),
    "shape-negative": lambda r: r["tensors"][1].update(local_shape=[-5]),
    "piece-of-two-parts": lambda r: r["tensors"][0]["pieces"][0].pop(),
    "piece-missing": lambda r: r["tensors"][0]["pieces"].pop(),
    "pieces-overlap": lambda r: r["tensors"][0]["pieces"].__setitem__(1, r["tensors"][0]["pieces"][0]),
    "piece-leaves-the-tensor": lambda r: r["tensors"][0]["pieces"][1].__setitem__(2, [10, 0]),
    "flat-of-three": lambda r: r["tensors"][0].update(flat=[0, 24, 24]),
    "flat-too-far": lambda r: r["tensors"][0].update(flat=[1, 25]),
    "flat-backwards": lambda r: r["tensors"][0].update(flat=[24, 0]),
    "alias-without-target": lambda r: r["aliases"][0].pop("same_as"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_contradictions_are_refused(edit: Edit) -> None:
    record = two_shards()
    decode_index(json.dumps(record).encode(), FILE, END)
    edit(record)
    with pytest.raises(FieldError):
        decode_index(json.dumps(record).encode(), FILE, END)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flat", None),
        ("local_shape", [6.0, 4]),
        ("global_shape", [12, "4"]),
        ("pieces", [[[False, 0], [6, 4], [0, 0]]]),
    ],
)
def test_a_region_that_has_been_read_excuses_no_other(field: str, value: Any) -> None:
    """What compares equal, or is absent in one, is not the same."""
    record = two_shards()
    region = Region.whole((6, 4))
    first = StoredShard(ShardKey("c", "model"), region, "float32", FILE, 0, 96, (1,))
    second = replace(first, key=ShardKey("d", "model"), offset=96)
    record["tensors"] = json.loads(encode_index(FileIndex((first, second), ())))["tensors"]
    decoded = decode_index(json.dumps(record).encode(), FILE, END)
    assert decoded.shards == (first, second)
    record["tensors"][1][field] = value
    with pytest.raises(FieldError):
        decode_index(json.dumps(record).encode(), FILE, END)


def test_the_payload_may_end_with_the_last_tensor_and_not_before() -> None:
    data = json.dumps(two_shards()).encode()
    end = 1024 + 2 * BLOCK_BYTES + 2
    decode_index(data, FILE, end)
    with pytest.raises(FieldError, match=rf"reach past the payload of {end - 1} bytes"):
        decode_index(data, FILE, end - 1)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in [(*path, key), *places(item, (*path, key))]]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(2**62),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    record = copy.deepcopy(two_shards())
    *parents, last = data.draw(st.sampled_from(places(record)))
    holder: Any = record
    for key in parents:
        holder = holder[key]
    holder[last] = data.draw(json_values)
    try:
        index = decode_index(json.dumps(record).encode(), FILE, END)
    except FieldError:
        return
    for shard in index.shards:
        shard.region.check()
        assert shard.offset + shard.nbytes <= END
    assert decode_index(encode_index(index), FILE, END) == index


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 10_000), cut=st.integers(0, 20), put=st.binary(max_size=20))
def test_any_bytes_anywhere_are_read_or_refused(at: int, cut: int, put: bytes) -> None:
    data = json.dumps(two_shards()).encode()
    at %= len(data)
    with suppress(FieldError):
        decode_index(data[:at] + put + data[at + cut :], FILE, END)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"[" * 200_000, id="deep-list"),
        pytest.param(b'{"a":' * 200_000, id="deep-object"),
        pytest.param(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep-and-complete"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", id="long-number"),
        pytest.param(b'{"a":\xff}', id="not-utf8"),
        pytest.param(b'"\xed\xa0\x80"', id="surrogate"),
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="a-list"),
        pytest.param(b"\x00" * 64, id="zeros"),
    ],
)
def test_json_that_is_none_or_too_much(data: bytes) -> None:
    with pytest.raises(FieldError):
        decode(data)
    with pytest.raises(FieldError):
        decode_index(data, FILE, END)
