"""Compares two HuggingFace models tensor by tensor. Either model can be a checkpoint that has not been merged yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mcore_ckpt.errors import CheckpointMismatchError, CheckpointNotFoundError
from mcore_ckpt.formats.contract import CheckpointReader, TensorInfo, weights_of
from mcore_ckpt.formats.huggingface.bin_files import open_bins
from mcore_ckpt.formats.huggingface.elements import Elements, Scratch, fill
from mcore_ckpt.formats.huggingface.export_plan import FileTensor
from mcore_ckpt.formats.huggingface.hub import find_folder
from mcore_ckpt.formats.huggingface.reader import spelled_by_table
from mcore_ckpt.formats.huggingface.safetensors_files import read_folder
from mcore_ckpt.formats.huggingface.stored_weights import DequantizingReader
from mcore_ckpt.formats.shard_reader import ShardReader
from mcore_ckpt.models.accounting import OF_ACTIVATIONS
from mcore_ckpt.models.architecture import read_config
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.mapping import HfTensor, Slab
from mcore_ckpt.models.table import HF_EMBEDDING, HF_HEAD
from mcore_ckpt.sharding.patterns import compiled
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.tools.examine.differences import EXACT, Differences, Tolerance
from mcore_ckpt.tools.examine.progress import Progress, no_progress
from mcore_ckpt.tools.examine.tensor_pairs import Pair, Side, compare_pairs

_EMBEDDINGS = (HF_EMBEDDING, "model.language_model.embed_tokens.weight")


@dataclass(frozen=True, eq=False)
class Weights:
    """One HuggingFace model: its tensors by name, each with its dtype and the stored tensors that make it up.

    `where` is the folder, for messages. `beside` names stored tensors that are not part of a weight: scales of
    activations and of caches.
    """

    where: Path
    reader: CheckpointReader
    tensors: Mapping[str, FileTensor]
    beside: tuple[str, ...] = ()

    @property
    def embedding(self) -> FileTensor | None:
        """The embedding of the language model, which may be a part of a vision-language model. None if missing."""
        found = (self.tensors.get(name) for name in _EMBEDDINGS)
        return next((tensor for tensor in found if tensor is not None), None)


@dataclass(frozen=True)
class ComparedTensor:
    """The result for one tensor.

    Attributes:
        ours, reference: the tensor's dtype and shape in the model under test and in the reference; None if a model
            lacks the tensor.
        differing: how many elements differ by more than the tolerance; 0 if the tensors were not compared.
        max_abs, max_rel: the largest absolute difference, and the largest difference relative to the reference.
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
        ours, reference: the folders of the model under test and of the reference.
        tensors: the result for each tensor, including tensors that only one of the models has.
        ignored: the names of the tensors that were not compared, because a pattern ignores them, or because they are
            scales of activations.
        nbytes: the number of bytes of the reference that were compared.
    """

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
        """Returns the tensors that differ or have a remark, the worst first.

        Tensors that could not be compared come first. The compared tensors follow, ordered by their largest difference.
        """
        notable = [tensor for tensor in self.tensors if not tensor.is_same or tensor.max_abs or tensor.remark]
        return sorted(notable, key=_badness, reverse=True)


def open_folder(name: str | Path) -> Weights:
    """Opens the folder of a HuggingFace model, or a model of the hub, which is first downloaded into the cache.

    The weights are in one or several safetensors files, or, in an old folder, in `pytorch_model*.bin`. Quantized
    weights in safetensors files are dequantized. If the model is on the hub, only safetensors are read.

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
        reader = open_bins(folder)
    unchanged = {name: _unchanged(name, info) for name, info in weights_of(reader).items()}
    return Weights(folder, reader, spelled_by_table(_config(folder), unchanged), beside)


def _config(folder: Path) -> HfConfig:
    """Returns the folder's config; if there is none, an empty config, which suffices to compare plain weights."""
    try:
        return read_config(folder)
    except CheckpointNotFoundError:
        return {}


def compare(
    ours: Weights,
    reference: Weights,
    tolerance: Tolerance = EXACT,
    ignored: Sequence[str] = (),
    progress: Progress = no_progress,
) -> Comparison:
    """Compares all tensors of two models.

    Several tensors are compared at a time, in batches of elements, so memory use does not grow with the size of the
    models. If only one model has an output head, the head is compared with the other model's embedding, because
    transformers does not write a head that is tied to the embedding.

    Args:
        ours: the model under test.
        reference: the model that `ours` should be equal to.
        ignored: regular expressions. A tensor is not compared if its whole name matches one of them.

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
    tensors = [_Tensor.of(name, ours, reference) for name in names if name not in left_out]
    if not tensors:
        raise CheckpointMismatchError(
            f"{ours.where} and {reference.where}: nothing is left to compare, because all {len(names)} tensors are "
            "ignored: ignore fewer tensors"
        )
    scratch = _ThreadScratch()
    work = [tensor.pairs(ours.reader, reference.reader, scratch) for tensor in tensors]
    found = compare_pairs(work, tolerance, progress, "compare")
    return Comparison(
        ours.where,
        reference.where,
        tuple(tensor.result(each, tolerance) for tensor, each in zip(tensors, found, strict=True)),
        (*left_out, *sorted({*ours.beside, *reference.beside})),
        sum(tensor.nbytes for tensor in tensors),
        time.monotonic() - started,
    )


def _badness(tensor: ComparedTensor) -> tuple[bool, bool, float, int]:
    compared = tensor.ours is not None and tensor.reference is not None and tensor.ours.shape == tensor.reference.shape
    return not tensor.is_same, not compared, tensor.max_abs, tensor.differing


def _unchanged(name: str, info: TensorInfo) -> FileTensor:
    """Describes a tensor that a file stores under its HuggingFace name and in its HuggingFace form."""
    return FileTensor(HfTensor(name, info.shape, (Slab(0, name, Region.whole(info.shape)),)), info.dtype)


class _ThreadScratch(threading.local):  # each thread has its own `scratch`
    def __init__(self) -> None:
        self.scratch = Scratch()


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor of two models. `ours` or `reference` is None if that model does not have the tensor.

    Attributes:
        remark: why the two tensors have different names; empty if they have the same name.
        otherwise: the result to return if two tensors with different names differ; None if the names are the same.
    """

    name: str
    ours: FileTensor | None
    reference: FileTensor | None
    remark: str = ""
    otherwise: ComparedTensor | None = None

    @staticmethod
    def of(name: str, ours: Weights, reference: Weights) -> _Tensor:
        left, right = ours.tensors.get(name), reference.tensors.get(name)
        differs = "only one model has this tensor, and it differs from the other model's embedding"
        otherwise = ComparedTensor(name, _info(left), _info(right), remark=differs)
        if name == HF_HEAD and left is None and (left := ours.embedding):
            remark = "tied in the model under test: compared with that model's embedding"
        elif name == HF_HEAD and right is None and (right := reference.embedding):
            remark = "tied in the reference: compared with the reference's embedding"
        else:
            return _Tensor(name, left, right)
        return _Tensor(name, left, right, remark, otherwise)

    @property
    def nbytes(self) -> int:
        return self.reference.nbytes if self.ours is not None and self.reference is not None else 0

    def pairs(self, ours: CheckpointReader, reference: CheckpointReader, scratch: _ThreadScratch) -> list[Pair]:
        """Returns a list with the pair to compare; empty if a model lacks the tensor or the shapes differ."""
        left, right = self.ours, self.reference
        if left is None or right is None or left.tensor.shape != right.tensor.shape:
            return []
        return [Pair(_side(ours, left, scratch), _side(reference, right, scratch))]

    def result(self, found: Differences, tolerance: Tolerance) -> ComparedTensor:
        ours, reference = _info(self.ours), _info(self.reference)
        is_same = False
        if ours is not None and reference is not None and ours.shape == reference.shape:
            is_same = tolerance.allows(ours.dtype, reference.dtype) and not found.count
        if self.otherwise is not None and not is_same:
            return self.otherwise
        return ComparedTensor(
            self.name, ours, reference, found.count, found.max_abs, found.max_rel, is_same, self.remark
        )


def _info(tensor: FileTensor | None) -> TensorInfo | None:
    return None if tensor is None else TensorInfo(tensor.dtype, tuple(tensor.tensor.shape))


def _side(reader: CheckpointReader, tensor: FileTensor, scratch: _ThreadScratch) -> Side:
    def read(start: int, memory: torch.Tensor) -> None:
        fill(reader, [Elements(tensor, start, memory)], scratch.scratch)

    return Side(TensorInfo(tensor.dtype, tuple(tensor.tensor.shape)), read)
