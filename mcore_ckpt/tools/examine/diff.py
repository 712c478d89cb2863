"""Finds what differs between two checkpoints of this package: tensors, optimizer state, and all other state.

The checkpoints may have different layouts, because global tensors are compared. `_extra_state` and SOAP's bases are not
parts of a global tensor, so they are compared file by file, and only if both checkpoints have them in files of the same
names. Random states and the trainer's extra state are compared if the layouts or the names of their files are the same.
A note names the state that was not compared; such a note does not count as a difference.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.model_facts import different_facts
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.patterns import compiled
from mcore_ckpt.sharding.plan import OPAQUE, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.tools.examine.contents import keys_of, reads_of, shards_of
from mcore_ckpt.tools.examine.differences import EXACT, Differences, DifferentValue, Tolerance, different_values
from mcore_ckpt.tools.examine.progress import Progress, no_progress
from mcore_ckpt.tools.examine.select import Selection, select
from mcore_ckpt.tools.examine.tensor_pairs import Pair, Side, compare_pairs


@dataclass(frozen=True)
class DifferentTensor:
    """One kind of a tensor (the model's weights, or a part of the optimizer's state) that differs.

    Attributes:
        name: the tensor's global name in A; in B if only B has it.
        kind: "model", "opaque", "param", "exp_avg", ...
        left, right: dtype and shape in A and in B; None if the tensor is missing there.
        numel: the number of elements that were compared; 0 if the tensor could not be compared.
        differing: how many compared elements differ by more than the tolerance.
        max_abs, max_rel: the largest absolute difference, and the largest difference relative to B.
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
        """The problem, in a word or two: only in A, only in B, shape, dtype, values."""
        if self.left is None or self.right is None:
            return "only in B" if self.left is None else "only in A"
        if self.left.shape != self.right.shape:
            return "shape"
        return "values" if self.differing else "dtype"

    @property
    def sides(self) -> tuple[str, str]:
        """Dtype and shape in A and in B, as text; "-" if the tensor is missing there."""
        left, right = ("-" if info is None else info.text for info in (self.left, self.right))
        return left, right


@dataclass(frozen=True)
class RoleDiff:
    """The differences between two roles.

    Attributes:
        left, right: the role's folder in A and in B.
        compared: how many tensors were compared; each kind of a tensor counts separately.
        tensors: the tensors that differ, the worst first.
        values: the other values that differ: in the model's configuration, param groups, steps, LR scheduler, random
            states and extra state.
        notes: sentences on the state that could not be compared, because the layouts differ.
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
        return not self.tensors and not self.values


@dataclass(frozen=True)
class Diff:
    """The differences between the checkpoints A and B: in each role that both have, and the roles that only one has."""

    roles: tuple[RoleDiff, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    seconds: float = field(compare=False)

    @property
    def is_same(self) -> bool:
        return not self.only_left and not self.only_right and all(role.is_same for role in self.roles)


def diff(
    left: Path | Selection,
    right: Path | Selection,
    tolerance: Tolerance = EXACT,
    ignored: Sequence[str] = (),
    progress: Progress = no_progress,
) -> Diff:
    """Compares two checkpoints. Checks the CRC of each block.

    Memory use does not grow with the size of the checkpoints.

    Args:
        left: A: the folder of a role, of a step, or of all steps, or a selection by `select`. If it is the folder of
            all steps, the newest complete step is compared.
        right: B, given in the same way. If A and B each have only one role, these roles may have different names.
        ignored: regular expressions. A tensor is not compared if its whole name matches one of them.

    Raises:
        InvalidArgumentError: A and B have no role in common.
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointCorruptError: a file is missing or damaged.

    Example:
        >>> diff(Path("a/global_steps_100"), Path("b/global_steps_100")).is_same  # doctest: +SKIP
        True
    """
    started = time.monotonic()
    ours, theirs = ({path.name: path for path in _role_dirs(each)} for each in (left, right))
    if len(ours) == len(theirs) == 1:
        theirs = dict(zip(ours, theirs.values(), strict=True))
    both = [role for role in ours if role in theirs]
    if not both:
        told = (f"{next(iter(each.values())).parent} has {', '.join(each)}" for each in (ours, theirs))
        raise InvalidArgumentError(f"{', '.join(told)}, so no role is in both: name the folders of two roles")
    patterns = compiled(ignored, "ignored")
    with reading([*ours.values(), *theirs.values()]):  # keeps a running trainer from deleting a step
        pairs = [_RolePair.open(ours[role], theirs[role], patterns) for role in both]
        groups = [tensor.pairs for pair in pairs for tensor in pair.tensors]
        differences = iter(compare_pairs(groups, tolerance, progress, "diff"))
        found = tuple(pair.diff(differences, tolerance) for pair in pairs)
    return Diff(
        found,
        tuple(role for role in ours if role not in theirs),
        tuple(role for role in theirs if role not in ours),
        time.monotonic() - started,
    )


def _role_dirs(chosen: Path | Selection) -> Sequence[Path]:
    return (select(chosen) if isinstance(chosen, Path) else chosen).role_dirs


@dataclass(frozen=True, eq=False)
class _RolePair:
    """Two roles, and each kind of their tensors that can be compared.

    `apart` counts the pairs of a tensor and a kind that cannot be compared, because the files with their shards have
    other names in B than in A.
    """

    left: NativeReader
    right: NativeReader
    tensors: Sequence[_Tensor]
    apart: int

    @staticmethod
    def open(left_dir: Path, right_dir: Path, ignored: Sequence[re.Pattern[str]]) -> _RolePair:
        left, right = NativeReader.open(left_dir), NativeReader.open(right_dir)
        tensors = [
            tensor
            for name, other in _names(left, right)
            if not any(pattern.fullmatch(name) for pattern in ignored)
            for tensor in _tensors(left, right, name, other)
        ]
        there = [tensor for tensor in tensors if tensor is not None]
        return _RolePair(left, right, there, len(tensors) - len(there))

    def diff(self, differences: Iterator[Differences], tolerance: Tolerance) -> RoleDiff:
        """Returns the result. Takes one item from `differences` for each item of `tensors`."""
        found = [tensor.result(next(differences), tolerance) for tensor in self.tensors]
        values, notes = _plain_differences(self.left, self.right)
        if self.apart:
            notes.append(
                f"{self.apart} tensors belong to the files of single ranks, and were not compared because the layouts "
                "differ"
            )
        return RoleDiff(
            Path(self.left.place),
            Path(self.right.place),
            len(self.tensors),
            tuple(sorted((each for each in found if each is not None), key=_badness)),
            tuple(values),
            tuple(notes),
            sum(pair.left.nbytes for tensor in self.tensors for pair in tensor.pairs),
        )


def _badness(tensor: DifferentTensor) -> tuple[bool, float, int, str]:
    """Returns a sort key.

    Tensors that could not be compared come first, then the compared tensors, largest difference first.
    """
    return bool(tensor.numel), -tensor.max_abs, -tensor.differing, natural_order(tensor.name)


def _names(left: NativeReader, right: NativeReader) -> Iterator[tuple[str, str]]:
    """Yields the names of all tensors in A and in B. The name in B may be a synonym of the name in A."""
    there = {name: found_as(name, right.names) or name for name in left.names}
    yield from there.items()
    matched = set(there.values())
    yield from ((name, name) for name in right.names if name not in matched)


@dataclass(frozen=True, eq=False)
class _Tensor:
    """One kind of a tensor in A and in B. `pairs` is empty if A or B lacks the tensor, or if the shapes differ."""

    name: str
    kind: str
    left: TensorInfo | None
    right: TensorInfo | None
    pairs: tuple[Pair, ...] = ()

    def result(self, found: Differences, tolerance: Tolerance) -> DifferentTensor | None:
        """Returns the tensor's difference; None if both tensors are the same."""
        allowed = all(tolerance.allows(pair.left.info.dtype, pair.right.info.dtype) for pair in self.pairs)
        if self.pairs and allowed and not found.count:
            return None
        numel = sum(pair.left.numel for pair in self.pairs)
        return DifferentTensor(
            self.name, self.kind, self.left, self.right, numel, found.count, found.max_abs, found.max_rel
        )


def _tensors(left: NativeReader, right: NativeReader, name: str, other: str) -> Iterator[_Tensor | None]:
    """Yields each kind of a tensor.

    Yields None for a kind that must be compared file by file, if A and B do not have its shards in files of the same
    names.
    """
    ours = {key.kind: key for key in keys_of(left, name)} if name in left.names else {}
    theirs = {key.kind: key for key in keys_of(right, other)} if other in right.names else {}
    for kind in dict.fromkeys((*ours, *theirs)):
        both = [reader.is_alias(keys[kind]) for reader, keys in ((left, ours), (right, theirs)) if kind in keys]
        if len(both) == 2 and all(both):
            continue  # both main parameters are the model's own tensors, which are compared already
        here = shards_of(left, ours[kind]) if kind in ours else ()
        there = shards_of(right, theirs[kind]) if kind in theirs else ()
        if here and there:
            yield _in_both(left, right, ShardKey(name, kind), here, there)
        else:
            yield _Tensor(name, kind, _info(here) if here else None, _info(there) if there else None)


def _in_both(
    left: NativeReader, right: NativeReader, key: ShardKey, ours: Sequence[StoredShard], theirs: Sequence[StoredShard]
) -> _Tensor | None:
    infos = _info(ours), _info(theirs)
    parts = [(ours, theirs)]
    if key.kind == OPAQUE or any(shards[0].beside is not None for shards in (ours, theirs)):
        # These shards are not parts of a global tensor: each file has its own version of an opaque tensor, and bound
        # state belongs to another shard in the same file. Compare these shards file by file.
        there = {shard.file: shard for shard in theirs}
        if {shard.file for shard in ours} != there.keys():
            return None
        parts = [((shard,), (there[shard.file],)) for shard in ours]
    for here, other in parts:
        infos = _info(here), _info(other)
        if infos[0].shape != infos[1].shape:
            return _Tensor(key.name, key.kind, *infos)
    pairs = (Pair(_side(left, key, here), _side(right, key, other)) for here, other in parts)
    return _Tensor(key.name, key.kind, *infos, tuple(pairs))


def _info(shards: Sequence[StoredShard]) -> TensorInfo:
    return TensorInfo(torch_dtype(shards[0].dtype), shards[0].region.global_shape)


def _side(reader: NativeReader, key: ShardKey, shards: Sequence[StoredShard]) -> Side:
    info = _info(shards)
    return Side(info, partial(_read, reader, key, shards, Region.whole(info.shape)))


def _read(
    reader: NativeReader, key: ShardKey, shards: Sequence[StoredShard], whole: Region, start: int, memory: torch.Tensor
) -> None:
    part = whole.with_flat(start, start + len(memory))
    reader.read([(read, memory) for read in reads_of(reader, key, part, shards)])


_PLAIN_KINDS = {"common": file_names.COMMON_FILE, "rng": "random states", "extra": "extra state"}


def _plain_differences(left: NativeReader, right: NativeReader) -> tuple[list[DifferentValue], list[str]]:
    """Returns the values that differ, and notes on the state that cannot be compared because the layouts differ."""
    facts = different_facts(left.manifest.model or {}, right.manifest.model or {})  # older checkpoints have no facts
    values = [DifferentValue(f"model: {each.name}", str(each.saved), str(each.live)) for each in facts]
    values += _different_part_files(left, right)
    notes: list[str] = []
    for kind, what in _PLAIN_KINDS.items():
        ours, theirs = ({file.path: None for file in reader.manifest.files_of(kind)} for reader in (left, right))
        if kind != "common" and left.manifest.ranks != right.manifest.ranks and ours.keys() != theirs.keys():
            notes.append(f"{what}: not compared, because the layouts differ")
            continue
        for path in dict.fromkeys((*ours, *theirs)):
            if path in ours and path in theirs:
                found = different_values(left.plain(path), right.plain(path), "")
                values += (replace(each, name=f"{path}: {each.name}") for each in found)
            else:
                values.append(DifferentValue(path, *("this file" if path in each else None for each in (ours, theirs))))
    return values, notes


def _different_part_files(left: NativeReader, right: NativeReader) -> Iterator[DifferentValue]:
    """Yields the files of the step's parts that differ in size or CRC."""
    ours, theirs = (
        {file.path: f"{file.size} bytes, CRC {file.crc32:08x}" for file in reader.manifest.files_of("part")}
        for reader in (left, right)
    )
    for path in dict.fromkeys((*ours, *theirs)):
        if ours.get(path) != theirs.get(path):
            yield DifferentValue(path, ours.get(path), theirs.get(path))
