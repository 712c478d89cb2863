"""A transformer-engine that runs on a CPU: the modules that mcore-bridge builds Megatron's layers with, in plain torch.

Names, shapes, parallel cuts and `_extra_state` of parameters are those of transformer-engine 2.11, and Megatron's own
wrappers (`megatron.core.extensions.transformer_engine`) are the real ones. The arithmetic is torch's. What else the
package has (its FusedAdam, its kernels) is missing, as on a machine without it.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VERSION = "2.6.0"  # newer ones have kernels that Megatron imports by name (0.19)


class _Module(nn.Module):
    """A module whose extra state is empty, as it is without FP8."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


class Linear(_Module):
    """A linear layer that tensor parallelism can cut by columns or by rows."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        **of_kernels: Any,
    ) -> None:
        super().__init__()
        self.tp_group, self.tp_size = tp_group, torch.distributed.get_world_size(tp_group) if tp_group else tp_size
        self.parallel_mode, self.use_bias, self.return_bias = parallel_mode, bias, return_bias
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=params_dtype))
        self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype)) if bias else None
        if parallel_mode in ("column", "row"):
            _mark(self.weight, 0 if parallel_mode == "column" else 1)
        if parallel_mode == "column" and self.bias is not None:
            _mark(self.bias, 0)
        tracker = get_rng_state_tracker() if get_rng_state_tracker else None
        named = (rng_tracker_name,) if rng_tracker_name else ()
        with tracker.fork(*named) if tracker else nullcontext(), torch.no_grad():
            init_method(self.weight)

    def forward(self, values: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core.tensor_parallel import mappings

        # Not sequence-parallel: what a rank has is whole.
        assert not self.sequence_parallel
        if self.parallel_mode == "column" and self.tp_size > 1:
            values = mappings.copy_to_tensor_model_parallel_region(values, group=self.tp_group)
        out = functional.linear(values, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            out = mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class LayerNormLinear(Linear):
    """A norm, and a linear layer behind it."""

    def __init__(self, in_features: int, out_features: int, *, eps: float, normalization: str, **others: Any) -> None:
        self.return_layernorm_output = others.pop("return_layernorm_output", False)
        super().__init__(in_features, out_features, **others)
        assert (normalization, others.get("zero_centered_gamma", False)) == ("RMSNorm", False)
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=others["params_dtype"]))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, values: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = functional.rms_norm(values, values.shape[-1:], self.layer_norm_weight, self.eps)
        out = super().forward(normed)
        if not self.return_layernorm_output:
            return out
        return (*out, normed) if self.return_bias else (out, normed)


class RMSNorm(_Module):
    def __init__(self, *, eps: float, params_dtype: torch.dtype, **others: Any) -> None:
        super().__init__()
        self.eps = eps
        size = others["normalized_shape"] if "normalized_shape" in others else others["hidden_size"]  # until 0.16
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype))
        self.weight.sequence_parallel = others.get("sequence_parallel", False)  # type: ignore[attr-defined]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(values, values.shape[-1:], self.weight, self.eps)


class DotProductAttention(_Module):
    """Causal attention over packed sequences (thd), or over a batch (sbhd) whose padding is at the end."""

    def __init__(self, num_attention_heads: int, kv_channels: int, *, softmax_scale: Any = None, **o: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        qkv_format: str = "sbhd",
        cu_seqlens_q: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if qkv_format == "sbhd":
            out = self._attend(*(each.permute(1, 2, 0, 3) for each in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        assert cu_seqlens_q is not None
        ends = cu_seqlens_q.tolist()
        packed = [
            self._attend(*(each[start:end].transpose(0, 1)[None] for each in (query, key, value)))[0].transpose(0, 1)
            for start, end in pairwise(ends)
        ]
        return torch.cat(packed).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )


class _Absent(nn.Module):
    """A class to derive from: Megatron's wrappers of it exist, and none is made here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no stand-in on a CPU")


class LayerNorm(_Absent): ...


class GroupedLinear(_Absent): ...


class DelayedScaling(_Absent): ...


class QuantizedTensor:
    """Megatron asks of each parameter whether it is one. None is here."""


class CudaRNGStatesTracker:
    """For Megatron's TECudaRNGStatesTracker, which is not used (te_rng_tracker=False)."""


def install() -> None:
    """Makes `import transformer_engine` find this. Call it before Megatron's modules are imported."""
    off = {"fp8_autocast": nullcontext, "fp8_model_init": nullcontext, "FP8GlobalStateManager": _Absent}
    _module(
        "transformer_engine",
        __version__=VERSION,
        common=types.SimpleNamespace(recipe=types.SimpleNamespace(DelayedScaling=DelayedScaling, Recipe=_Absent)),
    )
    # What is an attribute here, and no module, is not found by modules of Megatron that can do without.
    _module(
        "transformer_engine.pytorch",
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        GroupedLinear=GroupedLinear,
        LayerNorm=LayerNorm,
        RMSNorm=RMSNorm,
        DotProductAttention=DotProductAttention,
        distributed=types.SimpleNamespace(CudaRNGStatesTracker=CudaRNGStatesTracker),
        # Annotations of Megatron's fused MLP name these (0.16, 0.17).
        ops=types.SimpleNamespace(Sequential=_Absent, FusibleOperation=_Absent),
        **off,
    )
    _module("transformer_engine.pytorch.fp8", **off)
    _module("transformer_engine.pytorch.tensor", QuantizedTensor=QuantizedTensor)


def _module(name: str, **members: Any) -> Any:
    module: Any = sys.modules.setdefault(name, types.ModuleType(name))
    # A package without folder: what has no stand-in is not found. peft asks for its spec.
    module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _mark(parameter: Any, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
