"""Reads the names that the wrappers of Megatron-Bridge (0.3 to 0.6) give the tensors of low-rank adapters.

A wrapper (`AdapterWrapper`) keeps a layer as `to_wrap` and the layer's adapter as `adapter`. The wrapper's `state_dict`
lists the layer's tensors under the wrapper's own name, and the adapter's tensors under `adapter.`. HuggingFace's PEFT,
with which ROLL trains, has other names for the same tensors. On disk the tensors have Megatron-Bridge's names.

- Rows that Bridge permutes. With tensor parallelism, a rank's `linear_fc1` has the rank's rows of the gate, and then
  its rows of up. Bridge (0.3 to 0.6) ignores this order when it describes two tensors: the magnitude of a `linear_fc1`,
  and the matrix B in CanonicalLoRA's adapters for gate and up. So under another tensor-parallel size, Bridge's own
  checkpoints come back with these rows in another order. In mcore_ckpt, `state/model.py` takes the places of these
  tensors from the weight. Bridge's own `torch_dist` checkpoints with these tensors load only under the saved size, and
  `merge` refuses these tensors by name. DoRA of row-parallel layers has different magnitudes on the tensor-parallel
  ranks, so a manager refuses such an adapter.
- Layers that PEFT has wrapped (in ROLL, `mcore_adapter` wraps transformer-engine's layers) have the same adapters under
  other names. `without_peft` translates the names when a live model is read. The regions of A and B follow from the
  layer's weight: B has the rows of the weight, and A its columns. ROLL's own `sharded_state_dict` (2026-08) has entries
  for A and B, too. These entries are not used, because the entry for B of `linear_fc1` has one range of rows, although
  the weight has two ranges, gate and up. ROLL's adapters of experts have a smaller rank but the scale of the larger
  rank, so these adapters are refused.
- Grouped experts. If all experts of a rank share one adapter, Bridge 0.6 keeps this adapter equal on all ranks. So each
  expert-parallel rank stores a copy, and a load under any size can read one of the copies. Bridge 0.3 lets the adapters
  of the ranks drift apart, so a manager refuses these adapters with expert parallelism. If each expert has its own
  adapter (`share_expert_adapters=False`), the adapters' tensors have an axis of experts, and are cut like other tensors
  of experts.
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
            fuses (Megatron-Bridge's CanonicalLoRA). Empty if the adapter belongs to the whole layer.
    """

    module: str
    component: str = ""


_BASE_LAYER = ".base_layer."
_OF_PEFT = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.(?P<adapter>[^.]+)\.(?P<rest>weight|_extra_state)")
# Modules of PEFT whose tensors have no counterpart in Megatron-Bridge's wrappers.
_ONLY_IN_PEFT = re.compile(r"\.(?:lora_\w+|modules_to_save|original_module)\.")


class PeftMatrix(NamedTuple):
    """The matrix A ([rank, columns]) or B ([rows, rank]) of an adapter in `module`, a layer that PEFT has wrapped."""

    module: str
    is_a: bool

    @property
    def weight(self) -> str:
        """The name of the weight that the adapter belongs to."""
        return f"{self.module}{_BASE_LAYER}weight"


def peft_matrix(name: str) -> PeftMatrix | None:
    """Returns which of PEFT's matrices a tensor is; None for any other tensor."""
    match = _OF_PEFT.fullmatch(name)
    return None if match is None or match["rest"] != "weight" else PeftMatrix(match["module"], match["matrix"] == "A")


def without_peft(name: str) -> str:
    """Returns the name that a tensor has in Megatron-Bridge's wrappers. Other names are returned unchanged.

    Raises ValueError if the tensor belongs to a module of PEFT that has no counterpart.

    Example:
        >>> without_peft("layers.0.mlp.linear_fc2.base_layer.weight")
        'layers.0.mlp.linear_fc2.weight'
        >>> without_peft("layers.0.mlp.linear_fc2.lora_A.default.weight")
        'layers.0.mlp.linear_fc2.adapter.linear_in.weight'
    """
    if match := _OF_PEFT.fullmatch(name):
        part = "linear_in" if match["matrix"] == "A" else "linear_out"
        return f"{match['module']}{_MARK}{part}.{match['rest']}"
    if _ONLY_IN_PEFT.search(name):
        raise ValueError(
            f"tensor {name}: of PEFT's tensors, only the matrices A and B of a layer's LoRA can be saved: leave "
            "grouped experts out of lora_target, leave additional_target empty, and turn biases and DoRA off"
        )
    return name.replace(_BASE_LAYER, ".")


_PERMUTED = re.compile(
    r"(?P<module>.+\.linear_fc1)\.adapter\.(?:(?P<magnitude>weight_magnitude)|adapter_(?:gate|up)\.linear_out\.weight)"
)


def permuted_in_bridge(name: str) -> str | None:
    """Returns "magnitude" or "component" for a tensor whose rows Megatron-Bridge (0.3 to 0.6) puts into another order.

    Returns None for any other tensor. The docstring of this module says why the order depends on the tensor-parallel
    size.
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


def is_changed_buffer(name: str) -> bool:
    """Returns True for a buffer that training changes, although it is not a parameter: a router's bias."""
    return name.endswith(".router.expert_bias")


def adapters_among(names: Iterable[str]) -> dict[AdapterKey, dict[str, str]]:
    """Groups the names of adapters' tensors by adapter. Other names are left out.

    Returns, for each adapter, its tensors' names by part: `LINEAR_IN` (A, [rank, columns]), `LINEAR_OUT` (B, [rows,
    rank]) and, for DoRA, `MAGNITUDE` ([rows]). Raises ValueError if an adapter has a tensor of another name, or lacks
    one of its two matrices.

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
