"""HuggingFace's PEFT on megatron's local layers, as ROLL has it on transformer-engine's (`apply_megatron_lora`).

PEFT is real. The class of wrapped layers stands in for ROLL's (mcore_adapter/adapters/lora_layer.py, 2026-08), which
needs transformer-engine: the same modules under the same names, cut in the same way, and a `sharded_state_dict` that
treats the same tensors in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import sharded_state_dict_default

from tests.support.bridge_peft import add_peft_to_path

add_peft_to_path()
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from peft.tuners.lora.layer import LoraLayer  # noqa: E402


class WrappedLinear(MegatronModule, LoraLayer):  # type: ignore[misc]
    """A layer inside, with A whole and B cut if the layer cuts its rows, and the other way if it cuts its columns."""

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, r: int, lora_alpha: int, **more: Any) -> None:
        MegatronModule.__init__(self, base_layer.config)
        LoraLayer.__init__(self, base_layer=base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **more: Any) -> None:
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (r**0.5 if config.use_rslora else r)
        rate = config.lora_dropout
        self.lora_dropout[adapter_name] = torch.nn.Dropout(rate) if rate else torch.nn.Identity()
        self.lora_A[adapter_name], self.lora_B[adapter_name] = self._matrices(self.base_layer, r)
        self.set_adapter(self.active_adapters)

    @staticmethod
    def _matrices(base_layer: Any, rank: int) -> tuple[torch.nn.Module, torch.nn.Module]:
        config = base_layer.config
        more: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        if isinstance(base_layer, RowParallelLinear):
            a = RowParallelLinear(base_layer.input_size, rank, input_is_parallel=True, skip_bias_add=True, **more)
            return a, torch.nn.Linear(rank, base_layer.output_size, bias=False)
        b = ColumnParallelLinear(rank, base_layer.output_size, gather_output=False, **more)
        return torch.nn.Linear(base_layer.input_size, rank, bias=False), b

    def forward(self, x: torch.Tensor, *args: Any, **more: Any) -> Any:
        result, bias = self.base_layer(x, *args, **more)
        for name in self.active_adapters:
            a, b, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
            hidden = dropout(x)
            for matrix in (a, b):
                found = matrix(hidden)
                hidden = found[0] if isinstance(found, tuple) else found
            result = result + hidden * self.scaling[name]
        return result, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        inside = {"base_layer": self.base_layer}
        inside |= {f"{kind}.{name}": m for kind in ("lora_A", "lora_B") for name, m in getattr(self, kind).items()}
        for name, module in inside.items():
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        if prefix.endswith("linear_fc1."):
            # Of B, ROLL does not say that its rows are those of two halves.
            weight = f"{prefix}base_layer.weight"
            found[weight] = apply_swiglu_sharded_factory(found[weight], sharded_offsets)
        return found


class BareLinear(WrappedLinear):
    """Cannot say where its tensors belong, as PEFT's own layers for megatron cannot (0.21)."""

    @property
    def sharded_state_dict(self) -> Any:
        raise AttributeError("sharded_state_dict")


def adapted_by_peft(
    model: Any,
    rank: int,
    alpha: int,
    target_modules: list[str],
    adapters: tuple[str, ...] = ("default",),
    layer: type = WrappedLinear,
    **more: Any,
) -> PeftModel:
    """Wraps layers of a model and freezes all else."""
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_modules, **more)
    settings._register_custom_module({ColumnParallelLinear: layer, RowParallelLinear: layer})
    first, *others = adapters
    found = get_peft_model(model, settings, adapter_name=first, autocast_adapter_dtype=False)
    for name in others:
        found.add_adapter(name, settings, autocast_adapter_dtype=False)
    return found
