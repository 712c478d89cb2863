"""The load plan: which stored bytes go where.

Wanted and stored shards are matched by (name, kind). Ranges of the same local tensor are joined from as many
files as it takes; shards of another cut are refused here by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
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

    `offset` and the CRCs of its blocks are in bytes of that file; `dtype` is torch's name of it.
    """

    key: ShardKey
    region: Region
    dtype: str
    file: str
    offset: int
    nbytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class WantedShard:
    """A shard the trainer wants back into a tensor of `dtype`.

    `file` is where this layout would have it, for messages.
    """

    key: ShardKey
    region: Region
    dtype: str
    file: str


@dataclass(frozen=True)
class ReadRange:
    """Elements `[start, stop)` of a stored shard go to position `destination` of the wanted one, in elements."""

    stored: StoredShard
    start: int
    stop: int
    destination: int


def plan_reads(
    wanted: WantedShard, stored: Mapping[ShardKey, Sequence[StoredShard]], aliases: Mapping[ShardKey, ShardKey]
) -> list[ReadRange]:
    """The reads that fill one wanted shard, each element once.

    Args:
        wanted: the shard to fill.
        stored: what the opened indexes hold, by key.
        aliases: keys whose bytes are stored under another key.

    Raises:
        CheckpointMismatchError: it is stored with another shape, cut or dtype, or not at all.
        CheckpointCorruptError: some of its elements are in none of the files.
    """
    key = aliases.get(wanted.key, wanted.key)
    candidates = stored.get(key, ())
    if not candidates:
        raise CheckpointMismatchError(
            f"{wanted.file}: tensor {wanted.key}: wanted {wanted.region.describe()}, found no such tensor in the "
            "checkpoint"
        )
    for shard in candidates:
        _check_same_tensor(wanted, shard)
    fitting = [shard for shard in candidates if shard.region.same_local(wanted.region)]
    if not fitting:
        raise CheckpointMismatchError(
            f"{candidates[0].file}: tensor {wanted.key}: wanted {wanted.region.describe()}, found "
            f"{candidates[0].region.describe()}. Loading under another parallel layout is not supported yet: use the "
            "one it was saved with"
        )
    return _cover(wanted, fitting)


def _check_same_tensor(wanted: WantedShard, shard: StoredShard) -> None:
    if shard.region.global_shape != wanted.region.global_shape:
        raise CheckpointMismatchError(
            f"{shard.file}: tensor {wanted.key}: wanted {wanted.region.describe()}, found {shard.region.describe()}"
        )
    if shard.dtype != wanted.dtype:
        raise CheckpointMismatchError(
            f"{shard.file}: tensor {wanted.key}: wanted dtype {wanted.dtype}, found {shard.dtype}"
        )


def _cover(wanted: WantedShard, shards: Iterable[StoredShard]) -> list[ReadRange]:
    start, stop = wanted.region.flat
    reads = []
    position = start
    # Replicas may have drifted apart: of equal ranges, this rank's own.
    for shard in sorted(shards, key=lambda s: (s.region.flat, s.file != wanted.file)):
        low, high = shard.region.flat
        if position >= stop or low > position:
            break
        if high <= position:
            continue
        end = min(high, stop)
        reads.append(ReadRange(shard, position - low, end - low, position - start))
        position = end
    if position < stop:
        files = sorted({shard.file for shard in shards})
        raise CheckpointCorruptError(
            f"{', '.join(files)}: tensor {wanted.key}: elements [{position}, {stop}) of {wanted.region.describe()} "
            "are in none of these files"
        )
    return reads


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
