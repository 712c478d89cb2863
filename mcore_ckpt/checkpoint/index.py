"""Encodes and decodes the index of a `.pt` file.

The index records which tensor each range of bytes in the file belongs to. See docs/format.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.checkpoint.dtypes import item_bytes
from mcore_ckpt.checkpoint.shapes import is_possible_shape
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.sharding.plan import MODEL, Coding, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Piece, Region

BLOCK_BYTES = 1 << 20

_FORMAT = "mcore_ckpt.index"
# Version 2 has coded shards, and tensors that belong to a shard. An index without any is still written as version 1,
# which older readers read, too.
_VERSIONS = (1, 2)
# The stored dtypes of coded shards, by the field that says how they are coded.
_CODED = {"scale": ("float16", "uint8"), "upper": ("int16",)}
_VALUES = "float32"

_MAX_CRC = 2**32 - 1
# A scale is one number, for all elements of a shard.
SCALE_REGION = Region.whole((1,))
# The number of pieces is limited, because a check compares each piece with every other piece. The fused projection of
# Qwen3-Next has the most pieces, 6.
_MOST_PIECES = 64

_REGION_FIELDS = ("global_shape", "local_shape", "pieces", "flat")
# Maps the text of a region's fields to the region. The values themselves would not do, because 1 == True == 1.0.
_Regions = dict[str, Region]


@dataclass(frozen=True)
class Alias:
    """A shard without bytes of its own. Its bytes are stored under the key `(key.name, same_as)`."""

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
        """The version of the format that can say all of it."""
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
    """An encoded index without its CRCs. Only the CRCs change from save to save.

    Args:
        index: the index to encode. Its shards are in the order of the file, and their CRCs are empty.
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
        """Returns what `encode_index` would return for the same index with these CRCs.

        Args:
            block_crcs: the CRC-32 of each block of the first shard, then of the second, and so on.
        """
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


def decode_index(data: bytes, file: str, payload_end: int) -> FileIndex:
    """Decodes an index and checks its numbers.

    Every shard must be inside the bytes `[0, payload_end)` of its file, and must have as many bytes as its region.

    Raises:
        FieldError: the data are not an index, or the numbers in the index contradict each other.
    """
    record = fields.decode(data)
    version, block_bytes = record.get("version"), record.get("block_bytes")
    if record.get("format") != _FORMAT or version not in _VERSIONS or block_bytes != BLOCK_BYTES:
        raise fields.FieldError(f"not an index of version {_VERSIONS[0]} to {_VERSIONS[-1]}")
    regions: _Regions = {}
    shards = tuple(
        _read_shard(fields.as_dict(item, "tensors"), file, regions) for item in fields.get_list(record, "tensors")
    )
    aliases = tuple(
        _read_alias(fields.as_dict(item, "aliases"), regions) for item in fields.get_list(record, "aliases")
    )
    _check_names(shards, aliases)
    _check_places(shards, payload_end)
    _check_codings(shards)
    _check_beside(shards, aliases)
    return FileIndex(shards, aliases)


def _read_shard(record: Mapping[str, Any], file: str, regions: _Regions) -> StoredShard:
    key = ShardKey(fields.get_name(record, "name"), fields.get_name(record, "kind"))
    region, dtype = _region_of(record, key, regions), fields.get_name(record, "dtype")
    offset, nbytes = fields.as_ints([record.get("offset"), record.get("nbytes")], "offset and nbytes")
    crcs = fields.get_ints(record, "crc32")
    try:
        expected = region.numel * item_bytes(dtype)
    except ValueError as error:
        raise fields.FieldError(f"tensor {key}: {error}") from None
    if nbytes != expected or len(crcs) != block_count(nbytes):
        raise fields.FieldError(
            f"tensor {key}: has {nbytes} bytes in {len(crcs)} blocks, but its region has {expected} bytes in "
            f"{block_count(expected)}"
        )
    if crcs and max(crcs) > _MAX_CRC:
        raise fields.FieldError(f"tensor {key}: {max(crcs)} is not a CRC of 32 bits")
    coding = _read_coding(record, key, dtype)
    value = dtype if coding is None else _VALUES
    beside = fields.get_name(record, "beside") if "beside" in record else None
    return StoredShard(key, region, value, file, offset, nbytes, crcs, coding, beside)


def _read_coding(record: Mapping[str, Any], key: ShardKey, dtype: str) -> Coding | None:
    if "scale" not in record and "upper" not in record:
        return None
    found = [name for name in _CODED if name in record]
    name = found[0]
    if len(found) > 1 or dtype not in _CODED[name]:
        raise fields.FieldError(f"tensor {key}: {' and '.join(found)} cannot code elements of {dtype}")
    kind = fields.get_name(record, name)
    return Coding(dtype, scale=kind) if name == "scale" else Coding(dtype, upper=kind)


def _read_alias(record: Mapping[str, Any], regions: _Regions) -> Alias:
    key = ShardKey(fields.get_name(record, "name"), fields.get_name(record, "kind"))
    return Alias(
        key, fields.get_name(record, "same_as"), _region_of(record, key, regions), fields.get_name(record, "dtype")
    )


def _region_of(record: Mapping[str, Any], key: ShardKey, regions: _Regions) -> Region:
    """Returns the region of a shard. Decodes each distinct region only once.

    Most regions of a file are equal, because many layers have the same shapes, and so do a parameter and its moments.
    """
    try:
        text = repr([record.get(name, ...) for name in _REGION_FIELDS])
    except RecursionError:
        raise fields.FieldError(f"tensor {key}: its region is nested too deeply") from None
    region = regions.get(text)
    if region is None:
        region = regions[text] = _read_region(record, key)
    return region


def _read_region(record: Mapping[str, Any], key: ShardKey) -> Region:
    local_shape, global_shape = (_shape(record, name, key) for name in ("local_shape", "global_shape"))
    pieces = []
    items = fields.get_list(record, "pieces")
    if len(items) > _MOST_PIECES:
        raise fields.FieldError(f"tensor {key}: has {len(items)} pieces, more than {_MOST_PIECES}")
    for item in items:
        parts = [fields.as_ints(part, "pieces") for part in fields.as_list(item, "pieces")]
        if len(parts) != 3:
            raise fields.FieldError(f"tensor {key}: a piece has {len(parts)} parts, not 3")
        pieces.append(Piece(*parts))
    whole = Region(global_shape, local_shape, tuple(pieces), Region.whole(local_shape).flat)
    flat = fields.get_ints(record, "flat") if "flat" in record else whole.flat
    if len(flat) != 2:
        raise fields.FieldError(f"tensor {key}: 'flat' is {flat}, not [start, stop]")
    region = whole.with_flat(flat[0], flat[1])
    try:
        region.check()
    except ValueError as error:
        raise fields.FieldError(f"tensor {key}: {error}") from None
    return region


def _shape(record: Mapping[str, Any], name: str, key: ShardKey) -> tuple[int, ...]:
    shape = fields.get_ints(record, name)
    if not is_possible_shape(shape):
        raise fields.FieldError(f"tensor {key}: its {name} {fields.shown(shape)} is larger than a tensor can be")
    return shape


def _check_names(shards: Sequence[StoredShard], aliases: Sequence[Alias]) -> None:
    keys = {shard.key for shard in shards} | {alias.key for alias in aliases}
    if len(keys) < len(shards) + len(aliases):
        raise fields.FieldError("the index lists a tensor twice")


def _check_codings(shards: Sequence[StoredShard]) -> None:
    """Checks that what coded shards need in the same file is there."""
    coded = [(shard, shard.coding) for shard in shards if shard.coding is not None]
    by_key = {shard.key: shard for shard in shards} if coded else {}
    for shard, coding in coded:
        if coding.upper == MODEL:
            continue
        other = by_key.get(ShardKey(shard.key.name, coding.scale or coding.upper or ""))
        region, dtype = (shard.region, "bfloat16") if coding.upper else (SCALE_REGION, _VALUES)
        if other is None or other.coding is not None or (other.region, other.dtype) != (region, dtype):
            raise fields.FieldError(
                f"tensor {shard.key}: needs a {coding.scale or coding.upper} of {dtype} and {region.describe()}"
            )


def _check_beside(shards: Sequence[StoredShard], aliases: Sequence[Alias]) -> None:
    beside = [(shard, shard.beside) for shard in shards if shard.beside is not None]
    if not beside:
        return
    keys = {shard.key for shard in shards if shard.beside is None} | {alias.key for alias in aliases}
    for shard, kind in beside:
        if ShardKey(shard.key.name, kind) not in keys or shard.region != Region.whole(shard.region.local_shape):
            raise fields.FieldError(f"tensor {shard.key}: cannot belong to {shard.beside}, or is only a part")


def _check_places(shards: Sequence[StoredShard], payload_end: int) -> None:
    position = 0
    for shard in sorted(shards, key=lambda s: (s.offset, s.nbytes)):
        if shard.offset < position or shard.offset + shard.nbytes > payload_end:
            raise fields.FieldError(
                f"tensor {shard.key}: bytes [{shard.offset}, {shard.offset + shard.nbytes}) overlap another tensor "
                f"or reach past the payload of {payload_end} bytes"
            )
        position = shard.offset + shard.nbytes
