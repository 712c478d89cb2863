"""Checkpoints of a few tensors that have manifest and indexes, and no bytes."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from mcore_ckpt.checkpoint.element_sizes import item_bytes
from mcore_ckpt.checkpoint.index import Alias, FileIndex, block_count, encode_index
from mcore_ckpt.checkpoint.manifest import FileRecord, IndexPlace, Manifest
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.plan import ShardKey, StoredShard, runs
from mcore_ckpt.sharding.regions import Piece, Region, Shape


def rows(whole: Shape, rank: int, size: int) -> Region:
    """A rank's equal part of axis 0."""
    length = whole[0] // size
    shape, zero = (length, *whole[1:]), (0,) * (len(whole) - 1)
    return Region(whole, shape, (Piece((0, *zero), shape, (rank * length, *zero)),), Region.whole(shape).flat)


def shard(name: str, kind: str, region: Region, dtype: str = "float32") -> StoredShard:
    nbytes = region.numel * item_bytes(dtype)
    return StoredShard(ShardKey(name, kind), region, dtype, "", 0, nbytes, (0,) * block_count(nbytes))


def write(
    role_dir: Path,
    topology: Topology,
    files: Mapping[str, tuple[str, RankCoordinates, Sequence[StoredShard | Alias]]],
) -> Manifest:
    """Files by path: their kind, who wrote them, and what is in them."""
    ranks = tuple(dict.fromkeys(at for _, at, _ in files.values()))
    names = sorted({item.key.name for _, _, held in files.values() for item in held})
    records = []
    for path, (kind, at, held) in files.items():
        holds = Holds(runs(names.index(item.key.name) for item in held))
        records.append(_write_file(role_dir, FileRecord(path, kind, ranks.index(at), 0, 0, None, holds), held))
    roles, contents = (role_dir.name,), ("model", "optimizer")
    return Manifest(
        7, role_dir.name, roles, "a" * 32, "", {}, contents, topology, ranks, (), tuple(names), tuple(records)
    )


def _write_file(role_dir: Path, record: FileRecord, held: Sequence[StoredShard | Alias]) -> FileRecord:
    shards, offset = [], 0
    for item in held:
        if isinstance(item, StoredShard):
            shards.append(replace(item, offset=offset, file=record.path))
            offset += item.nbytes
    data = encode_index(FileIndex(tuple(shards), tuple(item for item in held if isinstance(item, Alias))))
    path = role_dir / record.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(offset) + data)
    return structs.replace(record, size=offset + len(data), index=IndexPlace(offset, len(data), zlib.crc32(data)))
