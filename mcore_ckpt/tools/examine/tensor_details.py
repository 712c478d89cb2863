"""Describes one tensor of a checkpoint: statistics of its values, and which rank's file holds which part.

Each value is read once, in batches of 16 MiB. The statistics do not depend on the order of the values, so values are
read in the order in which they are stored. Mean and deviation of batches are merged without cancellation. If several
tensor-parallel ranks have the same part, the first rank's copy is read.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.ranks.topology import RankCoordinates
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import OPAQUE, PARAM, ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Box, Region
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.tools.examine.contents import keys_of, reads_of, shards_of
from mcore_ckpt.tools.examine.progress import Progress, no_progress, summed

# How many bytes of a tensor are in memory at a time. The fp64 copies of these bytes need a few times as much memory.
_BATCH_BYTES = 16 << 20
_SUGGESTED = 3


@dataclass(frozen=True)
class Values:
    """Statistics of a tensor's elements. All fields except the counts describe only the finite elements.

    `std` is the standard deviation with a divisor of n, not n - 1. `norm` is the square root of the sum of squares.
    """

    count: int
    zeros: int
    nans: int
    infs: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    norm: float | None


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor: its region, its file below the role's folder, and the place in the file in bytes.

    `rank` is the world rank that wrote the file, and `coordinates` are the coordinates of this rank.
    """

    rank: int
    coordinates: RankCoordinates
    file: str
    offset: int
    nbytes: int
    region: Region

    @property
    def boxes(self) -> list[Box]:
        """The boxes of the global tensor that the part consists of."""
        return [box for _, box in self.region.boxes()]


@dataclass(frozen=True)
class KindDetails:
    """One kind of a tensor: the model's weights, or one kind of optimizer state.

    Attributes:
        kind: "model", "opaque", "param", "exp_avg", ...
        dtype: without "torch.".
        shape: the global shape.
        same_as: the other kind under which the bytes are stored (fp32 training); None if the bytes are stored under
            `kind`.
        values: the statistics; None for opaque bytes, and if `same_as` is given.
        parts: the stored parts. If several tensor-parallel ranks have the same part, the part is listed for each of
            their files.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    same_as: str | None
    values: Values | None
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class TensorDetails:
    """One tensor of a checkpoint, with all kinds that are stored."""

    name: str
    kinds: tuple[KindDetails, ...]


def describe_tensor(role_dir: Path, name: str, progress: Progress = no_progress) -> TensorDetails:
    """Reads one tensor, with its optimizer state, and describes it. The CRC of each block is checked.

    Memory use does not grow with the size of the tensor.

    Args:
        role_dir: the folder of a committed role.
        name: the tensor's global name, or a synonym of it.

    Raises:
        InvalidArgumentError: the checkpoint has no such tensor. The message suggests similar names.
        CheckpointCorruptError: the manifest, an index or a block is damaged, or elements are in no file.

    Example:
        >>> describe_tensor(role_dir, "decoder.final_layernorm.weight").kinds[0].values.nans  # doctest: +SKIP
        0
    """
    with reading([role_dir]):  # keeps a running trainer from deleting the step
        reader = NativeReader.open(role_dir)
        found = found_as(name, reader.names)
        if found is None:
            raise InvalidArgumentError(f"{role_dir}: has no tensor {name!r}{_closest(name, reader.names)}")
        return _describe(reader, found, progress)


def has_tensor(role_dir: Path, name: str) -> bool:
    """Returns True if a committed role has a tensor of this name, or of a synonym."""
    return found_as(name, NativeReader.open(role_dir).names) is not None


def _closest(name: str, names: Iterable[str]) -> str:
    known = list(names)
    inside = [each for each in known if name in each]
    close = inside or difflib.get_close_matches(name, known, _SUGGESTED, cutoff=0.5)
    if not close:
        return ": list all tensors with --tensors"
    more = f" and {len(close) - _SUGGESTED} more" if len(close) > _SUGGESTED else ""
    return f": the closest are {', '.join(close[:_SUGGESTED])}{more}"


def _describe(reader: NativeReader, name: str, progress: Progress) -> TensorDetails:
    shards = {key: shards_of(reader, key) for key in keys_of(reader, name)}
    aliases = {key for key in shards if key.kind == PARAM and reader.is_alias(key)}
    read = {key: found for key, found in shards.items() if key.kind != OPAQUE and key not in aliases}
    total = sum(_numel(found) * torch_dtype(found[0].dtype).itemsize for found in read.values())
    count = summed(progress, total)
    kinds = []
    for key, found in shards.items():
        values = _values(reader, key, found, count) if key in read else None
        parts = tuple(_part(reader, shard) for shard in found)
        same_as = found[0].key.kind if key in aliases else None
        kinds.append(KindDetails(key.kind, found[0].dtype, found[0].region.global_shape, same_as, values, parts))
    return TensorDetails(name, tuple(kinds))


def _numel(shards: Sequence[StoredShard]) -> int:
    """Returns the number of elements of a tensor, or of all shards of bound state."""
    if shards[0].beside is not None:
        return sum(shard.region.numel for shard in shards)
    return math.prod(shards[0].region.global_shape)


def _part(reader: NativeReader, shard: StoredShard) -> StoredPart:
    rank = reader.file(shard.file).rank
    return StoredPart(rank, reader.manifest.ranks[rank], shard.file, shard.offset, shard.nbytes, shard.region)


def _values(
    reader: NativeReader, key: ShardKey, shards: Sequence[StoredShard], progress: Callable[[int], None]
) -> Values:
    dtype = torch_dtype(shards[0].dtype)
    memory = torch.empty(min(_numel(shards), max(1, _BATCH_BYTES // dtype.itemsize)), dtype=dtype)
    found = _Sums()
    for batch in _batches(_reads(reader, key, shards), len(memory)):
        reader.read([(read, memory) for read in batch])
        numel = sum(read.rows.numel for read in batch)
        found.add(memory[:numel])
        progress(numel * dtype.itemsize)
    return found.values()


def _reads(reader: NativeReader, key: ShardKey, shards: Sequence[StoredShard]) -> Sequence[ReadRange]:
    """Returns ranges that contain each element once, even if several tensor-parallel ranks have stored the element."""
    if shards[0].beside is not None:
        return [ReadRange.whole(shard) for shard in shards]
    return reads_of(reader, key, Region.whole(shards[0].region.global_shape), shards)


def _batches(reads: Iterable[ReadRange], most: int) -> Iterator[list[ReadRange]]:
    """Groups ranges so that the ranges of a group have at most `most` elements in all."""
    batch, used = list[ReadRange](), 0
    for read in reads:
        for rows in _pieces(read.rows, most):
            if used + rows.numel > most:
                yield batch
                batch, used = [], 0
            batch.append(ReadRange(read.stored, rows._replace(destination=used)))
            used += rows.numel
    if batch:
        yield batch


def _pieces(rows: Rows, most: int) -> Iterator[Rows]:
    """Cuts rows into pieces of at most `most` elements. In memory, the rows of a piece have no gaps between them."""
    if rows.numel == 0:
        return
    if rows.source_stride == rows.row or rows.rows == 1:
        rows = Rows(rows.start, 0, rows.numel)
    if rows.rows == 1 or rows.row > most:
        for number in range(rows.rows):
            start = rows.start + number * rows.source_stride
            yield from (Rows(start + at, 0, min(most, rows.row - at)) for at in range(0, rows.row, most))
        return
    many = most // rows.row
    for first in range(0, rows.rows, many):
        count = min(many, rows.rows - first)
        yield Rows(rows.start + first * rows.source_stride, 0, rows.row, count, rows.source_stride, rows.row)


class _Sums:
    """Collects statistics from batches of elements."""

    def __init__(self) -> None:
        self._count = self._zeros = self._nans = self._infs = 0
        self._minimum, self._maximum = math.inf, -math.inf
        self._finite, self._mean, self._squares, self._norm = 0, 0.0, 0.0, 0.0

    def add(self, elements: torch.Tensor) -> None:
        values = elements.to(torch.float64)
        self._count += len(values)
        self._zeros += len(values) - int(values.count_nonzero())
        # A sum is finite only if all terms are finite. So for most tensors, this check shows that no element is NaN or
        # infinite.
        if not math.isfinite(float(values.sum())):
            nans = values.isnan()
            self._nans += int(nans.sum())
            finite = values.isfinite()
            self._infs += int((~finite).sum()) - int(nans.sum())
            values = values[finite]
        if not len(values):
            return
        low, high = values.aminmax()
        self._minimum, self._maximum = min(self._minimum, float(low)), max(self._maximum, float(high))
        self._norm = math.hypot(self._norm, float(torch.linalg.vector_norm(values)))
        self._merge(len(values), *map(float, torch.var_mean(values, correction=0)))

    def _merge(self, count: int, variance: float, mean: float) -> None:
        """Merges means and sums of squared distances from the mean without cancellation (Chan, Golub and LeVeque)."""
        all_of = self._finite + count
        apart = mean - self._mean
        self._squares += variance * count + apart * apart * self._finite * count / all_of
        self._mean += apart * count / all_of
        self._finite = all_of

    def values(self) -> Values:
        counts = self._count, self._zeros, self._nans, self._infs
        if not self._finite:
            return Values(*counts, None, None, None, None, None)
        std = math.sqrt(self._squares / self._finite)
        return Values(*counts, self._minimum, self._maximum, self._mean, std, self._norm)
