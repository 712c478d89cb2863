"""Finds what differs between two checkpoints of this package: tensors, optimizer state, and all other state.

Their parallel layouts may differ, because global tensors are compared.

Tensors are compared in flat ranges of 8 MiB. What belongs to ranks' files as a whole (`_extra_state`, SOAP's bases,
random states) is compared only under the same layout; otherwise a note says so, and does not count as a difference.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.model_facts import different_facts
from mcore_ckpt.errors import CheckpointCorruptError, InvalidArgumentError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.io import tuning
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.patterns import compiled
from mcore_ckpt.sharding.plan import OPAQUE, ReadRange, ShardKey, StoredShard, plan_reads
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.tools.examine.contents import keys_of, shards_of
from mcore_ckpt.tools.examine.differences import EXACT, Differences, DifferentValue, Tolerance, different_values
from mcore_ckpt.tools.examine.select import Selection, select

# How many bytes of each of two tensors a thread compares at a time.
_BATCH_BYTES = 8 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DifferentTensor:
    """One kind of a tensor (the model's weights, or a part of the optimizer's state) that differs.

    Attributes:
        name: the tensor's global name in A; in B if only B has it.
        kind: "model", "opaque", "param", "exp_avg", ...
        left: dtype and shape in A; None if only B has it.
        right: dtype and shape in B; None if only A has it.
        numel: the number of elements that were compared; 0 if they were not.
        differing: how many of them differ by more than the tolerance.
        max_abs: the largest absolute difference.
        max_rel: the largest difference relative to B.
    """

    name: str
    kind: str
    left: TensorInfo | None
    right: TensorInfo | None
    numel: int = 0
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    @property
    def problem(self) -> str:
        """What differs, in a word or two: only in A, only in B, shape, dtype, values."""
        if self.left is None or self.right is None:
            return "only in B" if self.left is None else "only in A"
        if self.left.shape != self.right.shape:
            return "shape"
        return "values" if self.differing else "dtype"

    @property
    def sides(self) -> tuple[str, str]:
        """Dtype and shape in A and in B; "-" where it is not there."""
        left, right = ("-" if info is None else info.text for info in (self.left, self.right))
        return left, right


@dataclass(frozen=True)
class RoleDiff:
    """What differs between two roles.

    Attributes:
        left: the role's folder in A.
        right: the role's folder in B.
        compared: how many tensors were compared, with each kind counted.
        tensors: those that differ, the worst first.
        values: which other values differ: the model's configuration, param groups, steps, LR scheduler, random
            states, extra state.
        notes: what could not be compared, because the layouts differ.
        nbytes: how many bytes of A were compared.
    """

    left: Path
    right: Path
    compared: int
    tensors: tuple[DifferentTensor, ...]
    values: tuple[DifferentValue, ...]
    notes: tuple[str, ...]
    nbytes: int

    @property
    def is_same(self) -> bool:
        """True if nothing differs."""
        return not self.tensors and not self.values


@dataclass(frozen=True)
class Diff:
    """What differs between the checkpoints A and B.

    Attributes:
        roles: the result for each role that both have.
        only_left: the roles that only A has.
        only_right: the roles that only B has.
        seconds: how long it took.
    """

    roles: tuple[RoleDiff, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    seconds: float = field(compare=False)

    @property
    def is_same(self) -> bool:
        """True if nothing differs."""
        return not self.only_left and not self.only_right and all(role.is_same for role in self.roles)


def diff(
    left: Path,
    right: Path,
    tolerance: Tolerance = EXACT,
    ignored: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Diff:
    """Compares two checkpoints. The memory does not grow with their size. The CRC of each block is checked.

    Args:
        left: A: the folder of a role, of a step, or of all steps (the newest complete one).
        right: B, the same. If both are folders of one role, these may have different names.
        tolerance: how much values of tensors may differ.
        ignored: regular expressions; tensors whose whole name matches one are not compared.
        progress: called with the number of bytes of A that have been compared, and the number to compare.

    Raises:
        InvalidArgumentError: the two have no role in common.
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointCorruptError: a file is missing or damaged.

    Example:
        >>> diff(Path("a/global_steps_100"), Path("b/global_steps_100")).is_same  # doctest: +SKIP
        True
    """
    return diff_selected(select(left), select(right), tolerance, ignored, progress)


def diff_selected(
    left: Selection,
    right: Selection,
    tolerance: Tolerance = EXACT,
    ignored: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Diff:
    """Does what `diff` does with checkpoints that are selected already."""
    started = time.monotonic()
    ours, theirs = _roles(left), _roles(right)
    if len(ours) == len(theirs) == 1:
        theirs = dict(zip(ours, theirs.values(), strict=True))
    both = [role for role in ours if role in theirs]
    if not both:
        raise InvalidArgumentError(f"{_told(left)}, {_told(right)}: name the folders of two roles")
    patterns = compiled(ignored, "ignored")
    with reading([*ours.values(), *theirs.values()]):  # a trainer that still runs could delete a step
        pairs = [_RolePair.open(ours[role], theirs[role], patterns) for role in both]
        count = _Counter(sum(pair.nbytes for pair in pairs), progress)
        found = tuple(pair.diff(tolerance, count) for pair in pairs)
    return Diff(
        found,
        tuple(role for role in ours if role not in theirs),
        tuple(role for role in theirs if role not in ours),
        time.monotonic() - started,
    )


def _roles(selection: Selection) -> dict[str, Path]:
    return {folder.name: folder for folder in selection.role_dirs}


def _told(selection: Selection) -> str:
    return f"{selection.role_dirs[0].parent} has {', '.join(_roles(selection))}"


class _Counter:
    """Counts compared bytes on several threads."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress = total, progress
        self._done, self._lock = 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total)


@dataclass(frozen=True, eq=False)
class _Pair:
    """One kind of a tensor in A and in B. No shards: it is not there."""

    name: str
    kind: str
    left: Sequence[StoredShard]
    right: Sequence[StoredShard]

    @property
    def infos(self) -> tuple[TensorInfo | None, TensorInfo | None]:
        """Dtype and global shape on both sides."""
        left, right = (_info(shards) for shards in (self.left, self.right))
        return left, right

    @property
    def is_whole(self) -> bool:
        """True if the shards are parts of a global tensor. Others belong to ranks' files, or shards, as a whole."""
        return self.kind != OPAQUE and all(shard.beside is None for shard in (*self.left[:1], *self.right[:1]))

    @property
    def is_comparable(self) -> bool:
        """False if both sides have the tensor, but in the files of other ranks, so that no two shards correspond."""
        both = self.left and self.right
        return self.is_whole or not both or {of.file for of in self.left} == {of.file for of in self.right}

    @property
    def nbytes(self) -> int:
        """The bytes of A that must be compared; 0 if there is nothing to compare with."""
        left, right = self.infos
        if left is None or right is None or left.shape != right.shape or not self.is_comparable:
            return 0
        return Region.whole(left.shape).numel * left.dtype.itemsize


def _info(shards: Sequence[StoredShard]) -> TensorInfo | None:
    return TensorInfo(torch_dtype(shards[0].dtype), shards[0].region.global_shape) if shards else None


@dataclass(frozen=True, eq=False)
class _RolePair:
    """Two roles, and the tensors to compare."""

    left: NativeReader
    right: NativeReader
    pairs: Sequence[_Pair]

    @staticmethod
    def open(left_dir: Path, right_dir: Path, ignored: Sequence[re.Pattern[str]]) -> _RolePair:
        left, right = NativeReader.open(left_dir), NativeReader.open(right_dir)
        pairs = [
            pair
            for name, other in _names(left, right)
            if not any(pattern.fullmatch(name) for pattern in ignored)
            for pair in _pairs(left, right, name, other)
        ]
        return _RolePair(left, right, pairs)

    @property
    def nbytes(self) -> int:
        return sum(pair.nbytes for pair in self.pairs)

    def diff(self, tolerance: Tolerance, count: _Counter) -> RoleDiff:
        stop = threading.Event()
        pairs = [pair for pair in self.pairs if pair.is_comparable]

        def compare(pair: _Pair) -> DifferentTensor | None:
            return _compared(self.left, self.right, pair, tolerance, count, stop)

        with ThreadPoolExecutor(tuning.HOST_THREADS, thread_name_prefix="diff") as pool:
            try:
                found = [each for each in pool.map(compare, pairs) if each is not None]
            except BaseException:
                stop.set()  # else Ctrl-C would wait for the tensors that are being compared
                raise
        values, notes = _plain_differences(self.left, self.right)
        if len(pairs) < len(self.pairs):
            notes.append(
                f"{len(self.pairs) - len(pairs)} tensors that belong to ranks' files as a whole: not compared, because "
                "the layouts differ"
            )
        return RoleDiff(
            Path(self.left.place),
            Path(self.right.place),
            len(pairs),
            tuple(sorted(found, key=_badness)),
            tuple(values),
            tuple(notes),
            self.nbytes,
        )


def _badness(tensor: DifferentTensor) -> tuple[bool, float, int, str]:
    """Returns a sort key: first what could not be compared, then the largest differences."""
    return bool(tensor.numel), -tensor.max_abs, -tensor.differing, natural_order(tensor.name)


def _names(left: NativeReader, right: NativeReader) -> Iterator[tuple[str, str]]:
    """Yields the names of all tensors in A and in B. A tensor may have a synonym in B."""
    there = {name: found_as(name, right.names) or name for name in left.names}
    yield from there.items()
    matched = set(there.values())
    yield from ((name, name) for name in right.names if name not in matched)


def _pairs(left: NativeReader, right: NativeReader, name: str, other: str) -> Iterator[_Pair]:
    ours = {key.kind: key for key in keys_of(left, name)} if name in left.names else {}
    theirs = {key.kind: key for key in keys_of(right, other)} if other in right.names else {}
    for kind in dict.fromkeys((*ours, *theirs)):
        both = [reader.is_alias(keys[kind]) for reader, keys in ((left, ours), (right, theirs)) if kind in keys]
        if len(both) == 2 and all(both):
            continue  # the main parameters are the model's tensors, which are compared already
        yield _Pair(
            name,
            kind,
            shards_of(left, ours[kind]) if kind in ours else (),
            shards_of(right, theirs[kind]) if kind in theirs else (),
        )


# -- one tensor --------------------------------------------------------------------------------------------


def _compared(
    left: NativeReader,
    right: NativeReader,
    pair: _Pair,
    tolerance: Tolerance,
    count: _Counter,
    stop: threading.Event,
) -> DifferentTensor | None:
    """Returns how one tensor differs; None if it does not."""
    ours, theirs = pair.infos
    if ours is None or theirs is None:
        return DifferentTensor(pair.name, pair.kind, ours, theirs)
    found, numel = Differences(), 0
    for our_shards, their_shards in _parts(pair):
        ours, theirs = _info(our_shards), _info(their_shards)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return DifferentTensor(pair.name, pair.kind, ours, theirs)
        region = Region.whole(ours.shape)
        numel += region.numel
        for mine, other in _batches((left, our_shards, ours), (right, their_shards, theirs), region, pair, stop):
            found.add(mine, other, tolerance)
            count.add(mine.nbytes)
    if not found.count and (tolerance.any_dtype or ours.dtype == theirs.dtype):
        return None
    return DifferentTensor(pair.name, pair.kind, ours, theirs, numel, found.count, found.max_abs, found.max_rel)


def _parts(pair: _Pair) -> Iterator[tuple[Sequence[StoredShard], Sequence[StoredShard]]]:
    """Yields the shards to compare: all together, or file by file if each is there as a whole."""
    if pair.is_whole:
        yield pair.left, pair.right
        return
    there = {shard.file: shard for shard in pair.right}
    for shard in pair.left:
        yield (shard,), (there[shard.file],)


_Side = tuple[NativeReader, Sequence[StoredShard], TensorInfo]


def _batches(
    left: _Side, right: _Side, region: Region, pair: _Pair, stop: threading.Event
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the same elements of both sides, batch by batch, in memory that the next batch overwrites."""
    step = max(1, _BATCH_BYTES // max(left[2].dtype.itemsize, right[2].dtype.itemsize))
    memory = [torch.empty(min(step, region.numel), dtype=info.dtype) for _, _, info in (left, right)]
    for start in range(0, region.numel, step):
        if stop.is_set():
            return
        part = region.with_flat(start, min(start + step, region.numel))
        batch = []
        for (reader, shards, _), its_memory in zip((left, right), memory, strict=True):
            target = its_memory[: part.numel]
            _read(reader, ShardKey(pair.name, pair.kind), part, shards, target)
            batch.append(target)
        yield batch[0], batch[1]


def _read(
    reader: NativeReader, key: ShardKey, part: Region, shards: Sequence[StoredShard], target: torch.Tensor
) -> None:
    plan = plan_reads(part, shards)
    if plan.missing:
        raise CheckpointCorruptError(f"{reader.place}: tensor {key}: {plan.missing} elements are in none of its files")
    reads: list[tuple[ReadRange, torch.Tensor]] = [(read, target) for read in plan.reads]
    reader.read(reads)


# -- everything but tensors --------------------------------------------------------------------------------

_PLAIN_KINDS = {"common": file_names.COMMON_FILE, "rng": "random states", "extra": "extra state"}


def _plain_differences(left: NativeReader, right: NativeReader) -> tuple[list[DifferentValue], list[str]]:
    """Returns the values that differ, and notes on what cannot be compared under different layouts."""
    values = list(_different_facts(left, right))
    notes: list[str] = []
    for kind, what in _PLAIN_KINDS.items():
        ours, theirs = (_files(reader, kind) for reader in (left, right))
        if kind != "common" and left.manifest.ranks != right.manifest.ranks and ours.keys() != theirs.keys():
            notes.append(f"{what}: not compared, because the layouts differ")
            continue
        for path in dict.fromkeys((*ours, *theirs)):
            if path in ours and path in theirs:
                found = different_values(left.plain(path), right.plain(path), "")
                values += (replace(each, name=f"{path}: {each.name}") for each in found)
            else:
                there = "this file"
                values.append(DifferentValue(path, there if path in ours else None, there if path in theirs else None))
    return values, notes


def _different_facts(left: NativeReader, right: NativeReader) -> Iterator[DifferentValue]:
    """Yields what the two models compute otherwise with the same tensors. Older checkpoints do not say it."""
    ours, theirs = left.manifest.model, right.manifest.model
    for each in different_facts(ours or {}, theirs or {}):
        yield DifferentValue(f"model: {each.name}", str(each.saved), str(each.live))


def _files(reader: NativeReader, kind: str) -> Mapping[str, None]:
    return dict.fromkeys(file.path for file in reader.manifest.files_of(kind))
