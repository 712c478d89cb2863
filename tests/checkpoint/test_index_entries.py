"""An index that is decoded tensor by tensor says the same as one that is decoded as a whole, and refuses the same."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint import index_entries
from mcore_ckpt.checkpoint.index import Alias, FileIndex, decode_index, encode_index
from mcore_ckpt.checkpoint.index_entries import IndexEntries
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.sharding.plan import Coding, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Piece, Region

FILE = "optim/a.pt"
CUT = Region((12, 4), (6, 4), (Piece((0, 0), (3, 4), (0, 0)), Piece((3, 0), (3, 4), (6, 0))), (2, 24))
ONE = Region.whole((1,))
# All that an index can say: a flat range, a coded shard and its scale, a shard that belongs to another, an alias.
INDEX = FileIndex(
    (
        StoredShard(ShardKey("a", "param"), CUT, "float32", FILE, 640, 88, (1,)),
        StoredShard(ShardKey("a", "exp_avg"), CUT, "float32", FILE, 728, 22, (2,), Coding("uint8", scale="scale")),
        StoredShard(ShardKey("a", "scale"), ONE, "float32", FILE, 768, 4, (3,)),
        StoredShard(ShardKey("b", "param"), ONE, "float32", FILE, 1024, 4, (2**32 - 1,)),
        StoredShard(ShardKey("b", "basis"), ONE, "float32", FILE, 1028, 4, (5,), None, "param"),
        StoredShard(ShardKey("none", "param"), Region.whole((0,)), "float32", FILE, 1032, 0, ()),
    ),
    (Alias(ShardKey("c", "param"), "model", CUT, "float32"), Alias(ShardKey("a", "other"), "param", ONE, "bfloat16")),
)
END = 1032
# What would end an entry, or the list of entries, early if it were taken literally.
ODD_NAMES = ["a", 'a"},{"', "\\", "],[", "},{", "é", '],"version":1}', ""]


def opened(data: bytes, end: int = END) -> IndexEntries:
    return IndexEntries(data, FILE, end, "there/a.pt")


def part_of(index: FileIndex, name: str) -> FileIndex:
    return FileIndex(
        tuple(shard for shard in index.shards if shard.key.name == name),
        tuple(alias for alias in index.aliases if alias.key.name == name),
    )


@pytest.mark.parametrize("name", ["a", "b", "c", "none", "absent"])
def test_each_tensor_is_as_in_the_whole(name: str) -> None:
    for data in (encode_index(INDEX), json.dumps(json.loads(encode_index(INDEX))).encode()):
        entries = opened(data)
        # Twice: the second time, it is decoded already.
        assert entries.of(name) == entries.of(name) == part_of(INDEX, name)


def test_only_the_entries_of_wanted_tensors_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noting(data: bytes, *others: Any) -> FileIndex:
        sizes.append(len(data))
        return decode_index(data, *others)

    monkeypatch.setattr(index_entries, "decode_index", noting)
    data = encode_index(INDEX)
    entries = opened(data)
    assert not sizes
    entries.of("b")
    entries.of("absent")
    assert len(sizes) == 1
    assert sizes[0] < len(data) / 2


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(ODD_NAMES), min_size=3, max_size=3, unique=True))
def test_a_name_can_have_any_printable_text(names: list[str]) -> None:
    new = dict(zip(("a", "b", "c"), names, strict=True))
    index = FileIndex(
        tuple(replace(s, key=ShardKey(new.get(s.key.name, "z"), s.key.kind)) for s in INDEX.shards),
        tuple(replace(s, key=ShardKey(new[s.key.name], s.key.kind)) for s in INDEX.aliases),
    )
    entries = opened(encode_index(index))
    assert all(entries.of(name) == part_of(index, name) for name in (*names, "z"))


Edit = Callable[[dict[str, Any]], Any]
EVERYWHERE: dict[str, Edit] = {
    "format": lambda r: r.update(format="mcore_ckpt"),
    "version": lambda r: r.update(version=3),
    "block": lambda r: r.update(block_bytes=4096),
    "overlap": lambda r: r["tensors"][1].update(offset=700),
    "past-the-payload": lambda r: r["tensors"][4].update(offset=END - 2),
    "tensor-twice": lambda r: r["tensors"].append({**r["tensors"][0], "offset": 0}),
    "alias-and-tensor": lambda r: r["aliases"][0].update(name="a"),
    "not-an-object": lambda r: r["tensors"].append(7),
    "no-name": lambda r: r["tensors"][0].pop("name"),
}
OF_A: dict[str, Edit] = {
    "no-scale": lambda r: r["tensors"][2].update(kind="scales"),
    "bytes": lambda r: r["tensors"][0].update(nbytes=80),
    "crc": lambda r: r["tensors"][0].update(crc32=[2**32]),
    "region": lambda r: r["tensors"][0].update(flat=[3, 25]),
    "dtype": lambda r: r["tensors"][0].update(dtype="object"),
}


@pytest.mark.parametrize("edit", EVERYWHERE.values(), ids=EVERYWHERE)
def test_what_contradicts_another_entry_is_refused_at_once(edit: Edit) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"there/a\.pt: index: "):
        opened(edited(edit))


@pytest.mark.parametrize("edit", OF_A.values(), ids=OF_A)
def test_an_entry_that_contradicts_itself_is_refused_when_it_is_wanted(edit: Edit) -> None:
    entries = opened(edited(edit))
    assert entries.of("b") == part_of(INDEX, "b")
    for _ in range(2):
        with pytest.raises(CheckpointCorruptError, match=r"there/a\.pt: index: tensor a"):
            entries.of("a")


def edited(edit: Edit) -> bytes:
    record = json.loads(encode_index(INDEX))
    edit(record)
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def test_the_payload_may_end_with_the_last_tensor_and_not_before() -> None:
    opened(encode_index(INDEX), END)
    with pytest.raises(CheckpointCorruptError, match="reach past the payload"):
        opened(encode_index(INDEX), END - 1)


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 10_000), cut=st.integers(0, 20), put=st.text(alphabet='"\\{}[],:109a', max_size=6))
def test_what_it_accepts_is_what_the_whole_index_says(at: int, cut: int, put: str) -> None:
    """If the whole index can be decoded, each tensor can, and is the same."""
    data = encode_index(INDEX)
    at %= len(data)
    data = data[:at] + put.encode() + data[at + cut :]
    try:
        whole = decode_index(data, FILE, END)
    except ValueError:
        return
    entries = opened(data)
    names = {entry.key.name for entry in (*whole.shards, *whole.aliases)}
    assert all(entries.of(name) == part_of(whole, name) for name in names)


def test_a_tensor_of_very_many_kinds_takes_no_long_time() -> None:
    """It is decoded as a whole: to look at each kind beside all others would take hours."""
    shards = tuple(
        StoredShard(ShardKey("a", f"kind{number}"), ONE, "float32", FILE, 4 * number, 4, (1,))
        for number in range(20_000)
    )
    index = FileIndex(shards, ())
    assert index_entries._places_by_name(encode_index(index), 1 << 30) is None
    assert opened(encode_index(index), 1 << 30).of("a") == index
