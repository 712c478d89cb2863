"""The plan of an export: which files a HuggingFace model becomes, and where the bytes of each tensor are."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.formats.huggingface.safetensors_files import file_name, has_name
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HF_LAYER, HfTensor, hf_tensors
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, may_be_padding

MAX_SHARD_BYTES = 5_000_000_000
"""As large as transformers 4 makes a file of several (`PreTrainedModel.save_pretrained`)."""

# The router adds it in fp32 whatever the model's dtype (`Router._maintain_float32_expert_bias`, megatron-core 0.16.1),
# and rounded it would send tokens to other experts.
_ALWAYS_AS_STORED = ("router.expert_bias",)


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file.

    Attributes:
        tensor: its name and shape; its slabs' `mcore` names are those that the source has.
        dtype: in the file.
    """

    tensor: HfTensor
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file: tensors one behind the other, the wider dtypes first, so that each is aligned."""

    name: str
    tensors: tuple[FileTensor, ...]

    @property
    def nbytes(self) -> int:
        """Without the header."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class ExportPlan:
    """What is written.

    Attributes:
        files: in HuggingFace's order of tensors.
        dtype: that most of the elements have: what `config.json` should say.
        has_mtp: whether multi-token prediction is among it; if not, `config.json` must not promise it.
    """

    files: tuple[WeightFile, ...]
    dtype: torch.dtype
    has_mtp: bool

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(file.nbytes for file in self.files)


def plan_export(
    model: HfModel,
    tensors: Mapping[str, TensorInfo],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    least_files: int = 1,
) -> ExportPlan:
    """Plans the files of a model from mcore's global tensors. The same on all ranks that are handed the same.

    Args:
        model: what `config.json` describes.
        tensors: what the source has. Rows of a vocabulary beyond the model's are padding, and left out.
        dtype: of all floating tensors; None: as they are stored.
        max_shard_bytes: of a file's tensors; a larger tensor has a file of its own.
        least_files: for so many ranks that write at the same time.

    Raises:
        CheckpointMismatchError: a tensor is missing, is left over, or has another shape; names the tensors.
        ValueError: `max_shard_bytes` or `least_files` is below 1.
    """
    wanted = hf_tensors(model)
    mtp = [tensor for tensor in wanted if _is_mtp(model, tensor)]
    # Copies are of the embedding and the head, which are there without it.
    has_mtp = any(found_as(slab.mcore, tensors) for tensor in mtp if not tensor.is_copy for slab in tensor.slabs)
    left_out = set() if has_mtp else {tensor.name for tensor in mtp}
    wanted = [tensor for tensor in wanted if tensor.name not in left_out]
    resolved = _resolve(model, wanted, tensors)
    _check_shapes(wanted, resolved, tensors)
    renamed = [
        replace(tensor, slabs=tuple(replace(slab, mcore=resolved.get(slab.mcore, "")) for slab in tensor.slabs))
        for tensor in wanted
    ]
    return plan_tensors(
        renamed,
        tensors,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        least_files=least_files,
        has_mtp=has_mtp,
    )


def plan_tensors(
    wanted: Sequence[HfTensor],
    tensors: Mapping[str, TensorInfo],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    least_files: int = 1,
    has_mtp: bool = False,
) -> ExportPlan:
    """Plans files of tensors that are known already, such as those of a source that has HuggingFace's own.

    Args:
        wanted: their slabs' `mcore` names are those that the source has.
        tensors, dtype, max_shard_bytes, least_files: as `plan_export`.

    Raises:
        CheckpointMismatchError: the parts of a tensor have several dtypes.
        UnsupportedError: a tensor has a dtype that the files cannot have.
        ValueError: there are no tensors, or `max_shard_bytes` or `least_files` is below 1.
    """
    if not wanted or max_shard_bytes < 1 or least_files < 1:
        raise ValueError(f"{len(wanted)} tensors, max_shard_bytes {max_shard_bytes}, least_files {least_files}")
    dtypes = [_dtype(tensor, tensors, dtype) for tensor in wanted]
    elements: Counter[torch.dtype] = Counter()
    for tensor, its_dtype in zip(wanted, dtypes, strict=True):
        if its_dtype is not None:
            elements[its_dtype] += tensor.numel
    main = elements.most_common(1)[0][0]
    written = [
        FileTensor(tensor, main if its_dtype is None else its_dtype)
        for tensor, its_dtype in zip(wanted, dtypes, strict=True)
    ]
    parts = list(_in_files(written, max_shard_bytes, least_files))
    files = tuple(
        WeightFile(file_name(number, len(parts)), tuple(sorted(part, key=lambda tensor: -tensor.dtype.itemsize)))
        for number, part in enumerate(parts)
    )
    return ExportPlan(files, main, has_mtp)


def _is_mtp(model: HfModel, tensor: HfTensor) -> bool:
    first = len(model.layers)
    return any(tensor.name.startswith(HF_LAYER.format(layer=first + number)) for number in range(len(model.mtp_layers)))


# -- names and shapes --------------------------------------------------------------------------------------


def _resolve(model: HfModel, wanted: Iterable[HfTensor], tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """What the source calls each mcore tensor."""
    needed = dict.fromkeys(slab.mcore for tensor in wanted for slab in tensor.slabs if slab.mcore)
    found = {name: found_as(name, tensors) for name in needed}
    missing = [name for name, stored in found.items() if stored is None]
    if missing:
        raise CheckpointMismatchError(
            f"the checkpoint lacks {_some(missing)}, which a {model.describe()} has: is it config.json of this model?"
        )
    resolved = {name: stored for name, stored in found.items() if stored is not None}
    used = set(resolved.values())
    unused = [name for name in tensors if name not in used and not name.endswith("_extra_state")]
    if unused:
        raise CheckpointMismatchError(
            f"the checkpoint has {_some(unused)}, which a {model.describe()} has no place for: is it config.json of "
            "this model?"
        )
    return resolved


def _check_shapes(wanted: Iterable[HfTensor], resolved: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    for tensor in wanted:
        for slab in tensor.slabs:
            if slab.mcore:
                stored = resolved[slab.mcore]
                shape, there = slab.region.global_shape, tuple(tensors[stored].shape)
                padded = (
                    has_vocabulary_rows(slab.mcore)
                    and len(shape) == len(there)
                    and shape[1:] == there[1:]
                    # A value head has the output layer's name, and one row for each number that it gives.
                    and 1 < shape[0] < there[0]
                    # More than padding would be tokens, lost without a word.
                    and may_be_padding(shape[0], there[0])
                )
                if shape != there and not padded:
                    _refuse_shape(tensor.name, shape, stored, tensors[stored])


def _refuse_shape(hf: str, wanted: Sequence[int], stored: str, there: TensorInfo) -> None:
    raise CheckpointMismatchError(
        f"tensor {stored}: has shape {list(there.shape)}, and for {hf} config.json asks for {list(wanted)}: is it "
        "config.json of this model?"
    )


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(list(names)[:5]) + more


# -- dtypes and files --------------------------------------------------------------------------------------


def _dtype(tensor: HfTensor, tensors: Mapping[str, TensorInfo], wanted: torch.dtype | None) -> torch.dtype | None:
    """A tensor's dtype in the file; None if it is all zeros, for which any will do."""
    names = [slab.mcore for slab in tensor.slabs if slab.mcore]
    stored = {tensors[name].dtype for name in names}
    if not stored:
        return None
    if strange := sorted(str(one) for one in stored if not has_name(one)):
        raise UnsupportedError(f"tensor {tensor.name}: is {strange[0]}, which safetensors files have no name for here")
    floating = all(one.is_floating_point for one in stored)
    if wanted is not None and floating and not any(name.endswith(_ALWAYS_AS_STORED) for name in names):
        return wanted
    if len(stored) > 1:
        raise CheckpointMismatchError(
            f"tensor {tensor.name}: its parts are stored as {' and '.join(sorted(map(str, stored)))}: say which dtype "
            "is wanted (--dtype)"
        )
    return stored.pop()


def _in_files(tensors: Sequence[FileTensor], most: int, least_files: int) -> Iterator[Sequence[FileTensor]]:
    sizes = [tensor.nbytes for tensor in tensors]
    cuts = _cuts(sizes, most)
    if len(cuts) < least_files:
        # The smallest limit that so many files can keep: the ranks that write them end together.
        limits = range(1, most + 1)
        limit = limits[bisect_left(limits, -least_files, key=lambda limit: -len(_cuts(sizes, limit)))]
        cuts = _cuts(sizes, limit)
    for start, stop in zip(cuts, [*cuts[1:], len(tensors)], strict=True):
        yield tensors[start:stop]


def _cuts(sizes: Sequence[int], most: int) -> list[int]:
    """Where files begin that take tensors as long as they fit."""
    cuts, filled = [0], 0
    for number, size in enumerate(sizes):
        if filled and filled + size > most:
            cuts.append(number)
            filled = 0
        filled += size
    return cuts
