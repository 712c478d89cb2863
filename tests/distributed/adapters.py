"""LoRA adapters on the tests' models, in the form that Megatron-Bridge gives them."""

from typing import Any

import pytest
import torch
import training
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear

RANK = 3
# Everything but adapters, as Megatron-Bridge's `PEFT.freeze_model` does.
FROZEN = r"^(?!.*adapter)"


class Adapter(torch.nn.Module):
    """Low-rank, as `ParallelLinearAdapter`, of one tensor-parallel rank."""

    def __init__(self, base: ColumnParallelLinear) -> None:
        super().__init__()
        more: dict[str, Any] = {"config": base.config, "init_method": torch.nn.init.normal_, "bias": False}
        self.linear_in = ColumnParallelLinear(base.input_size, RANK, **more)
        self.linear_out = ColumnParallelLinear(RANK, base.output_size, **more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_out(self.linear_in(x)[0])[0]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return {
            **self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata),
            **self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata),
        }


class Adapted(torch.nn.Module):
    """A layer and its adapter: in `state_dict` the layer is in its old place (Bridge's `AdapterWrapper`)."""

    def __init__(self, base: ColumnParallelLinear) -> None:
        super().__init__()
        self.to_wrap = base
        self.adapter = Adapter(base)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.to_wrap(x)
        return output + self.adapter(x), bias

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        self.to_wrap.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        self.adapter.state_dict(destination=destination, prefix=f"{prefix}adapter.", keep_vars=keep_vars)
        return destination

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return {
            **self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata),
            **self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata),
        }


def with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on models are built with adapters on their attention."""
    build_chunk = training._build_chunk

    def build(*args: Any) -> GPTModel:
        chunk = build_chunk(*args)
        for layer in chunk.decoder.layers:
            layer.self_attention.linear_qkv = Adapted(layer.self_attention.linear_qkv)
        return chunk

    monkeypatch.setattr(training, "_build_chunk", build)
