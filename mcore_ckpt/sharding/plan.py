"""Plans which parts of stored shards fill a wanted region, and defines shards and their keys.

A wanted shard and a stored shard belong together if their keys (name, kind) are equal. Their regions are compared in
the global tensor, so any layout can read what any other layout has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mcore_ckpt.sharding.overlap import Rows, overlap
from mcore_ckpt.sharding.regions import Region

# Kinds of shards. A shard of any other kind is a part of the optimizer's state, and the kind is the optimizer's name
# for this part.
MODEL = "model"
PARAM = "param"
OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class ShardKey:
    """The key of a shard: the tensor's global name and the part of the state (`model`, `param`, `exp_avg`, ...)."""

    name: str
    kind: str

    def __str__(self) -> str:
        return self.name if self.kind == MODEL else f"{self.name} ({self.kind})"


@dataclass(frozen=True)
class Coding:
    """Says how the float32 values of a shard follow from its stored elements.

    Exactly one of `scale` and `upper` is set.

    Attributes:
        dtype: torch's name of the stored dtype, without "torch.": float16 or uint8 (bits of float8_e4m3fn) with a
            scale, int16 with upper halves.
        scale: the kind of the shard that holds the factor of all elements, one float32. That shard is of the same
            tensor, and in the same file.
        upper: the kind of the shard that holds the upper 16 bits of each value, as bfloat16. That shard is of the same
            tensor. The value's bits are `(upper << 16) + stored`, where `stored` is signed. Upper halves of the kind
            MODEL are in the model's files.
    """

    dtype: str
    scale: str | None = None
    upper: str | None = None


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard in a file.

    Attributes:
        key: which tensor, and which part of the state.
        region: the part of the global tensor that the shard holds.
        dtype: torch's name of the dtype of its values, without "torch.".
        file: the path of the file.
        offset, nbytes: the position of the shard's first byte in the file, and the number of its bytes.
        crc32: the CRC-32 of each block of the shard's bytes. None if the file has no CRCs (safetensors).
        coding: how the values follow from the stored elements. None if the stored elements are the values.
        beside: for bound state (SOAP's eigenbases), the kind of the shard to which it belongs. That shard is of the
            same tensor, and in the same file. In this case `region` is the whole bound state. None if `region` is a
            part of the global tensor.
    """

    key: ShardKey
    region: Region
    dtype: str
    file: str
    offset: int
    nbytes: int
    crc32: Sequence[int] | None
    coding: Coding | None = None
    beside: str | None = None

    @property
    def as_stored(self) -> StoredShard:
        """This shard without its coding: a shard of the same bytes, whose values are the stored elements."""
        return self if self.coding is None else replace(self, dtype=self.coding.dtype, coding=None)


@dataclass(frozen=True)
class ReadRange:
    """Rows of a stored shard that go into a wanted region."""

    stored: StoredShard
    rows: Rows

    @staticmethod
    def whole(stored: StoredShard) -> ReadRange:
        """Returns the range of all elements of a shard, which must be the only shard of its tensor."""
        return ReadRange(stored, Rows(0, 0, stored.region.numel))


@dataclass(frozen=True)
class ReadPlan:
    """The reads that fill one wanted region. Each element is read once. `missing` and `outside` are as in `Overlap`."""

    reads: tuple[ReadRange, ...]
    missing: int
    outside: int


def plan_reads(wanted: Region, stored: Sequence[StoredShard]) -> ReadPlan:
    """Plans the reads that fill one wanted region. An element that several shards hold is read from the first of them.

    `stored` are shards of the same tensor. Their global shapes can differ from the global shape of `wanted` in length
    along an axis.
    """
    found = overlap(wanted, [shard.region for shard in stored])
    reads = tuple(ReadRange(stored[number], rows) for number, rows in found.rows)
    return ReadPlan(reads, found.missing, found.outside)


def runs(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Joins positions into sorted, inclusive runs, as in a manifest's `holds`.

    Example:
        >>> runs([3, 1, 2, 7])
        [(1, 3), (7, 7)]
    """
    ends = ends_of_runs(positions)
    return list(zip(ends[::2], ends[1::2], strict=True))


def ends_of_runs(positions: Iterable[int]) -> list[int]:
    """Returns the first and the last position of each of the `runs`, one after the other."""
    in_order = sorted(positions)
    if not in_order:
        return []
    last = in_order[0]
    ends = [last]
    for position in in_order:
        if position - last > 1:
            ends += last, position
        last = position
    return [*ends, last]
