"""The mapping for models of any size: each element has exactly one place, and comes back from it."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.models import model_from_config
from mcore_ckpt.models.mapping import HfTensor, check_names, hf_tensors, hf_tensors_in
from tests.support.global_tensors import to_hf, to_mcore
from tests.support.tiny_models import NAMES, make_config

SMALL = st.integers(1, 4)


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Overrides for any architecture; those that one does not know it ignores."""
    groups, per_group, head_dim, layers = draw(SMALL), draw(SMALL), 2 * draw(SMALL), draw(SMALL)
    key_heads = draw(SMALL)
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "hidden_size": groups * per_group * head_dim,
        "intermediate_size": draw(SMALL),
        "vocab_size": draw(st.integers(1, 9)),
        "moe_intermediate_size": draw(SMALL),
        "shared_expert_intermediate_size": draw(SMALL),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "kv_lora_rank": draw(SMALL),
        "qk_nope_head_dim": draw(SMALL),
        "qk_rope_head_dim": 2 * draw(SMALL),
        "v_head_dim": draw(SMALL),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(SMALL),
        "linear_key_head_dim": draw(SMALL),
        "linear_value_head_dim": draw(SMALL),
        "mamba_num_heads": key_heads * draw(SMALL),
        "mamba_head_dim": draw(SMALL),
        "ssm_state_size": draw(SMALL),
        "n_groups": key_heads,
        "moe_shared_expert_intermediate_size": draw(SMALL),
        "index_n_heads": draw(SMALL),
        "index_head_dim": draw(SMALL),
        "layer_types": None,
        # Multi-token prediction of Qwen3.5 needs a last layer with full attention.
        "full_attention_interval": layers,
        "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1), max_size=2)),
    }


def numbered(tensors: list[HfTensor]) -> dict[str, torch.Tensor]:
    """Tensors of which no two elements are alike; copies are copies."""
    made: dict[str, torch.Tensor] = {}
    originals: dict[str, str] = {}
    at = 1
    for tensor in [*(t for t in tensors if not t.is_copy), *(t for t in tensors if t.is_copy)]:
        source = tensor.slabs[0].mcore
        if tensor.is_copy:
            made[tensor.name] = made[originals[source]].clone()
        elif not source:
            made[tensor.name] = torch.zeros(tensor.shape)  # mcore has none
        else:
            made[tensor.name] = torch.arange(at, at + tensor.numel, dtype=torch.float64).view(tensor.shape)
            originals.setdefault(source, tensor.name)
            at += tensor.numel
    return made


# A list of their config says what each layer is.
LISTED = ("nemotron_h", "glm_moe_dsa-shared")
OF_LAYERS = ("num_hidden_layers", "layer_types")

# Of the other models, an architecture has the same tensors as of one that runs in CI, or lacks a part of what that has.
IN_CI = frozenset(
    {
        "llama",
        "llama-value",
        "mistral",
        "qwen2-tied",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe-sparse",
        "mixtral",
        "deepseek_v3-no-q-lora",
        "deepseek_v3-mtp",
        "gpt_oss",
        "qwen3_next",
        "glm4_moe-mtp",
        "seed_oss",
        "qwen3_5_text",
        "qwen3_5_moe_text-mtp",
        "minimax_m2",
        "deepseek_v2",
    }
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_CI else pytest.mark.full)
        for name in NAMES
        if name not in ("llama-3", "qwen2-yarn", "qwen2-linear")
    ],
)
@settings(max_examples=15)
@given(overrides=sizes())
def test_every_element_is_covered_once_and_comes_back(name: str, overrides: dict[str, Any]) -> None:
    if name.startswith(LISTED):
        overrides = {field: value for field, value in overrides.items() if field not in OF_LAYERS}
    model = model_from_config(make_config(name, **overrides))
    tensors = hf_tensors(model)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert all(tensor.numel == sum(slab.numel for slab in tensor.slabs) for tensor in tensors)
    stored = numbered(tensors)
    there = to_mcore(model, stored)  # asserts that every element of mcore's tensors is covered once
    count = sum(prod(tensor.shape) for tensor in tensors if not tensor.is_copy and tensor.slabs[0].mcore)
    assert sum(tensor.numel() for tensor in there.values()) == count
    back = to_hf(model, there)
    assert back.keys() == stored.keys()
    for key, tensor in stored.items():
        assert torch.equal(back[key], tensor), key


def test_a_multi_token_prediction_that_is_partly_there_is_an_error() -> None:
    model = model_from_config(make_config("deepseek_v3-mtp"))
    names = {tensor.name for tensor in hf_tensors(model)}
    without_copies = {n for n in names if not n.endswith(("layers.4.embed_tokens.weight", "shared_head.head.weight"))}
    check_names(model, hf_tensors_in(model, without_copies), without_copies, "here")
    none = {name for name in names if "layers.4." not in name}
    check_names(model, hf_tensors_in(model, none), none, "here")
    some = names - {"model.layers.4.eh_proj.weight"}
    with pytest.raises(CheckpointMismatchError, match=r"lacks model\.layers\.4\.eh_proj\.weight"):
        check_names(model, hf_tensors_in(model, some), some, "here")


def test_rows_of_a_group_are_queries_key_value() -> None:
    """Against the order written out by hand, not the code under test backwards."""
    model = model_from_config(
        make_config(
            "llama", num_hidden_layers=1, head_dim=2, hidden_size=4, num_attention_heads=4, num_key_value_heads=2
        )
    )
    stored = {tensor.name: torch.zeros(tensor.shape) for tensor in hf_tensors(model)}
    prefix = "model.layers.0.self_attn."
    for number, (letter, rows) in enumerate((("q", 8), ("k", 4), ("v", 4))):
        values = 10.0 * number + torch.arange(rows)
        stored[f"{prefix}{letter}_proj.weight"] = values[:, None].expand(rows, 4)
    fused = to_mcore(model, stored)["decoder.layers.0.self_attention.linear_qkv.weight"][:, 0]
    assert fused.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
