"""The load plan: which stored bytes go where.

Wanted and stored shards are matched by (name, kind), and meet in the global tensor: whatever layout cut either of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_ckpt.sharding.overlap import Rows, overlap
from mcore_ckpt.sharding.regions import Region

# Kinds of shards; any other is a part of the optimizer's state by the name the optimizer has for it.
MODEL = "model"
PARAM = "param"
OPAQUE = "opaque"


@dataclass(frozen=True)
class ShardKey:
    """What a shard is: the tensor's global name and the part of the state (`model`, `param`, `exp_avg`, ...)."""

    name: str
    kind: str

    def __str__(self) -> str:
        return self.name if self.kind == MODEL else f"{self.name} ({self.kind})"


@dataclass(frozen=True)
class StoredShard:
    """A shard in a file.

    `offset` and the CRCs of its blocks are in bytes of that file; `dtype` is torch's name of it. `crc32` is None where
    the file has none (safetensors).
    """

    key: ShardKey
    region: Region
    dtype: str
    file: str
    offset: int
    nbytes: int
    crc32: tuple[int, ...] | None


@dataclass(frozen=True)
class ReadRange:
    """Rows of a stored shard that go into a wanted one."""

    stored: StoredShard
    rows: Rows


@dataclass(frozen=True)
class ReadPlan:
    """How one wanted shard is filled.

    Attributes:
        reads: each element once.
        missing: elements that none of the stored shards has, though the stored tensor does.
        outside: elements beyond the stored tensor: a vocabulary that is padded further now.
    """

    reads: tuple[ReadRange, ...]
    missing: int
    outside: int


def plan_reads(wanted: Region, stored: Sequence[StoredShard]) -> ReadPlan:
    """The reads that fill one wanted region; of shards that hold the same elements, the first.

    Args:
        wanted: what to fill.
        stored: shards of the same tensor; their global shapes may differ from the wanted one along an axis.
    """
    found = overlap(wanted, [shard.region for shard in stored])
    reads = tuple(ReadRange(stored[number], rows) for number, rows in found.rows)
    return ReadPlan(reads, found.missing, found.outside)


def runs(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted unique positions as inclusive runs, as in a manifest's `holds`.

    Example:
        >>> runs([3, 1, 2, 7])
        [(1, 3), (7, 7)]
    """
    result: list[tuple[int, int]] = []
    for position in sorted(set(positions)):
        if result and position == result[-1][1] + 1:
            result[-1] = (result[-1][0], position)
        else:
            result.append((position, position))
    return result
