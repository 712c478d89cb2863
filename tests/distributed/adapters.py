"""Adapters on the tests' models: Megatron-Bridge's own, and those of PEFT as ROLL has them."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from tests.distributed import training
from tests.support.bridge_peft import import_peft

# Everything but adapters, as Megatron-Bridge's `PEFT.freeze_model` and PEFT do.
FROZEN = r"^(?!.*(adapter|lora_))"
ALPHA, DIM = 6, 4
_MODULES = {"LoRA": "lora", "CanonicalLoRA": "canonical_lora", "DoRA": "dora"}


def adapt(chunks: list[Any], kind: str = "LoRA", **arguments: Any) -> list[Any]:
    """Puts adapters on a model's linear layers, and freezes all else. Of kind "PEFT" they are as in ROLL."""
    if kind == "PEFT":
        from tests.support.roll_peft import adapted_by_peft

        targets = {"target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]} | arguments
        chunks = [adapted_by_peft(chunk, DIM, ALPHA, **targets) for chunk in chunks]
        _randomize(chunks)
        return chunks
    adapted = getattr(import_peft(_MODULES[kind]), kind)(dim=DIM, alpha=ALPHA, **arguments)
    chunks = adapted(chunks, training=True)
    _randomize(chunks)
    return chunks


def _randomize(chunks: list[Any]) -> None:
    """B begins with zeros, which would hide much. Each part of a tensor gets other values, replicas the same."""
    dense = 100 * parallel_state.get_pipeline_model_parallel_rank()
    of_experts = dense + 10 + parallel_state.get_expert_model_parallel_rank()
    tp, etp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    generators = [
        torch.Generator().manual_seed(1000 * seed) for seed in (dense + 5 * tp, dense, of_experts + 1000 * etp)
    ]
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                generator = generators[2 if ".experts." in name else 0]
                if name.endswith("linear_out.weight") or ".lora_B." in name:
                    is_cut = "linear_proj" not in name and "linear_fc2" not in name
                    # PEFT keeps B of a row-parallel layer whole on each rank.
                    generator = generators[0 if is_cut else 1] if ".lora_B." in name else generator
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
                elif name.endswith("weight_magnitude"):
                    is_row = "linear_proj" in name or "linear_fc2" in name  # whole on each tensor-parallel rank
                    generator = generators[1 if is_row else 0]
                    parameter.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)


def with_adapters(monkeypatch: pytest.MonkeyPatch, kind: str = "LoRA", **arguments: Any) -> None:
    """From here on models are built with adapters, by default on their attention."""
    build_chunk = training._build_chunk

    def build(*args: Any) -> Any:
        return adapt([build_chunk(*args)], kind, **({"target_modules": ["linear_qkv"]} | arguments))[0]

    monkeypatch.setattr(training, "_build_chunk", build)
