"""Finds PEFT's adapters among FSDP shards. The tensors have HuggingFace's names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.models.low_rank import PEFT_PREFIX, Factor, LowRank
from mcore_ckpt.models.mapping import HfTensor, whole_tensor
from mcore_ckpt.sharding.regions import Region

# `model.layers.0.self_attn.q_proj.lora_A.default.weight`. "default" is PEFT's name of the adapter.
_TENSOR = re.compile(r"(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.(\w+))?\.weight")

# `lm_head.modules_to_save.default.weight`: a weight of a module that is trained as a whole. PEFT keeps the base model's
# weight as `lm_head.original_module.weight`.
_SAVED = re.compile(r"(.+)\.modules_to_save\.(?:(\w+)\.)?(\w+)")
SAVED_MODULE, ORIGINAL_MODULE, BASE_LAYER = ".modules_to_save.", ".original_module.", ".base_layer."


def adapter_name_of(name: str) -> tuple[str, str] | None:
    """Splits the name of a LoRA or DoRA tensor into the name without the adapter's name, and the adapter's name.

    Modules that are trained as a whole (`modules_to_save`) belong to an adapter, too. Returns None for any other
    tensor.

    Example:
        >>> adapter_name_of("lm_head.lora_A.default.weight")
        ('lm_head.lora_A.weight', 'default')
    """
    if (match := _TENSOR.fullmatch(name)) is not None:
        return f"{match[1]}.{match[2]}.weight", match[3] or "default"
    match = _SAVED.fullmatch(name)
    return None if match is None else (f"{match[1]}{SAVED_MODULE}{match[3]}", match[2] or "default")


def other_adapters(names: Sequence[str]) -> list[str]:
    """Returns the names of a file's tensors that come from PEFT, but not from LoRA, DoRA or `modules_to_save`.

    There are too many kinds of adapters to list the names of their tensors. Three habits of PEFT show which tensors
    come from PEFT: PEFT keeps the replaced module of the base model (`base_layer`, `original_module`), adds tensors
    outside of the model, and puts the adapter's name into the names of the adapter's tensors.

    Example:
        >>> other_adapters(["a.base_layer.weight", "a.lora_A.default.weight", "a.oft_R.default.weight", "b.weight"])
        ['a.oft_R.default.weight']
    """
    own = {name: name.removeprefix(PEFT_PREFIX) for name in names}
    wrapped = {
        name[: match.start()]
        for name in own.values()
        for mark in (BASE_LAYER, ORIGINAL_MODULE)
        for match in re.finditer(re.escape(mark), name)
    }
    adapters = {"default", *_names_of_adapters(names)}
    return [
        name
        for name, bare in own.items()
        if adapter_name_of(name) is None
        and not (BASE_LAYER in bare or ORIGINAL_MODULE in bare)
        and (
            bare.startswith("base_model.")
            or not adapters.isdisjoint(bare.split("."))
            or any(bare[:at] in wrapped for at, letter in enumerate(bare) if letter == ".")
        )
    ]


def is_peft_adapter(name: str) -> bool:
    """Returns True if a tensor of a reader from `open_fsdp` belongs to an adapter."""
    return adapter_name_of(name) is not None


def with_peft_adapters(wanted: Sequence[HfTensor], tensors: Mapping[str, TensorInfo], alpha: float) -> list[HfTensor]:
    """Returns the wanted tensors, each with its adapter if there is one.

    `tensors` are all tensors that the reader from `open_fsdp` lists. An adapter of rank r is scaled by alpha / r.

    Raises CheckpointMismatchError: an adapter is incomplete, or fits none of the wanted tensors.
    """
    found = _low_ranks(tensors, alpha)
    # Adapters are named after the reader's tensors. The tables of some architectures spell these names in another way.
    # So `own` maps the table's names to the reader's names.
    own = {tensor.name: tensor.slabs[0].mcore for tensor in wanted}
    shapes = {own[tensor.name]: tensor.shape for tensor in wanted}
    for name, low_rank in found.items():
        if shapes.get(name) != (low_rank.rows, low_rank.columns):
            raise CheckpointMismatchError(
                f"there is an adapter of tensor {name} of shape {[low_rank.rows, low_rank.columns]}, but "
                f"{'no such tensor' if name not in shapes else f'the tensor has shape {list(shapes[name])}'}: only "
                "adapters of linear layers are supported"
            )
    saved = saved_modules(tensors)
    if lost := sorted(saved.keys() - {*own.values()}):
        raise CheckpointMismatchError(
            f"the training replaced {lost[0]} (modules_to_save), but the checkpoint lacks the base model's tensor of "
            "this name: save the whole model"
        )
    return [
        replace(saved[own[tensor.name]], name=tensor.name)
        if own[tensor.name] in saved
        else replace(tensor, slabs=tuple(replace(slab, low_rank=found.get(own[tensor.name])) for slab in tensor.slabs))
        for tensor in wanted
    ]


def saved_modules(tensors: Mapping[str, TensorInfo]) -> dict[str, HfTensor]:
    """Returns the trained tensors of `modules_to_save`, by the name of the model's tensor that each replaces."""
    stored = {name.replace(SAVED_MODULE, "."): name for name in tensors if SAVED_MODULE in name}
    return {name: whole_tensor(name, own, tuple(tensors[own].shape)) for name, own in stored.items()}


def adapted_weights(tensors: Mapping[str, TensorInfo], alpha: float) -> list[HfTensor]:
    """Lists the weights that have adapters, including weights that the checkpoint itself lacks.

    Raises CheckpointMismatchError: an adapter is incomplete.
    """
    return [
        whole_tensor(name, name, (low_rank.rows, low_rank.columns), low_rank)
        for name, low_rank in _low_ranks(tensors, alpha).items()
    ]


def _low_ranks(tensors: Mapping[str, TensorInfo], alpha: float) -> dict[str, LowRank]:
    found: dict[str, dict[str, Factor]] = {}
    for name, info in tensors.items():
        if (match := _TENSOR.fullmatch(name)) is not None:
            parts = found.setdefault(f"{match[1]}.weight", {})
            parts[match[2]] = Factor(name, Region.whole(tuple(info.shape)))
    return {name: _low_rank(name, parts, alpha) for name, parts in found.items()}


def _low_rank(name: str, parts: Mapping[str, Factor], alpha: float) -> LowRank:
    if missing := {"lora_A", "lora_B"} - parts.keys():
        raise CheckpointMismatchError(f"the adapter of tensor {name} has no {', '.join(sorted(missing))}")
    a, b = parts["lora_A"], parts["lora_B"]
    shapes = a.region.local_shape, b.region.local_shape
    if any(len(shape) != 2 for shape in shapes) or shapes[0][0] != shapes[1][1]:
        raise CheckpointMismatchError(
            f"the adapter of tensor {name} has matrices of shapes {list(shapes[0])} and {list(shapes[1])}: only "
            "adapters of linear layers are supported"
        )
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is not None and magnitude.region.local_shape != (shapes[1][0],):
        raise CheckpointMismatchError(
            f"the adapter of tensor {name} has magnitudes of shape {list(magnitude.region.local_shape)} for "
            f"{shapes[1][0]} rows: only adapters of linear layers are supported"
        )
    return LowRank(a, b, alpha / shapes[0][0], magnitude)


def _names_of_adapters(names: Iterable[str]) -> set[str]:
    """Returns the names that PEFT gave to the adapters in a file: usually {"default"}."""
    return {found[1] for found in map(adapter_name_of, names) if found is not None}


def check_one_adapter(names: Iterable[str], path: Path, advice: str) -> None:
    """Raises UnsupportedError if the tensors of a file belong to several adapters."""
    sets = _names_of_adapters(names)
    if len(sets) > 1:
        raise UnsupportedError(
            f"{path}: has several sets of adapters ({', '.join(sorted(sets))}), but only one is supported: {advice}"
        )
