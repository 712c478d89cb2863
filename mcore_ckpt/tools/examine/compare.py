"""Compares two HuggingFace models tensor by tensor. Either model can be a checkpoint that has not been merged yet."""

from __future__ import annotations

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
from mcore_ckpt.formats.huggingface.hub import find_folder
from mcore_ckpt.formats.huggingface.reader import spelled_by_table
from mcore_ckpt.formats.huggingface.safetensors_files import read_folder, read_weight_map
from mcore_ckpt.formats.huggingface.stored_weights import DequantizingReader
from mcore_ckpt.formats.shard_reader import ShardReader, stored_shard
from mcore_ckpt.formats.torch_save_files import PtTensor, read_pt
from mcore_ckpt.io import tuning
from mcore_ckpt.models.accounting import OF_ACTIVATIONS
from mcore_ckpt.models.architecture import read_config
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.mapping import HfTensor, Slab
from mcore_ckpt.models.table import HF_EMBEDDING, HF_HEAD
from mcore_ckpt.sharding.patterns import compiled
from mcore_ckpt.sharding.plan import StoredShard
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.tools.examine.differences import EXACT, Differences, Tolerance

_EMBEDDINGS = (HF_EMBEDDING, "model.language_model.embed_tokens.weight")
_BIN_FILE, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

# The number of bytes of each tensor that a thread compares at a time. If elements differ, their fp64 copies need a few
# times as much memory.
_BATCH_BYTES = 8 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of one HuggingFace model.

    Attributes:
        where: the folder, for messages.
        reader: reads the stored tensors.
        tensors: the model's tensors by HuggingFace name, with their dtype and the stored tensors that they are made of.
        beside: the names of stored tensors that are no part of a value: scales of activations and caches.
    """

    where: Path
    reader: CheckpointReader
    tensors: Mapping[str, FileTensor]
    beside: tuple[str, ...] = ()

    @property
    def embedding(self) -> FileTensor | None:
        """The embedding of a language model, or of a vision-language model's language model. None if there is none."""
        found = (self.tensors.get(name) for name in _EMBEDDINGS)
        return next((tensor for tensor in found if tensor is not None), None)


@dataclass(frozen=True)
class ComparedTensor:
    """The result for one tensor.

    Attributes:
        name: its name.
        ours: its dtype and shape in the model under test; None if that model does not have it.
        reference: its dtype and shape in the reference; None if the reference does not have it.
        differing: how many elements differ by more than the tolerance; 0 if the tensors were not compared.
        max_abs: the largest absolute difference.
        max_rel: the largest difference relative to the reference.
        is_same: True if the tensors are the same within the tolerance.
        remark: a note for the reader of the result; may be empty.
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
        """The problem in one word: missing, extra, shape, values or dtype. Empty if the tensors are the same."""
        if self.is_same:
            return ""
        if self.ours is None or self.reference is None:
            return "missing" if self.ours is None else "extra"
        if self.ours.shape != self.reference.shape:
            return "shape"
        return "values" if self.differing else "dtype"


@dataclass(frozen=True)
class Comparison:
    """The result for two models.

    Attributes:
        ours: the folder of the model under test.
        reference: the folder of the reference.
        tensors: the result for each tensor that one or both models have, without the ignored ones.
        ignored: the names of the tensors that were not compared: the ignored ones, and scales of activations.
        nbytes: the number of bytes of the reference that were compared.
        seconds: how long the comparison took.
    """

    ours: Path
    reference: Path
    tensors: tuple[ComparedTensor, ...]
    ignored: tuple[str, ...]
    nbytes: int
    seconds: float = field(compare=False)

    @property
    def is_same(self) -> bool:
        """True if all tensors are the same within the tolerance."""
        return all(tensor.is_same for tensor in self.tensors)

    def worst(self) -> list[ComparedTensor]:
        """Returns the tensors that differ or have a remark, the worst first.

        Tensors that could not be compared come first. The compared ones follow, ordered by their largest difference.
        """
        notable = [tensor for tensor in self.tensors if not tensor.is_same or tensor.max_abs or tensor.remark]
        return sorted(notable, key=_badness, reverse=True)


def open_folder(name: str | Path) -> Weights:
    """Opens the folder of a HuggingFace model, or a model of the hub, which is first downloaded into the cache.

    The weights are in one or several safetensors files, or, in an old folder, in `pytorch_model*.bin`. Quantized
    weights in safetensors files are dequantized. Of a model on the hub, only safetensors are read.

    Raises:
        CheckpointNotFoundError: the folder has no weights, or there is no such model.
        RemoteError: the hub does not answer, refuses access, or answers with an error.
        CheckpointCorruptError: a file is missing or damaged, or holds values that are not tensors.
    """
    folder = find_folder(name, "model")
    beside: tuple[str, ...] = ()
    try:
        reader: ShardReader = (weights := DequantizingReader(folder, _config(folder), read_folder(folder)))
        beside = tuple(name for each in weights.left_out if each.reason == OF_ACTIVATIONS for name in each.tensors)
    except CheckpointNotFoundError:
        reader = _open_bins(folder)
    unchanged = {name: _unchanged(name, info) for name, info in weights_of(reader).items()}
    return Weights(folder, reader, spelled_by_table(_config_in(folder), unchanged), beside)


def _config_in(folder: Path) -> HfConfig:
    try:
        return read_config(folder)
    except CheckpointNotFoundError:
        return {}  # without it, names are compared as they are


def _config(folder: Path) -> HfConfig:
    """Returns the folder's config, or an empty one. Plain weights can be compared without."""
    try:
        return read_config(folder)
    except CheckpointNotFoundError:
        return {}


def compare(
    ours: Weights,
    reference: Weights,
    tolerance: Tolerance = EXACT,
    ignored: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Comparison:
    """Compares all tensors of two models.

    It compares several tensors at a time, a batch of elements of each, so its memory use does not grow with the size of
    the models. If only one model has an output head, the head is compared with the other model's embedding, because
    transformers does not write a head that is tied to the embedding.

    Args:
        ours: the model under test.
        reference: the model that it should be equal to.
        tolerance: how much values may differ.
        ignored: regular expressions; tensors whose whole name matches one are not compared.
        progress: called with the number of bytes of the reference that have been compared, and the number to compare.

    Raises:
        CheckpointCorruptError: a file cannot be read.
        CheckpointMismatchError: there are no tensors to compare.

    Example:
        >>> compare(open_folder(Path("merged")), open_folder(Path("model"))).is_same  # doctest: +SKIP
        True
    """
    started = time.monotonic()
    patterns = compiled(ignored, "ignored")
    names = list(dict.fromkeys((*reference.tensors, *ours.tensors)))
    left_out = tuple(name for name in names if any(pattern.fullmatch(name) for pattern in patterns))
    pairs = [_Pair.of(name, ours, reference) for name in names if name not in left_out]
    if not pairs:
        raise CheckpointMismatchError(
            f"{ours.where} and {reference.where}: nothing is left to compare, because all {len(names)} tensors are "
            "ignored: ignore fewer"
        )
    total = sum(pair.nbytes for pair in pairs)
    done, lock = [0], threading.Lock()

    def compare_pair(pair: _Pair) -> ComparedTensor:
        found = pair.compared(tolerance)
        with lock:
            done[0] += pair.nbytes
            progress(done[0], total)
        return found

    with ThreadPoolExecutor(tuning.HOST_THREADS, thread_name_prefix="compare") as pool:
        tensors = tuple(pool.map(compare_pair, pairs))
    left_out += tuple(sorted({*ours.beside, *reference.beside}))
    return Comparison(ours.where, reference.where, tensors, left_out, total, time.monotonic() - started)


def _badness(tensor: ComparedTensor) -> tuple[bool, bool, float, int]:
    compared = tensor.ours is not None and tensor.reference is not None and tensor.ours.shape == tensor.reference.shape
    return not tensor.is_same, not compared, tensor.max_abs, tensor.differing


# -- folders -----------------------------------------------------------------------------------------------


def _unchanged(name: str, info: TensorInfo) -> FileTensor:
    """Returns a tensor that the file stores under its HuggingFace name and in its HuggingFace form."""
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
        raise CheckpointNotFoundError(
            f"{folder}: has neither model*.safetensors nor pytorch_model*.bin, so it has no weights: name the folder "
            "of a HuggingFace model"
        )
    found = {name: shard for file in files for name, shard in _read_bin(folder / file)}
    if missing := sorted(where.keys() - found.keys()):
        raise CheckpointCorruptError(
            f"{folder / where[missing[0]]}: lacks {missing[0]}, which {_BIN_INDEX} places in this file: copy the file "
            "again"
        )
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
    """A tensor of two models.

    Attributes:
        name: its name.
        ours: the model under test.
        reference: the reference.
        left: the tensor of the model under test; None if that model does not have it.
        right: the tensor of the reference; None if the reference does not have it.
        remark: why the two tensors have different names; empty if they have the same name.
    """

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
        if name == HF_HEAD and left is None and (left := ours.embedding):
            remark = "tied in the model under test: compared with its embedding"
        elif name == HF_HEAD and right is None and (right := reference.embedding):
            remark = "tied in the reference: compared with its embedding"
        return _Pair(name, ours, reference, left, right, remark)

    @property
    def nbytes(self) -> int:
        """The size of the reference's tensor in bytes; 0 if one model lacks the tensor."""
        return self.right.nbytes if self.left is not None and self.right is not None else 0

    def compared(self, tolerance: Tolerance) -> ComparedTensor:
        """Compares the two tensors."""
        ours, reference = (None if side is None else _info(side) for side in (self.left, self.right))
        if self.left is None or self.right is None or self.left.tensor.shape != self.right.tensor.shape:
            return self._not_tied() if self.remark else ComparedTensor(self.name, ours, reference)
        found = Differences()
        for left, right in self._batches(self.left, self.right):
            found.add(left, right, tolerance)
        is_same = not found.count and (tolerance.any_dtype or self.left.dtype == self.right.dtype)
        if self.remark and not is_same:
            return self._not_tied()
        return ComparedTensor(
            self.name, ours, reference, found.count, found.max_abs, found.max_rel, is_same, self.remark
        )

    def _not_tied(self) -> ComparedTensor:
        """Returns the result for a head that only one model has and that differs from the other model's embedding."""
        ours, reference = (side.tensors.get(self.name) for side in self._sides)
        return ComparedTensor(
            self.name,
            None if ours is None else _info(ours),
            None if reference is None else _info(reference),
            remark="only one model has it, and it differs from the other model's embedding",
        )

    @property
    def _sides(self) -> tuple[Weights, Weights]:
        return self.ours, self.reference

    def _batches(self, left: FileTensor, right: FileTensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Reads the same elements of both tensors, batch by batch, into memory that the next batch overwrites."""
        count = left.tensor.numel
        step = max(1, _BATCH_BYTES // max(left.dtype.itemsize, right.dtype.itemsize))
        memory = [torch.empty(min(step, count), dtype=side.dtype) for side in (left, right)]
        scratch = Scratch(), Scratch()
        for start in range(0, count, step):
            length = min(step, count - start)
            batch = []
            for side, tensor, its_memory, its_scratch in zip(self._sides, (left, right), memory, scratch, strict=True):
                fill(side.reader, [Elements(tensor, start, its_memory[:length])], its_scratch)
                batch.append(its_memory[:length])
            yield batch[0], batch[1]


def _info(tensor: FileTensor) -> TensorInfo:
    return TensorInfo(tensor.dtype, tuple(tensor.tensor.shape))
