"""Reads the names of low-rank adapters' tensors, as Megatron-Bridge's wrappers give them (0.3 to 0.6).

A wrapper (`AdapterWrapper`) keeps a layer as `to_wrap` and the layer's adapter as `adapter`. Its `state_dict` lists the
layer's tensors under the wrapper's own name, and the adapter's tensors under `adapter.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_MARK = ".adapter."
_TENSOR = re.compile(
    r"(?P<module>.+)\.adapter\.(?:adapter_(?P<component>\w+)\.)?"
    r"(?P<part>linear_in\.weight|linear_out\.weight|weight_magnitude)"
)

LINEAR_IN, LINEAR_OUT, MAGNITUDE = "linear_in.weight", "linear_out.weight", "weight_magnitude"


class AdapterKey(NamedTuple):
    """Identifies one adapter.

    Attributes:
        module: the global name of the adapted layer, such as `decoder.layers.3.self_attention.linear_qkv`.
        component: `q`, `k` or `v`, or `gate` or `up`, if the adapter belongs to one of the projections that the layer
            fuses (Megatron-Bridge's CanonicalLoRA). Empty if it belongs to the whole layer.
    """

    module: str
    component: str = ""


_PERMUTED = re.compile(
    r"(?P<module>.+\.linear_fc1)\.adapter\.(?:(?P<magnitude>weight_magnitude)|adapter_(?:gate|up)\.linear_out\.weight)"
)


def permuted_in_bridge(name: str) -> str | None:
    """Returns "magnitude" or "component" for a tensor whose rows Megatron-Bridge (0.3 to 0.6) puts into another order.

    `linear_fc1` holds, on each tensor-parallel rank, the rank's rows of the gate and then those of up. Bridge takes the
    magnitude of such a layer (DoRA) for one that is cut without regard to this, and B of CanonicalLoRA's adapter of the
    gate, or of up, for one that holds both. So the order of rows in Bridge's own checkpoints depends on the
    tensor-parallel size. Returns None for any other tensor.
    """
    match = _PERMUTED.fullmatch(name)
    return None if match is None else "magnitude" if match["magnitude"] else "component"


def is_magnitude(name: str) -> bool:
    """Returns True for the magnitude of an adapter (DoRA)."""
    return name.endswith(f"{_MARK}{MAGNITUDE}")


def is_adapter(name: str) -> bool:
    """Returns True if a tensor belongs to an adapter.

    Example:
        >>> is_adapter("decoder.layers.3.self_attention.linear_qkv.adapter.linear_in.weight")
        True
    """
    return _MARK in name


def adapters_among(names: Iterable[str]) -> dict[AdapterKey, dict[str, str]]:
    """Groups the names of adapters' tensors by adapter. Other names are left out.

    Returns:
        For each adapter, its tensors' names by part: `LINEAR_IN` (A, [rank, columns]), `LINEAR_OUT` (B, [rows, rank])
        and, for DoRA, `MAGNITUDE` ([rows]).

    Raises:
        ValueError: an adapter has a tensor of another name, or lacks one of its two matrices.

    Example:
        >>> list(adapters_among(["fc2.adapter.linear_in.weight", "fc2.adapter.linear_out.weight", "fc2.weight"]))
        [AdapterKey(module='fc2', component='')]
    """
    found: dict[AdapterKey, dict[str, str]] = {}
    for name in names:
        if not is_adapter(name) or name.endswith("_extra_state"):
            continue
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(f"tensor {name}: is not a tensor of LoRA, CanonicalLoRA or DoRA")
        found.setdefault(AdapterKey(match["module"], match["component"] or ""), {})[match["part"]] = name
    for key, parts in found.items():
        for part in (LINEAR_IN, LINEAR_OUT):
            if part not in parts:
                raise ValueError(f"the adapter of {key.module} has {', '.join(parts.values())}, but no {part}")
    return found
