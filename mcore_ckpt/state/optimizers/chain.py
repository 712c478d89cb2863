"""Finds the optimizers in a chain, and the kind of each."""

from __future__ import annotations

from typing import Any

from mcore_ckpt.state.optimizers.fused_adam import FusedAdamPart
from mcore_ckpt.state.optimizers.hybrid_device import HybridDevicePart
from mcore_ckpt.state.optimizers.part import OptimizerPart

_KINDS: dict[str, type[OptimizerPart]] = {
    "param_to_inner_param": HybridDevicePart,
    "name_to_dtype_map": FusedAdamPart,
}


def optimizer_parts(optimizer: Any) -> list[OptimizerPart]:
    """Returns the optimizers of a chain in megatron's order: dense parameters first, then experts. Chains may nest."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [_part(optimizer)]
    return [part for each in chained for part in optimizer_parts(each)]


def _part(megatron: Any) -> OptimizerPart:
    inner = getattr(megatron, "optimizer", None)
    # A kind is recognized by what it has, because its class may be in a package that is not installed.
    for attribute, kind in _KINDS.items():
        if hasattr(inner, attribute):
            return kind(megatron, inner)
    return OptimizerPart(megatron, inner)
