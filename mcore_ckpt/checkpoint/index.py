"""Encodes and decodes the index of a `.pt` file.

The index records which tensor each range of bytes in the file belongs to. See docs/format.md.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec

from mcore_ckpt.checkpoint.element_sizes import item_bytes
from mcore_ckpt.checkpoint.shapes import is_possible_shape
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import typed_json
from mcore_ckpt.io.typed_json import LongList, Natural
from mcore_ckpt.sharding.plan import MODEL, Coding, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Piece, Region

BLOCK_BYTES = 1 << 20

_FORMAT = "mcore_ckpt.index"
_MEMBERS = {"format", "version", "block_bytes", "tensors", "aliases"}
# Version 2 adds coded shards and bound state. An index that has neither is still written as version 1, so that older
# readers can read it.
_HEADS = tuple((fields.encode(_FORMAT), b"%d" % BLOCK_BYTES, version) for version in (b"1", b"2"))
# A member of an entry, `scale` or `upper`, names the coding of a shard. Maps each of the two members to the dtypes in
# which the shard can be stored.
_CODED = {"scale": ("float16", "uint8"), "upper": ("int16",)}
_VALUES = "float32"

_MAX_CRC = 2**32 - 1
# Below this many CRCs, a tuple takes less memory than a `Crcs`, so a tuple is used.
_FEW = 8
# The region of a scale, which is one number for all elements of a shard.
SCALE_REGION = Region.whole((1,))
# The number of pieces is limited, because a check compares each piece with every other piece. The fused projection of
# Qwen3-Next has the most pieces, 6.
_MOST_PIECES = 64

# The regions that are already decoded, by their text in the index.
Regions = dict[bytes, Region]


class Crcs(Sequence[int]):
    """The CRC-32 of each block of a shard. A `Crcs` is equal to a tuple of the same numbers.

    Each number takes 4 bytes; in a tuple it would take 40 bytes.
    """

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._numbers = array("I", numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> int: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[int]: ...
    def __getitem__(self, number: int | slice) -> int | Sequence[int]:
        return tuple(self._numbers[number]) if isinstance(number, slice) else self._numbers[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (Crcs, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class Alias:
    """A shard whose bytes are stored under another key: `(key.name, same_as)`."""

    key: ShardKey
    same_as: str
    region: Region
    dtype: str


@dataclass(frozen=True)
class FileIndex:
    """The contents of one file's index: the shards in the file, and the aliases."""

    shards: tuple[StoredShard, ...]
    aliases: tuple[Alias, ...]

    @property
    def version(self) -> int:
        """The oldest version of the format that can express the index."""
        return 2 if any(shard.coding is not None or shard.beside is not None for shard in self.shards) else 1


def block_count(nbytes: int) -> int:
    """Returns the number of blocks that `nbytes` bytes are divided into. Each block has a CRC."""
    return -(-nbytes // BLOCK_BYTES)


def encode_index(index: FileIndex) -> bytes:
    """Encodes an index as JSON."""
    return fields.encode(
        {
            "format": _FORMAT,
            "version": index.version,
            "block_bytes": BLOCK_BYTES,
            "tensors": [_shard_record(shard) for shard in index.shards],
            "aliases": [
                {**_region_record(alias.region), "name": alias.key.name, "kind": alias.key.kind}
                | {"same_as": alias.same_as, "dtype": alias.dtype}
                for alias in index.aliases
            ],
        }
    )


class IndexTemplate:
    """An encoded index without its CRCs, which are the only part that changes from save to save.

    `index` lists the shards in the order in which the file has them. Each shard has an empty list of CRCs.
    """

    def __init__(self, index: FileIndex) -> None:
        # JSON escapes a quote inside a name, so no name can contain the text at which the index is split.
        self._parts = encode_index(index).decode().split('"crc32":[]')
        self._counts = [block_count(shard.nbytes) for shard in index.shards]
        self.version = index.version

    @property
    def least_bytes(self) -> int:
        """The size of the encoded index if each CRC has only one digit."""
        return len(self.encode([0] * sum(self._counts)))

    def encode(self, block_crcs: Sequence[int]) -> bytes:
        """Returns the encoded index. `block_crcs` are the CRCs of the blocks of all shards, in order."""
        texts = list(map(str, block_crcs))
        pieces = [self._parts[0]]
        start = 0
        for count, part in zip(self._counts, self._parts[1:], strict=True):
            pieces += ('"crc32":[', ",".join(texts[start : start + count]), "]", part)
            start += count
        if start != len(texts):
            raise ValueError(f"there are {len(texts)} CRCs for {start} blocks")
        return "".join(pieces).encode()


def _shard_record(shard: StoredShard) -> dict[str, Any]:
    assert shard.crc32 is not None, "every file that has an index has CRCs"
    coding = shard.coding
    coded = {} if coding is None else {name: getattr(coding, name) for name in _CODED if getattr(coding, name)}
    beside = {} if shard.beside is None else {"beside": shard.beside}
    return {
        **_region_record(shard.region),
        **coded,
        **beside,
        "name": shard.key.name,
        "kind": shard.key.kind,
        "dtype": shard.as_stored.dtype,
        "offset": shard.offset,
        "nbytes": shard.nbytes,
        "crc32": list(shard.crc32),
    }


def _region_record(region: Region) -> dict[str, Any]:
    record: dict[str, Any] = {
        "global_shape": list(region.global_shape),
        "local_shape": list(region.local_shape),
        "pieces": [[list(p.local_offset), list(p.shape), list(p.global_offset)] for p in region.pieces],
    }
    if not region.is_full_local:
        record["flat"] = list(region.flat)
    return record


class _Region(msgspec.Struct, gc=False, kw_only=True):
    """The region of an entry, as the index spells it."""

    flat: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    global_shape: msgspec.Raw
    local_shape: msgspec.Raw
    pieces: msgspec.Raw


class _Shard(_Region, gc=False, kw_only=True, omit_defaults=True):
    """The entry of a shard, as the index spells it."""

    beside: str | msgspec.UnsetType = msgspec.UNSET
    crc32: msgspec.Raw
    dtype: str
    kind: str
    name: str
    nbytes: Natural
    offset: Natural
    scale: str | msgspec.UnsetType = msgspec.UNSET
    upper: str | msgspec.UnsetType = msgspec.UNSET


class _Alias(_Region, gc=False, kw_only=True, omit_defaults=True):
    """The entry of an alias, as the index spells it."""

    dtype: str
    kind: str
    name: str
    same_as: str


_SHARDS: LongList[_Shard] = LongList(_Shard, b"},{")
_ALIASES: LongList[_Alias] = LongList(_Alias, b"},{")
_NATURALS: msgspec.json.Decoder[tuple[int, ...]] = msgspec.json.Decoder(tuple[Natural, ...])
_Offsets = tuple[Natural, ...]
_PIECES: msgspec.json.Decoder[tuple[tuple[_Offsets, _Offsets, _Offsets], ...]] = msgspec.json.Decoder(
    tuple[tuple[_Offsets, _Offsets, _Offsets], ...]
)


def decode_index(data: bytes, file: str, payload_end: int, regions: Regions | None = None) -> FileIndex:
    """Decodes an index and checks its numbers. Raises FieldError if `data` are not an index, or contradict themselves.

    Every shard must be inside the bytes `[0, payload_end)` of its file, and must have as many bytes as its region.
    `file` is the file's path in the manifest. If an index is decoded in parts, `regions` holds the regions of earlier
    parts.
    """
    text, places = data, typed_json.members(data)
    if places is None:
        text = typed_json.without_spaces(data)
        places = typed_json.members(text)
    if places is None:
        raise fields.FieldError("not a JSON object, or a name occurs twice in it")
    head = tuple(text[slice(*places.get(name, (0, 0)))] for name in ("format", "block_bytes", "version"))
    if not places.keys() >= _MEMBERS or head not in _HEADS:
        raise fields.FieldError(f"not an index of version {' or '.join(version.decode() for _, _, version in _HEADS)}")
    regions = {} if regions is None else regions
    shards = tuple(_shard(entry, file, regions) for entry in _SHARDS.read(text, places["tensors"]))
    aliases = tuple(_alias(entry, regions) for entry in _ALIASES.read(text, places["aliases"]))
    _check_names(shards, aliases)
    _check_places(shards, payload_end)
    _check_codings(shards)
    _check_bound_state(shards, aliases)
    return FileIndex(shards, aliases)


def _shard(entry: _Shard, file: str, regions: Regions) -> StoredShard:
    key = _key(entry)
    region, dtype = _region_of(entry, key, regions), fields.as_name(entry.dtype, "dtype")
    try:
        expected = region.numel * item_bytes(dtype)
    except ValueError as error:
        raise fields.FieldError(f"tensor {key}: {error}") from None
    nbytes, crcs = entry.nbytes, _crcs(entry, key)
    if nbytes != expected or len(crcs) != block_count(nbytes):
        raise fields.FieldError(
            f"tensor {key}: has {nbytes} bytes in {len(crcs)} blocks, but its region has {expected} bytes in "
            f"{block_count(expected)}"
        )
    coding = _coding(entry, key, dtype)
    value = dtype if coding is None else _VALUES
    beside = None if entry.beside is msgspec.UNSET else fields.as_name(entry.beside, "beside")
    return StoredShard(key, region, value, file, entry.offset, nbytes, crcs, coding, beside)


def _crcs(entry: _Shard, key: ShardKey) -> Sequence[int]:
    numbers = typed_json.parse(entry.crc32, _NATURALS)
    if numbers and max(numbers) > _MAX_CRC:
        raise fields.FieldError(f"tensor {key}: {max(numbers)} is not a CRC of 32 bits")
    return numbers if len(numbers) < _FEW else Crcs(numbers)


def _key(entry: _Shard | _Alias) -> ShardKey:
    return ShardKey(fields.as_name(entry.name, "name"), sys.intern(fields.as_name(entry.kind, "kind")))


def _coding(entry: _Shard, key: ShardKey, dtype: str) -> Coding | None:
    found = {name: kind for name in _CODED if isinstance(kind := getattr(entry, name), str)}
    if not found:
        return None
    if len(found) > 1 or dtype not in _CODED[next(iter(found))]:
        raise fields.FieldError(f"tensor {key}: {' and '.join(found)} cannot code elements of {dtype}")
    return Coding(dtype, **{name: fields.as_name(kind, name) for name, kind in found.items()})


def _alias(entry: _Alias, regions: Regions) -> Alias:
    key = _key(entry)
    same_as, dtype = fields.as_name(entry.same_as, "same_as"), fields.as_name(entry.dtype, "dtype")
    return Alias(key, same_as, _region_of(entry, key, regions), dtype)


def _region_of(entry: _Region, key: ShardKey, regions: Regions) -> Region:
    """Returns the region of a shard. Decodes each distinct region only once.

    Most regions of a file are equal, because many layers have the same shapes, and a parameter's moments have the
    parameter's shape.
    """
    flat = b"" if entry.flat is msgspec.UNSET else memoryview(entry.flat)
    text = b" ".join((*(memoryview(raw) for raw in (entry.global_shape, entry.local_shape, entry.pieces)), flat))
    region = regions.get(text)
    if region is None:
        region = regions[text] = _read_region(entry, key)
    return region


def _read_region(entry: _Region, key: ShardKey) -> Region:
    try:
        global_shape, local_shape = (
            typed_json.parse(raw, _NATURALS) for raw in (entry.global_shape, entry.local_shape)
        )
        pieces = typed_json.parse(entry.pieces, _PIECES)
        flat = None if entry.flat is msgspec.UNSET else typed_json.parse(entry.flat, _NATURALS)
    except fields.FieldError as error:
        raise fields.FieldError(f"tensor {key}: its region is {error}") from None
    for shape in (global_shape, local_shape):
        if not is_possible_shape(shape):
            raise fields.FieldError(f"tensor {key}: its shape {fields.shown(shape)} is larger than a tensor can be")
    if len(pieces) > _MOST_PIECES:
        raise fields.FieldError(f"tensor {key}: has {len(pieces)} pieces, more than {_MOST_PIECES}")
    whole = Region(global_shape, local_shape, tuple(Piece(*parts) for parts in pieces), Region.whole(local_shape).flat)
    flat = whole.flat if flat is None else flat
    if len(flat) != 2:
        raise fields.FieldError(f"tensor {key}: 'flat' is {fields.shown(flat)}, not [start, stop]")
    region = whole.with_flat(flat[0], flat[1])
    try:
        region.check()
    except ValueError as error:
        raise fields.FieldError(f"tensor {key}: {error}") from None
    return region


def _check_names(shards: Sequence[StoredShard], aliases: Sequence[Alias]) -> None:
    keys = {shard.key for shard in shards} | {alias.key for alias in aliases}
    if len(keys) < len(shards) + len(aliases):
        raise fields.FieldError("the index lists a tensor twice")


def _check_codings(shards: Sequence[StoredShard]) -> None:
    """Checks that the file has the scales and upper halves that its coded shards need."""
    coded = [(shard, shard.coding) for shard in shards if shard.coding is not None]
    by_key = {shard.key: shard for shard in shards} if coded else {}
    for shard, coding in coded:
        if coding.upper == MODEL:
            continue
        kind = coding.scale or coding.upper or ""
        other = by_key.get(ShardKey(shard.key.name, kind))
        region, dtype = (shard.region, "bfloat16") if coding.upper else (SCALE_REGION, _VALUES)
        if other is None or other.coding is not None or (other.region, other.dtype) != (region, dtype):
            raise fields.FieldError(
                f"tensor {shard.key}: needs an uncoded shard of kind {kind!r}, dtype {dtype} and {region.describe()}, "
                "which the file lacks"
            )


def _check_bound_state(shards: Sequence[StoredShard], aliases: Sequence[Alias]) -> None:
    bound = [(shard, shard.beside) for shard in shards if shard.beside is not None]
    if not bound:
        return
    keys = {shard.key for shard in shards if shard.beside is None} | {alias.key for alias in aliases}
    for shard, kind in bound:
        if ShardKey(shard.key.name, kind) not in keys or shard.region != Region.whole(shard.region.local_shape):
            raise fields.FieldError(
                f"tensor {shard.key}: must be whole, and the file must have its shard of kind {kind!r}"
            )


def _check_places(shards: Sequence[StoredShard], payload_end: int) -> None:
    position = 0
    for shard in sorted(shards, key=lambda s: (s.offset, s.nbytes)):
        if shard.offset < position or shard.offset + shard.nbytes > payload_end:
            raise fields.FieldError(
                f"tensor {shard.key}: bytes [{shard.offset}, {shard.offset + shard.nbytes}) overlap another tensor "
                f"or reach past the payload of {payload_end} bytes"
            )
        position = shard.offset + shard.nbytes
