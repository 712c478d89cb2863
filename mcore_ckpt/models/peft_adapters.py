"""Finds the adapters of HuggingFace tensors through an architecture's table, and gives the adapters PEFT's names.

Megatron fuses layers that are separate in HuggingFace, and fuses their adapters in the same way: linear_qkv has one A
for queries, keys and values, and one B whose rows have the order of linear_qkv's rows. A row of B belongs to the same
HuggingFace tensor as the same row of the weight, so the table of the weights is the table of the adapters, too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.low_rank import PEFT_PREFIX, Factor, LowRank
from mcore_ckpt.models.mapping import HfTensor, Slab, hf_tensors, is_mtp
from mcore_ckpt.sharding.adapter_names import LINEAR_IN, LINEAR_OUT, MAGNITUDE, AdapterKey, adapters_among
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.sharding.regions import Piece, Region, Shape
from mcore_ckpt.sharding.synonyms import found_as

WEIGHT = ".weight"

# Matches the names of weights. The name of a weight of grouped experts ends with the expert's number.
_IS_WEIGHT = re.compile(r".*\.weight\d*")
# For each projection, its position among the HuggingFace tensors that make up the fused layer, and the number of these
# tensors.
_COMPONENTS = {"q": (0, 3), "k": (1, 3), "v": (2, 3), "gate": (0, 2), "up": (1, 2)}


def with_adapters(
    model: HfModel, wanted: Sequence[HfTensor], adapters: Mapping[str, Shape], alpha: float
) -> list[HfTensor]:
    """Returns copies of the wanted tensors, with the adapter in each slab that has one (`Slab.low_rank`).

    Args:
        wanted: tensors of the model, with Megatron's names as `mcore` in their slabs.
        adapters: the global shape of each tensor of an adapter, by name.
        alpha: the adapters' alpha; an adapter of rank r is scaled by alpha / r.

    Raises:
        CheckpointMismatchError: an adapter does not belong to any of the tensors, is incomplete, or has another shape.
        UnsupportedError: an adapter belongs to a part of a tensor that is not a separate tensor in HuggingFace.
    """
    found = _adapters_among(adapters)
    members: dict[str, list[str]] = defaultdict(list)
    for tensor in wanted:
        if not tensor.is_copy:
            for name in {slab.mcore for slab in tensor.slabs}:
                members[name].append(tensor.name)
    used: set[AdapterKey] = set()

    def adapted(tensor: HfTensor, slab: Slab) -> Slab:
        fused = members[slab.mcore]
        for key, expert in _keys_of(slab.mcore, fused.index(tensor.name) if tensor.name in fused else 0):
            if key in found:
                _check_component(key, tensor, len(fused))
                used.add(key)
                experts = model.sizes.get("experts", 1)
                return replace(slab, low_rank=_low_rank(slab, found[key], adapters, alpha, key, expert, experts))
        return slab

    result = [replace(tensor, slabs=tuple(adapted(tensor, slab) for slab in tensor.slabs)) for tensor in wanted]
    if unused := [key for key in found if key not in used]:
        raise CheckpointMismatchError(
            f"there is an adapter of {unused[0].module}, but a {model.describe()} has no such module: use the "
            "config.json of the model with the adapters"
        )
    return result


def _adapters_among(names: Iterable[str]) -> dict[AdapterKey, dict[str, str]]:
    try:
        return adapters_among(names)
    except ValueError as error:
        raise CheckpointMismatchError(f"{error}: only complete adapters of LoRA and DoRA are supported") from None


def _keys_of(name: str, position: int) -> Iterator[tuple[AdapterKey, int | None]]:
    """Yields the adapters that an mcore weight can have, each with a number or None.

    For an adapter that experts share, the number says which expert the weight belongs to. For any other adapter, there
    is no number.
    """
    if _IS_WEIGHT.fullmatch(name) is None:
        return
    modules: list[tuple[str, int | None]] = [(name.removesuffix(WEIGHT), None)]
    if (expert := expert_of(name)) is not None:
        prefix, number = expert
        layer = "linear_fc1" if "linear_fc1" in name else "linear_fc2"
        modules = [(f"{prefix}.local_experts.{number}.{layer}", None), (f"{prefix}.{layer}", number)]
    for module, number_among in modules:
        yield AdapterKey(module), number_among
        for component, (at, _) in _COMPONENTS.items():
            if at == position:
                yield AdapterKey(module, component), number_among


def _check_component(key: AdapterKey, tensor: HfTensor, count: int) -> None:
    if key.component and _COMPONENTS[key.component][1] != count:
        raise UnsupportedError(
            f"the adapter adapter_{key.component} of {key.module} belongs to a part of {tensor.name}, but "
            "HuggingFace's model has no separate tensor for this part: train this layer with LoRA instead of "
            "CanonicalLoRA"
        )


def _low_rank(
    slab: Slab,
    parts: Mapping[str, str],
    shapes: Mapping[str, Shape],
    alpha: float,
    key: AdapterKey,
    expert: int | None,
    experts: int,
) -> LowRank:
    region = slab.region
    if len(region.local_shape) != 2:
        raise UnsupportedError(f"{key.module} has an adapter, but its weight has {len(region.local_shape)} axes, not 2")
    rank = shapes[parts[LINEAR_IN]][-2]
    if key.component:
        # The adapter of a component has the rows of the HuggingFace tensor, not the rows of the fused layer.
        region = Region.whole(region.local_shape)
    factors = {
        LINEAR_IN: Region.whole((rank, region.local_shape[1])),
        LINEAR_OUT: _with_columns(region, rank),
        MAGNITUDE: _first_axis(region),
    }
    a, b, magnitude = (
        _factor(parts[part], factors[part], shapes[parts[part]], expert, experts) if part in parts else None
        for part in (LINEAR_IN, LINEAR_OUT, MAGNITUDE)
    )
    assert a is not None
    assert b is not None
    return LowRank(a, b, alpha / rank, magnitude)


def _factor(name: str, region: Region, shape: Shape, expert: int | None, experts: int) -> Factor:
    """Returns a part of an adapter.

    If `shape` has one axis more than the region, the tensor stacks adapters of experts. If there are fewer adapters
    than experts, neighbouring experts share an adapter (`share_expert_adapters` of Megatron-Bridge).
    """
    if expert is not None and len(shape) == len(region.global_shape) + 1 and experts % shape[0] == 0:
        region = _in_stack(region, expert * shape[0] // experts, shape[0])
    if region.global_shape != shape:
        raise CheckpointMismatchError(
            f"tensor {name}: has shape {list(shape)}, but config.json requires {list(region.global_shape)}: use "
            "the config.json of this model"
        )
    return Factor(name, region)


def _with_columns(region: Region, columns: int) -> Region:
    rows = region.local_shape[0]
    pieces = tuple(Piece((p.local_offset[0], 0), (p.shape[0], columns), (p.global_offset[0], 0)) for p in region.pieces)
    return Region((region.global_shape[0], columns), (rows, columns), pieces, (0, rows * columns))


def _first_axis(region: Region) -> Region:
    rows = region.local_shape[0]
    pieces = tuple(Piece(p.local_offset[:1], p.shape[:1], p.global_offset[:1]) for p in region.pieces)
    return Region(region.global_shape[:1], (rows,), pieces, (0, rows))


def _in_stack(region: Region, index: int, count: int) -> Region:
    pieces = tuple(Piece((0, *p.local_offset), (1, *p.shape), (index, *p.global_offset)) for p in region.pieces)
    return Region((count, *region.global_shape), (1, *region.local_shape), pieces, region.flat)


# -- PEFT --------------------------------------------------------------------------------------------------


def peft_tensors(adapted: Iterable[HfTensor]) -> list[HfTensor]:
    """Lists the tensors of `adapter_model.safetensors`, as PEFT (0.21) names them.

    `adapted` are tensors from `with_adapters`. Tensors without an adapter are left out.

    Raises:
        UnsupportedError: PEFT has no name for an adapter, because HuggingFace's model has several layers in one tensor,
            or does not store the weight in the form of a linear layer.
    """
    return [part for tensor in adapted if has_adapter(tensor) for part in _peft_tensors_of(tensor)]


def has_adapter(tensor: HfTensor) -> bool:
    """Returns True if a HuggingFace tensor has an adapter."""
    return any(slab.low_rank is not None for slab in tensor.slabs)


@dataclass(frozen=True)
class FullyTrained:
    """The weights that were trained in full, and not with an adapter, in PEFT's form.

    Attributes:
        tensors: the tensors with PEFT's names, and with their names in the source as `mcore` in their slabs.
        modules: the modules whose tensors are all in `tensors`, for `modules_to_save`. PEFT (0.21) reads the other
            tensors, such as a router's bias without the router's weight, straight into the base model.
    """

    tensors: tuple[HfTensor, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def sources(self) -> set[str]:
        """The names that these tensors have in the source."""
        return {slab.mcore for tensor in self.tensors for slab in tensor.slabs if slab.mcore}


def fully_trained_in_peft(
    model: HfModel, adapted: Sequence[HfTensor], changed: Container[str], there: Container[str]
) -> FullyTrained:
    """Finds PEFT's form of the weights that training has changed and that have no adapter.

    PEFT has no form for three groups of tensors: tensors that also have an adapter, tensors of experts, and tensors of
    multi-token prediction. For the last two groups, transformers has no separate modules. `FullyTrained.sources` lacks
    all three groups. `adapted` are all tensors of the model, from `with_adapters`. `changed` has the names of the
    source's tensors that training has changed, and `there` has the names of all tensors of the source.
    """
    modules: dict[str, dict[str, HfTensor | None]] = defaultdict(dict)
    adapters = {_module_of(tensor.name) for tensor in adapted if has_adapter(tensor)}
    for tensor in adapted:
        found = [found_as(slab.mcore, there) if slab.mcore else "" for slab in tensor.slabs]
        slabs = tuple(replace(s, mcore=name) for s, name in zip(tensor.slabs, found, strict=True) if name is not None)
        # The entry is None if the source lacks a part of the tensor. A module with such an entry is not whole.
        modules[_module_of(tensor.name)][tensor.name] = (
            replace(tensor, name=PEFT_PREFIX + tensor.name, slabs=slabs) if len(slabs) == len(found) else None
        )
    tensors: list[HfTensor] = []
    whole: list[str] = []
    for module, parts in modules.items():
        is_changed = {
            name: part is not None and any(slab.mcore in changed for slab in part.slabs) for name, part in parts.items()
        }
        has_module = ".experts." not in f"{module}." and not any(is_mtp(model, name) for name in parts)
        if not any(is_changed.values()) or module in adapters or not has_module:
            continue
        # The embedding of a tied model must not be in modules_to_save, because in PEFT (0.21) the head would keep the
        # base model's embedding.
        is_embedding = module == _module_of(model.architecture.table.hf_embedding)
        is_whole = None not in parts.values() and not (model.is_tied and is_embedding)
        whole += [module] if is_whole else []
        tensors += [p for name, p in parts.items() if p is not None and (is_whole or is_changed[name])]
    return FullyTrained(tuple(tensors), tuple(whole))


def of_modules(tensors: Iterable[HfTensor]) -> FullyTrained:
    """Returns PEFT's form of tensors that together make up whole modules."""
    found = tuple(tensors)
    modules = dict.fromkeys(_module_of(tensor.name) for tensor in found)
    return FullyTrained(tuple(replace(tensor, name=PEFT_PREFIX + tensor.name) for tensor in found), tuple(modules))


def no_place_in_peft(names: Sequence[str]) -> UnsupportedError:
    """Returns the error for weights that were trained in full and that PEFT's form has no place for."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return UnsupportedError(
        f"tensor {names[0]}{more}: was trained in addition to the adapters, but PEFT's form has no place for such "
        "tensors: merge the adapters into the model, or leave the tensor out with --ignore"
    )


def has_adapted_weights(adapters: Iterable[str], weights: Iterable[str]) -> bool:
    """Returns True if any of the weights, which have mcore's names, belongs to a layer that has an adapter."""
    modules = {key.module for key in _adapters_among(adapters)}
    return any(key.module in modules for name in weights for key, _ in _keys_of(name, 0))


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _peft_tensors_of(tensor: HfTensor) -> Iterator[HfTensor]:
    slab, low_rank = tensor.slabs[0], tensor.slabs[0].low_rank
    if low_rank is None or len(tensor.slabs) > 1 or slab.change is not None or not tensor.name.endswith(WEIGHT):
        raise UnsupportedError(
            f"tensor {tensor.name}: has an adapter, but is not the weight of one linear layer, so PEFT has no name for "
            "the adapter: merge the adapters into the model instead"
        )
    module = PEFT_PREFIX + tensor.name.removesuffix(WEIGHT)
    parts = {
        "lora_A.weight": (low_rank.a, (low_rank.rank, low_rank.columns)),
        "lora_B.weight": (low_rank.b, (low_rank.rows, low_rank.rank)),
        "lora_magnitude_vector": (low_rank.magnitude, (low_rank.rows,)),
    }
    for name, (factor, shape) in parts.items():
        if factor is not None:
            yield HfTensor(f"{module}.{name}", shape, (Slab(0, factor.name, factor.region),))


def peft_config(
    model: HfModel,
    adapted: Sequence[HfTensor],
    dropout: float = 0.0,
    base: str | None = None,
    modules_to_save: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the contents of the `adapter_config.json` that belongs to `peft_tensors(adapted)`.

    `dropout` is the dropout of the adapters' inputs. `base` is the name or folder of the base model, if known.
    `modules_to_save` are the modules whose tensors are all in the adapter's file.
    """
    found = {t.name.removesuffix(WEIGHT): slab.low_rank for t in adapted for slab in t.slabs if slab.low_rank}
    rank, _ = Counter(low_rank.rank for low_rank in found.values()).most_common(1)[0]
    first = next(iter(found.values()))
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if model.is_value else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "rank_pattern": {name: low_rank.rank for name, low_rank in found.items() if low_rank.rank != rank},
        "lora_alpha": _plain(first.scale * first.rank),
        "alpha_pattern": {},
        "lora_dropout": dropout,
        "use_rslora": False,
        "use_dora": any(low_rank.magnitude is not None for low_rank in found.values()),
        "target_modules": _target_modules(model, found),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": _names_to_save(model, modules_to_save) or None,
        "inference_mode": True,
    }


def _names_to_save(model: HfModel, modules: Sequence[str]) -> list[str]:
    """Returns the last part of each module's name, or the whole name if other modules' names end with the same part."""
    every = {_module_of(tensor.name) for tensor in hf_tensors(model)}
    names: dict[str, None] = {}
    for module in modules:
        short = module.rpartition(".")[2]
        names[short if all(name in modules for name in every if name.endswith(short)) else module] = None
    return sorted(names)


def _plain(number: float) -> float | int:
    number = round(number, 6)
    return int(number) if number == int(number) else number


def _target_modules(model: HfModel, adapted: Mapping[str, LowRank]) -> list[str]:
    """Returns short names if every layer with one of these names has an adapter, else the full names.

    PEFT adds adapters to all layers whose names end with a given short name.
    """
    short = {name.rpartition(".")[2] for name in adapted}
    modules = {
        tensor.name.removesuffix(WEIGHT)
        for tensor in hf_tensors(model)
        if len(tensor.shape) == 2 and not is_mtp(model, tensor.name)  # transformers has no multi-token prediction
    }
    if all(name in adapted for name in modules if name.rpartition(".")[2] in short):
        return sorted(short)
    return sorted(adapted)
