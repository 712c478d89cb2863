"""Two HuggingFace models tensor by tensor, in both directions; one may still be a checkpoint that nobody has merged."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError
from mcore_ckpt.formats.contract import CheckpointReader, TensorInfo, weights_of
from mcore_ckpt.formats.huggingface.elements import Elements, Scratch, fill
from mcore_ckpt.formats.huggingface.export_plan import FileTensor
from mcore_ckpt.formats.huggingface.safetensors_files import read_folder, read_weight_map
from mcore_ckpt.formats.shard_reader import ShardReader, safetensors_reader, stored_shard
from mcore_ckpt.formats.torch_save_files import PtTensor, read_pt
from mcore_ckpt.io import tuning
from mcore_ckpt.models.mapping import HfTensor, Slab
from mcore_ckpt.models.table import HF_EMBEDDING, HF_HEAD
from mcore_ckpt.sharding.plan import StoredShard
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.tools.merge import MergeJob

_BIN_FILE, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

# Of both tensors, at a time on each thread; looking at them takes some times as much where they differ.
_PIECE_BYTES = 8 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of one HuggingFace model, and where they are. `where` is for messages."""

    where: Path
    reader: CheckpointReader
    tensors: Mapping[str, FileTensor]


@dataclass(frozen=True)
class Tolerance:
    """How much a value may differ: by `atol + rtol * |reference|`. Without either not a bit may.

    `any_dtype`: tensors of different dtypes are compared by value.
    """

    atol: float = 0.0
    rtol: float = 0.0
    any_dtype: bool = False

    @property
    def is_exact(self) -> bool:
        return self.atol == 0 and self.rtol == 0


@dataclass(frozen=True)
class ComparedTensor:
    """What was found of one tensor.

    Attributes:
        name: its name.
        ours, reference: what it is on either side; None: it is not there.
        differing: how many elements differ by more than they may; of tensors that were not compared, 0.
        max_abs, max_rel: the largest difference, and the largest in proportion to the reference.
        is_same: whether nothing is wrong with it.
        remark: what else to say of it.
    """

    name: str
    ours: TensorInfo | None
    reference: TensorInfo | None
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    is_same: bool = False
    remark: str = ""

    @property
    def problem(self) -> str:
        """What is wrong, in a word; empty: nothing."""
        if self.is_same:
            return ""
        if self.ours is None or self.reference is None:
            return "missing" if self.ours is None else "extra"
        if self.ours.shape != self.reference.shape:
            return "shape"
        return "values" if self.differing else "dtype"


@dataclass(frozen=True)
class Comparison:
    """The outcome. `tensors` are those of either side, without the ignored ones; `nbytes` is what was compared."""

    ours: Path
    reference: Path
    tensors: tuple[ComparedTensor, ...]
    ignored: tuple[str, ...]
    nbytes: int
    seconds: float = field(compare=False)

    @property
    def is_same(self) -> bool:
        return all(tensor.is_same for tensor in self.tensors)

    def worst(self) -> list[ComparedTensor]:
        """Tensors with anything to say of them: missing ones first, then by how much they differ."""
        told = [tensor for tensor in self.tensors if not tensor.is_same or tensor.max_abs or tensor.remark]
        return sorted(told, key=_badness, reverse=True)


def open_folder(folder: Path) -> Weights:
    """A HuggingFace model's folder: safetensors or, of old ones, `pytorch_model*.bin`, in one file or several.

    Raises:
        CheckpointNotFoundError: there are no weights.
        CheckpointCorruptError: a file is missing or damaged, or holds anything but tensors.
    """
    try:
        reader = safetensors_reader(folder, read_folder(folder))
    except CheckpointNotFoundError:
        reader = _open_bins(folder)
    return Weights(folder, reader, {name: _as_it_is(name, info) for name, info in weights_of(reader).items()})


def open_job(job: MergeJob) -> Weights:
    """What merging a checkpoint would write."""
    return Weights(job.where, job.reader, {tensor.name: tensor for file in job.plan.files for tensor in file.tensors})


def compare(
    ours: Weights,
    reference: Weights,
    tolerance: Tolerance = Tolerance(),
    ignored: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Comparison:
    """Compares all tensors, several at a time, in pieces: memory does not grow with the models.

    A head that only one side has is the same if it is the other's embedding: transformers does not write it where
    embeddings are tied.

    Args:
        ours: what is looked at.
        reference: what it should be.
        tolerance: what may differ.
        ignored: regular expressions of tensors that may be missing or differ.
        progress: told of bytes of the reference that have been compared, and of how many there are.

    Raises:
        CheckpointCorruptError: a file cannot be read.
        CheckpointMismatchError: there is nothing to compare.

    Example:
        >>> compare(open_folder(Path("merged")), open_folder(Path("model"))).is_same  # doctest: +SKIP
        True
    """
    started = time.monotonic()
    patterns = [re.compile(pattern) for pattern in ignored]
    names = list(dict.fromkeys((*reference.tensors, *ours.tensors)))
    left_out = tuple(name for name in names if any(pattern.fullmatch(name) for pattern in patterns))
    pairs = [_Pair.of(name, ours, reference) for name in names if name not in left_out]
    if not pairs:
        raise CheckpointMismatchError(
            f"{ours.where} and {reference.where}: nothing is left to compare: {len(names)} tensors, all ignored"
        )
    total = sum(pair.nbytes for pair in pairs)
    done, lock = [0], threading.Lock()

    def look(pair: _Pair) -> ComparedTensor:
        found = pair.compared(tolerance)
        with lock:
            done[0] += pair.nbytes
            progress(done[0], total)
        return found

    with ThreadPoolExecutor(tuning.HOST_THREADS, thread_name_prefix="compare") as pool:
        tensors = tuple(pool.map(look, pairs))
    return Comparison(ours.where, reference.where, tensors, left_out, total, time.monotonic() - started)


def _badness(tensor: ComparedTensor) -> tuple[bool, bool, float, int]:
    compared = tensor.ours is not None and tensor.reference is not None and tensor.ours.shape == tensor.reference.shape
    return not tensor.is_same, not compared, tensor.max_abs, tensor.differing


# -- folders -----------------------------------------------------------------------------------------------


def _as_it_is(name: str, info: TensorInfo) -> FileTensor:
    return FileTensor(HfTensor(name, info.shape, (Slab(0, name, Region.whole(info.shape)),)), info.dtype)


def _open_bins(folder: Path) -> ShardReader:
    shards = _read_bins(folder)
    return ShardReader(folder, {name: info for name, (info, _) in shards.items()}, lambda name: (shards[name][1],))


def _read_bins(folder: Path) -> dict[str, tuple[TensorInfo, StoredShard]]:
    index = folder / _BIN_INDEX
    if index.exists():
        where = read_weight_map(index)
        files = sorted(set(where.values()))
    elif (folder / _BIN_FILE).exists():
        where, files = {}, [_BIN_FILE]
    else:
        raise CheckpointNotFoundError(f"{folder}: has no weights: neither model.safetensors nor {_BIN_FILE}, in pieces")
    found = {name: shard for file in files for name, shard in _read_bin(folder / file)}
    if missing := sorted(where.keys() - found.keys()):
        raise CheckpointCorruptError(f"{folder / where[missing[0]]}: lacks {missing[0]}, which {_BIN_INDEX} names")
    return found


def _read_bin(path: Path) -> Iterator[tuple[str, tuple[TensorInfo, StoredShard]]]:
    state: Any = read_pt(path)
    if not isinstance(state, Mapping):
        raise CheckpointCorruptError(f"{path}: wanted a state dict, found a {type(state).__name__}")
    for name, tensor in state.items():
        if not isinstance(tensor, PtTensor):
            raise CheckpointCorruptError(f"{path}: {name}: wanted a tensor, found a {type(tensor).__name__}")
        shard = stored_shard(str(name), tensor, Region.whole(tensor.shape))
        yield str(name), (TensorInfo(tensor.dtype, tensor.shape), shard)


# -- one tensor --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pair:
    """A tensor of two models. `remark`: why the two have different names, if they have."""

    name: str
    ours: Weights
    reference: Weights
    left: FileTensor | None
    right: FileTensor | None
    remark: str

    @staticmethod
    def of(name: str, ours: Weights, reference: Weights) -> _Pair:
        left, right = ours.tensors.get(name), reference.tensors.get(name)
        remark = ""
        if name == HF_HEAD and left is None and (left := ours.tensors.get(HF_EMBEDDING)):
            remark = "tied here: compared with the embedding"
        elif name == HF_HEAD and right is None and (right := reference.tensors.get(HF_EMBEDDING)):
            remark = "tied in the reference: compared with its embedding"
        return _Pair(name, ours, reference, left, right, remark)

    @property
    def nbytes(self) -> int:
        return self.right.nbytes if self.left is not None and self.right is not None else 0

    def compared(self, tolerance: Tolerance) -> ComparedTensor:
        ours, reference = (None if side is None else _info(side) for side in (self.left, self.right))
        if self.left is None or self.right is None or self.left.tensor.shape != self.right.tensor.shape:
            return self._not_tied() if self.remark else ComparedTensor(self.name, ours, reference)
        found = _Differences()
        for left, right in self._pieces(self.left, self.right):
            found.add(left, right, tolerance)
        is_same = not found.count and (tolerance.any_dtype or self.left.dtype == self.right.dtype)
        if self.remark and not is_same:
            return self._not_tied()
        return ComparedTensor(
            self.name, ours, reference, found.count, found.max_abs, found.max_rel, is_same, self.remark
        )

    def _not_tied(self) -> ComparedTensor:
        """A head that only one side has, and that is not the other's embedding: a tensor too many or too few."""
        ours, reference = (side.tensors.get(self.name) for side in self._sides)
        return ComparedTensor(
            self.name,
            None if ours is None else _info(ours),
            None if reference is None else _info(reference),
            remark="nor is it the other side's embedding",
        )

    @property
    def _sides(self) -> tuple[Weights, Weights]:
        return self.ours, self.reference

    def _pieces(self, left: FileTensor, right: FileTensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        count = left.tensor.numel
        step = max(1, _PIECE_BYTES // max(left.dtype.itemsize, right.dtype.itemsize))
        memory = [torch.empty(min(step, count), dtype=side.dtype) for side in (left, right)]
        scratch = Scratch(), Scratch()
        for start in range(0, count, step):
            length = min(step, count - start)
            parts = []
            for side, tensor, its_memory, its_scratch in zip(self._sides, (left, right), memory, scratch, strict=True):
                fill(side.reader, [Elements(tensor, start, its_memory[:length])], its_scratch)
                parts.append(its_memory[:length])
            yield parts[0], parts[1]


def _info(tensor: FileTensor) -> TensorInfo:
    return TensorInfo(tensor.dtype, tuple(tensor.tensor.shape))


class _Differences:
    """How two tensors differ, summed up over their pieces."""

    def __init__(self) -> None:
        self.count = 0
        self.max_abs = 0.0
        self.max_rel = 0.0

    def add(self, left: torch.Tensor, right: torch.Tensor, tolerance: Tolerance) -> None:
        if left.dtype == right.dtype:
            # Whole words, for speed; and -0.0 is another value than 0.0, NaN the same as itself.
            bits = _bits(left) != _bits(right)
            if not bits.any():
                return
            left, right = left[bits], right[bits]
        ours, wanted = left.to(torch.float64), right.to(torch.float64)
        difference = (ours - wanted).abs()
        # Equal infinities give NaN, and NaN where it should be is what it should be.
        difference[(ours == wanted) | (ours.isnan() & wanted.isnan())] = 0.0
        difference.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        relative = torch.where(difference == 0, 0.0, difference / wanted.abs().nan_to_num(nan=0.0))
        self.max_abs = max(self.max_abs, float(difference.max()) if len(difference) else 0.0)
        self.max_rel = max(self.max_rel, float(relative.nan_to_num(nan=torch.inf).max()) if len(relative) else 0.0)
        if not tolerance.is_exact:
            allowed = tolerance.atol + tolerance.rtol * wanted.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            self.count += int((difference > allowed).sum())
        elif left.dtype == right.dtype:
            self.count += len(left)
        else:
            self.count += int((difference > 0).sum())


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_WORDS[tensor.dtype.itemsize])
