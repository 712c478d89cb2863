"""Finds the optimizers in a chain, and the kind of each."""

from __future__ import annotations

from typing import Any

from mcore_ckpt.state.optimizers.fused_adam import FusedAdamPart
from mcore_ckpt.state.optimizers.hybrid_device import HybridDevicePart
from mcore_ckpt.state.optimizers.part import OptimizerPart

_PARTS: dict[str, type[OptimizerPart]] = {
    "param_to_inner_param": HybridDevicePart,
    "name_to_dtype_map": FusedAdamPart,
}


def optimizer_parts(optimizer: Any) -> list[OptimizerPart]:
    """Returns the optimizers of a chain in megatron's order: dense parameters first, then experts. Chains may nest."""
    return _parts(optimizer, is_of_owner=False)


def layer_wise_nodes(optimizer: Any) -> list[Any]:
    """Returns the LayerWiseDistributedOptimizers in a chain. Chains may nest."""
    own = [optimizer] if _is_layer_wise(optimizer) else []
    chained = getattr(optimizer, "chained_optimizers", ())
    return [*own, *(node for each in chained for node in layer_wise_nodes(each))]


def _is_layer_wise(optimizer: Any) -> bool:
    return hasattr(optimizer, "dp_cp_params_list")


def _parts(optimizer: Any, is_of_owner: bool) -> list[OptimizerPart]:
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [_part(optimizer, is_of_owner)]
    is_of_owner = is_of_owner or _is_layer_wise(optimizer)
    return [part for each in chained for part in _parts(each, is_of_owner)]


def _part(megatron: Any, is_of_owner: bool) -> OptimizerPart:
    inner = getattr(megatron, "optimizer", None)
    # A kind is recognized by its attributes, because its class may be in a package that is not installed.
    for attribute, kind in _PARTS.items():
        if hasattr(inner, attribute):
            return kind(megatron, inner, is_of_owner)
    return OptimizerPart(megatron, inner, is_of_owner)
