"""Which adapter belongs to which HuggingFace tensor, and what cannot be said in PEFT's words."""

from __future__ import annotations

import pytest

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HfTensor, hf_tensors
from mcore_ckpt.models.peft_adapters import peft_config, peft_tensors, with_adapters
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.sharding.adapter_names import adapters_among, permuted_in_bridge
from mcore_ckpt.sharding.regions import Shape
from tests.support.tiny_models import make_config

LAYER = "decoder.layers.{}."


def adapter(module: str, rows: int, columns: int, rank: int = 4, component: str = "") -> dict[str, Shape]:
    prefix = f"{module}.adapter.{component}"
    return {f"{prefix}linear_in.weight": (rank, columns), f"{prefix}linear_out.weight": (rows, rank)}


def adapted(model: HfModel, adapters: dict[str, Shape]) -> list[HfTensor]:
    return with_adapters(model, hf_tensors(model), adapters, alpha=8)


def names(tensors: list[HfTensor]) -> set[str]:
    return {tensor.name.removeprefix("base_model.model.model.layers.") for tensor in tensors}


def test_short_names_if_all_layers_of_a_name_have_an_adapter_else_full_ones() -> None:
    """PEFT would make more adapters by a short name."""
    model = model_from_config(make_config("llama"))
    every = {
        key: shape
        for number in range(len(model.layers))
        for key, shape in adapter(LAYER.format(number) + "mlp.linear_fc2", 64, 96).items()
    }
    assert peft_config(model, adapted(model, every))["target_modules"] == ["down_proj"]
    one = adapter(LAYER.format(2) + "mlp.linear_fc2", 64, 96)
    assert peft_config(model, adapted(model, one))["target_modules"] == ["model.layers.2.mlp.down_proj"]


def test_ranks_that_differ_have_a_pattern() -> None:
    model = model_from_config(make_config("llama"))
    two = adapter(LAYER.format(0) + "mlp.linear_fc2", 64, 96, rank=2)
    four = adapter(LAYER.format(1) + "mlp.linear_fc1", 192, 64)
    config = peft_config(model, adapted(model, {**two, **four}), dropout=0.25, base="some/model")
    assert (config["r"], config["rank_pattern"]) == (4, {"model.layers.0.mlp.down_proj": 2})
    assert (config["lora_alpha"], config["lora_dropout"]) == (8, 0.25)
    assert config["base_model_name_or_path"] == "some/model"


def test_neighbouring_experts_share_an_adapter() -> None:
    """As many adapters as there are expert-parallel ranks, or one for each expert, or one for all."""
    model = model_from_config(make_config("qwen3_moe"))
    module = LAYER.format(0) + "mlp.experts.linear_fc2"
    for count in (None, 1, 2, 4):
        shapes = adapter(module, 64, 40)
        if count is not None:
            shapes = {name: (count, *shape) for name, shape in shapes.items()}
        experts = [tensor for tensor in peft_tensors(adapted(model, shapes)) if tensor.name.endswith("lora_A.weight")]
        assert len(experts) == model.sizes["experts"] == 4
        first = [tensor.slabs[0].region.pieces[0].global_offset[0] for tensor in experts]
        assert first == [expert * (count or 0) // 4 for expert in range(4)]


@pytest.mark.parametrize(
    ("model", "adapters", "words"),
    [
        ("llama", adapter(LAYER.format(9) + "mlp.linear_fc2", 64, 96), "layers.9.mlp.linear_fc2, but a llama"),
        ("llama", adapter(LAYER.format(0) + "mlp.linear_fc2", 64, 90), r"linear_in.weight: has shape \[4, 90\]"),
        ("llama", adapter(LAYER.format(0) + "mlp.linear_fc2", 60, 96), r"linear_out.weight: has shape \[60, 4\]"),
        ("llama", {LAYER.format(0) + "mlp.linear_fc2.adapter.linear_in.weight": (4, 96)}, "no linear_out.weight"),
        ("llama", {LAYER.format(0) + "mlp.linear_fc2.adapter.ln.weight": (4,)}, "not a tensor of LoRA"),
    ],
)
def test_what_does_not_belong_is_refused(model: str, adapters: dict[str, Shape], words: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=words):
        adapted(model_from_config(make_config(model)), adapters)


def test_what_peft_has_no_name_for_is_refused() -> None:
    # gpt_oss keeps all experts in one tensor.
    model, module = (
        model_from_config(make_config("gpt_oss")),
        LAYER.format(0) + "mlp.experts.local_experts.1.linear_fc2",
    )
    slabs = [slab for tensor in hf_tensors(model) for slab in tensor.slabs if slab.mcore == f"{module}.weight"]
    tensors = adapted(model, adapter(module, *slabs[0].region.local_shape))
    with pytest.raises(UnsupportedError, match="merge the adapters into the model instead"):
        peft_tensors(tensors)
    part = adapter(LAYER.format(0) + "mlp.linear_fc2", 64, 96, component="adapter_gate.")
    with pytest.raises(UnsupportedError, match=r"adapter_gate .* LoRA instead of CanonicalLoRA"):
        adapted(model_from_config(make_config("llama")), part)


def test_names() -> None:
    base = "decoder.layers.0.mlp.linear_fc1"
    assert permuted_in_bridge(f"{base}.adapter.weight_magnitude") == "magnitude"
    assert permuted_in_bridge(f"{base}.adapter.adapter_up.linear_out.weight") == "component"
    assert permuted_in_bridge(f"{base}.adapter.linear_out.weight") is None
    assert adapters_among([f"{base}.weight", f"{base}.adapter.linear_in._extra_state"]) == {}
