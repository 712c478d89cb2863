"""Plans an export: the files of a HuggingFace model, and the source of each tensor's bytes.

In a vocabulary, only the rows after the tokenizer's last token are padding. If the tokenizer has more tokens than
`config.json` says, the export has a row for each token, and the exported `config.json` states the number of tokens
(`reconcile.with_tokens`). The checkpoint's own tokenizer decides how many tokens there are, even if `--hf_model_path`
names another folder. If `config.json` states fewer rows than the embedding has, and the tokenizer has more tokens than
the embedding has rows, the export is refused, because it is unknown which rows belong to tokens.

`plan_tensors` compares the shape of every planned tensor with the shape that the tensor has in the source. So no rows
except padding can be lost, not even rows of weights that were trained in full next to adapters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypedDict

import torch

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.formats.huggingface.fp8_blocks import CODES, SCALE_SUFFIX, Fp8Blocks
from mcore_ckpt.formats.huggingface.safetensors_files import NAMES, file_name
from mcore_ckpt.models.accounting import LeftOut, account, of_states, padding_of, some_of, together
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HfTensor, hf_tensors, is_mtp
from mcore_ckpt.models.peft_adapters import with_adapters
from mcore_ckpt.sharding.adapter_names import is_adapter
from mcore_ckpt.sharding.counterparts import find_counterparts, layers_of
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, padding_is_plausible

MAX_SHARD_BYTES = 5_000_000_000
"""The default size limit of one file, the same as in transformers 4 (`PreTrainedModel.save_pretrained`)."""


class UnknownTensorsError(CheckpointMismatchError):
    """The source has tensors that the model does not have."""


# The router adds this bias in fp32, even if the model has another dtype (`Router._maintain_float32_expert_bias`,
# megatron-core 0.16.1). A rounded bias would send tokens to other experts.
_ALWAYS_AS_STORED = ("router.expert_bias",)


@dataclass(frozen=True)
class QuantizedPart:
    """Marks an entry of a file as the codes of a quantized tensor, or, if `is_scales` is True, as the scales.

    `source` is the dtype of the tensor's values.
    """

    blocks: Fp8Blocks
    is_scales: bool
    source: torch.dtype


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a planned file.

    Attributes:
        tensor: the tensor's name, shape and slabs. In each slab, `mcore` is the name of the source's tensor.
        quantized: which part of the quantized tensor the file has: codes or scales. None if the file has the tensor's
            values.
    """

    tensor: HfTensor
    dtype: torch.dtype
    quantized: QuantizedPart | None = None

    @property
    def name(self) -> str:
        """The name in the file."""
        is_scales = self.quantized is not None and self.quantized.is_scales
        return self.tensor.name + SCALE_SUFFIX if is_scales else self.tensor.name

    @property
    def shape(self) -> Shape:
        """The shape in the file."""
        part, shape = self.quantized, self.tensor.shape
        return part.blocks.grid(shape) if part is not None and part.is_scales else shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    """A planned safetensors file. Tensors with wider dtypes come first, so that each tensor is aligned."""

    name: str
    tensors: tuple[FileTensor, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensors in bytes, without the header."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class ExportPlan:
    """The planned files of an export.

    Attributes:
        files: the files, in the order of HuggingFace's tensors.
        dtype: the dtype of most elements, which `config.json` states. For quantized tensors, the dtype before
            quantization counts.
        has_mtp: True if the files have layers of multi-token prediction. If False, `config.json` must not mention such
            layers.
        quantization: the `quantization_config` of the files; None if no tensor is quantized.
        left_out: the parts of the source that are not in the files, by reason.
    """

    files: tuple[WeightFile, ...]
    dtype: torch.dtype
    has_mtp: bool
    quantization: Mapping[str, Any] | None = None
    left_out: tuple[LeftOut, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(file.nbytes for file in self.files)


class ExportOptions(TypedDict):
    """The form of the files of an export: arguments that `plan_export` and `plan_tensors` share."""

    dtype: torch.dtype | None
    max_shard_bytes: int
    least_files: int
    blocks: Fp8Blocks | None


def plan_export(
    model: HfModel,
    tensors: Mapping[str, TensorInfo],
    *,
    alpha: float | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    least_files: int = 1,
    blocks: Fp8Blocks | None = None,
) -> ExportPlan:
    """Plans the files of a model from mcore's global tensors. Equal arguments give equal plans on all ranks.

    Adapters are merged into the weights.

    Args:
        tensors: the tensors of the source by name. Their vocabulary rows after the model's last row are padding, and
            are left out.
        alpha: the alpha of the adapters among the tensors: an adapter of rank r is scaled by alpha / r. Required if
            there are adapters.
        dtype: the dtype to write floating-point tensors in; None keeps the stored dtypes. Router biases always keep
            the stored dtype.
        max_shard_bytes: the size limit of one file's tensors, in bytes. A larger tensor gets its own file.
        least_files: the number of files to aim for if the size limit alone gives fewer files, so that more ranks can
            write at the same time.
        blocks: the form in which linear layers are quantized; None to write all values.

    Raises:
        CheckpointMismatchError: a tensor is missing, is unknown, or has another shape; the message names the tensor.
        ValueError: `max_shard_bytes` or `least_files` is below 1.
    """
    wanted = hf_tensors(model)
    mtp = [tensor for tensor in wanted if is_mtp(model, tensor.name)]
    # Ignore copies of the embedding and the head: every model has these two tensors, even without multi-token
    # prediction.
    has_mtp = any(found_as(slab.mcore, tensors) for tensor in mtp if not tensor.is_copy for slab in tensor.slabs)
    without = set() if has_mtp else {tensor.name for tensor in mtp}
    wanted = [tensor for tensor in wanted if tensor.name not in without]
    weights = {name: info for name, info in tensors.items() if not is_adapter(name)}
    resolved, left_out = _resolve(model, wanted, weights)
    renamed = [
        replace(tensor, slabs=tuple(replace(slab, mcore=resolved.get(slab.mcore, "")) for slab in tensor.slabs))
        for tensor in wanted
    ]
    if len(weights) < len(tensors):
        assert alpha is not None, "needed for adapters"
        adapters = {name: tuple(info.shape) for name, info in tensors.items() if is_adapter(name)}
        renamed = with_adapters(model, renamed, adapters, alpha)
    plan = plan_tensors(
        renamed,
        tensors,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        least_files=least_files,
        has_mtp=has_mtp,
        blocks=blocks,
    )
    return replace(plan, left_out=together(left_out, plan.left_out))


def plan_tensors(
    wanted: Sequence[HfTensor],
    tensors: Mapping[str, TensorInfo],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    least_files: int = 1,
    has_mtp: bool = False,
    blocks: Fp8Blocks | None = None,
) -> ExportPlan:
    """Plans files with the given HuggingFace tensors, for example the tensors of a source with HuggingFace names.

    Args:
        wanted: the tensors to write. In each of their slabs, `mcore` is the name of the source's tensor.
        tensors: the tensors of the source by name.
        dtype, max_shard_bytes, least_files, blocks: as in `plan_export`.
        has_mtp: True if the tensors include layers of multi-token prediction.

    Raises:
        CheckpointMismatchError: a tensor has another shape in the source, or the tensor's parts have several dtypes.
        UnsupportedError: safetensors files cannot store a tensor's dtype, or `blocks` is given and no tensor would be
            quantized.
        ValueError: there are no tensors, or `max_shard_bytes` or `least_files` is below 1.
    """
    if not wanted or max_shard_bytes < 1 or least_files < 1:
        raise ValueError(
            f"an export needs at least one tensor, byte and file, not {len(wanted)} tensors, "
            f"max_shard_bytes={max_shard_bytes}, least_files={least_files}"
        )
    padding = _check_shapes(wanted, tensors)
    dtypes = [_dtype(tensor, tensors, dtype) for tensor in wanted]
    elements: Counter[torch.dtype] = Counter()
    for tensor, its_dtype in zip(wanted, dtypes, strict=True):
        if its_dtype is not None:
            elements[its_dtype] += tensor.numel
    main = elements.most_common(1)[0][0]
    written = [each for t, own in zip(wanted, dtypes, strict=True) for each in _stored(t, own or main, blocks)]
    if blocks is not None and all(each.quantized is None for each in written):
        raise UnsupportedError(
            "the model has no weight that block FP8 quantizes (*.layers.{n}.*_proj, w1 to w3): merge without --quantize"
        )
    parts = list(_in_files(written, max_shard_bytes, least_files))
    files = tuple(
        WeightFile(file_name(number, len(parts)), tuple(sorted(part, key=lambda tensor: -tensor.dtype.itemsize)))
        for number, part in enumerate(parts)
    )
    plain = (each.tensor for each in written if each.quantized is None)
    return ExportPlan(files, main, has_mtp, None if blocks is None else blocks.config(plain), tuple(padding))


def _stored(tensor: HfTensor, dtype: torch.dtype, blocks: Fp8Blocks | None) -> list[FileTensor]:
    """Returns the entries of a tensor in the files: one for its values, or one for its codes and one for its scales."""
    if blocks is None or not blocks.takes(tensor):
        return [FileTensor(tensor, dtype)]
    return [
        FileTensor(tensor, CODES, QuantizedPart(blocks, False, dtype)),
        FileTensor(tensor, blocks.scale_dtype, QuantizedPart(blocks, True, dtype)),
    ]


# -- names and shapes --------------------------------------------------------------------------------------


def _resolve(
    model: HfModel, wanted: Iterable[HfTensor], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, str], tuple[LeftOut, ...]]:
    """Maps each mcore tensor to its name in the source. Refuses missing tensors, and unknown tensors of the source.

    Returns the names, and the tensors of the source that are left out.
    """
    needed = dict.fromkeys(slab.mcore for tensor in wanted for slab in tensor.slabs if slab.mcore)
    # If only one of the source and `model` is a HybridModel, equal parts have different layer numbers in the source and
    # in `model`.
    counterparts = find_counterparts(layers_of(needed), layers_of(tensors))
    why = "" if counterparts.layer_mismatch is None else f" ({counterparts.layer_mismatch})"
    found = {name: found_as(counterparts.stored_name(name), tensors) for name in needed}
    missing = [name for name, stored in found.items() if stored is None]
    if missing:
        raise CheckpointMismatchError(
            f"the checkpoint lacks {some_of(missing, 5)}, but a {model.describe()} has this{why}: use the config.json "
            "of the model in the checkpoint"
        )
    resolved = {name: stored for name, stored in found.items() if stored is not None}

    def unknown(names: list[str]) -> UnknownTensorsError:
        return UnknownTensorsError(
            f"the checkpoint has {some_of(names, 5)}, but a {model.describe()} does not{why}: use the config.json of "
            "the model in the checkpoint"
        )

    return resolved, account(tensors, set(resolved.values()), [of_states()], unknown)


def _check_shapes(wanted: Iterable[HfTensor], tensors: Mapping[str, TensorInfo]) -> Iterable[LeftOut]:
    """Refuses shapes that differ from the model's, except for padding of the vocabulary. Returns this padding."""
    found: dict[str, LeftOut] = {}
    for tensor in wanted:
        for slab in tensor.slabs:
            if stored := slab.mcore:
                shape, there = slab.region.global_shape, tuple(tensors[stored].shape)
                padded = (
                    has_vocabulary_rows(stored)
                    and len(shape) == len(there)
                    and shape[1:] == there[1:]
                    # A value head has the output layer's name, but has one row per output and no padding.
                    and 1 < shape[0] < there[0]
                    # If there are more additional rows than padding explains, the rows belong to tokens, and the export
                    # would lose them silently.
                    and padding_is_plausible(shape[0], there[0])
                )
                if padded:
                    found[stored] = padding_of(stored, there[0], shape[0])
                elif shape != there:
                    raise CheckpointMismatchError(
                        f"tensor {stored}: has shape {list(there)}, but config.json requires {list(shape)} for "
                        f"{tensor.name}: use the config.json of this model"
                    )
    return found.values()


# -- dtypes and files --------------------------------------------------------------------------------------


def _dtype(tensor: HfTensor, tensors: Mapping[str, TensorInfo], wanted: torch.dtype | None) -> torch.dtype | None:
    """Returns the tensor's dtype in the file, or None for zeros without a source, which can have any dtype."""
    names = [slab.mcore for slab in tensor.slabs if slab.mcore]
    stored = {tensors[name].dtype for name in names}
    if not stored:
        return None
    if strange := sorted(str(one) for one in stored if one not in NAMES):
        raise UnsupportedError(
            f"tensor {tensor.name}: is stored as {strange[0]}, which cannot be written to a safetensors file: choose "
            "another dtype (mcore-ckpt merge --dtype)"
        )
    floating = all(one.is_floating_point for one in stored)
    if wanted is not None and floating and not any(name.endswith(_ALWAYS_AS_STORED) for name in names):
        return wanted
    if len(stored) > 1:
        raise CheckpointMismatchError(
            f"tensor {tensor.name}: the parts are stored in different dtypes, "
            f"{' and '.join(sorted(map(str, stored)))}: choose the dtype to write (mcore-ckpt merge --dtype)"
        )
    return stored.pop()


def _in_files(tensors: Sequence[FileTensor], most: int, least_files: int) -> Iterator[Sequence[FileTensor]]:
    sizes = [tensor.nbytes for tensor in tensors]
    cuts = _cuts(sizes, most)
    if len(cuts) < least_files:
        # Use the smallest size limit that gives at most `least_files` files, because the ranks then have about equal
        # work.
        limits = range(1, most + 1)
        limit = limits[bisect_left(limits, -least_files, key=lambda limit: -len(_cuts(sizes, limit)))]
        cuts = _cuts(sizes, limit)
    for start, stop in zip(cuts, [*cuts[1:], len(tensors)], strict=True):
        yield tensors[start:stop]


def _cuts(sizes: Sequence[int], most: int) -> list[int]:
    """Returns the index of the first tensor of each file. Files are filled up to `most` bytes."""
    cuts, filled = [0], 0
    for number, size in enumerate(sizes):
        if filled and filled + size > most:
            cuts.append(number)
            filled = 0
        filled += size
    return cuts
