"""Qwen3-Next, which has linear attention (GatedDeltaNet) in most layers and gated attention in the other layers.

`config.json` does not mention the multi-token prediction of these models. Only the names of the tensors show whether a
model has multi-token prediction (`ModelFacts.unstated_mtp`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import (
    DENSE_MLP,
    EXPERTS,
    MODEL,
    NORMS,
    STACKED_EXPERTS,
    attention,
    facts_of,
    integer,
    shared_experts,
)
from mcore_ckpt.models.architectures.qwen import moe_sizes
from mcore_ckpt.models.config_fields import Constant, HfConfig, Refused, Rule, Same
from mcore_ckpt.models.config_rules import DENSE, SOFTMAX_ROUTER, LinearLayers, SparseStep, is_linear, is_sparse
from mcore_ckpt.models.rope_rules import Rope
from mcore_ckpt.models.table import Row, RowRange, Sizes, Table, gated_qkv
from mcore_ckpt.sharding.regions import Shape


def linear_sizes(config: HfConfig) -> dict[str, int]:
    """Reads the sizes of GatedDeltaNet."""
    key_heads, key_dim = integer(config, "linear_num_key_heads"), integer(config, "linear_key_head_dim")
    value_heads, value_dim = integer(config, "linear_num_value_heads"), integer(config, "linear_value_head_dim")
    sizes = {"key_heads": key_heads, "key_dim": key_dim, "value_heads": value_heads, "value_dim": value_dim}
    sizes |= {"kernel": integer(config, "linear_conv_kernel_dim"), "keys": key_heads * key_dim}
    sizes |= {"values": value_heads * value_dim, "convolved": 2 * key_heads * key_dim + value_heads * value_dim}
    return sizes | {"qkvz": sizes["convolved"] + sizes["values"]}


def mixed_layers(linear: Sequence[bool], moe: Sequence[bool]) -> tuple[frozenset[str], ...]:
    """Returns the facts of decoder layers: "linear" for linear attention, "moe" for a mixture of experts."""
    return tuple(
        frozenset({word for word, is_so in (("linear", is_linear), ("moe", is_moe)) if is_so})
        for is_linear, is_moe in zip(linear, moe, strict=True)
    )


def _read(config: HfConfig) -> ModelFacts:
    sizes = moe_sizes(config) | linear_sizes(config)
    sizes["shared_ffn"] = integer(config, "shared_expert_intermediate_size")
    facts = facts_of(config) | {"shared", "shared_gate"}
    layers = mixed_layers(is_linear(config), is_sparse(config))
    # The layer of multi-token prediction has full attention, but megatron builds this layer with the spec of the
    # decoder's last layer (get_gpt_mtp_block_spec, 0.16.1). If the decoder's last layer has linear attention, megatron
    # has no counterpart for the layer of multi-token prediction, and the tensors of that layer count as unknown.
    mtp = () if "linear" in layers[-1] else (layers[-1],)
    return ModelFacts(sizes, frozenset(facts), layers, unstated_mtp=mtp)


def _in_proj(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """Returns the order of rows in GatedDeltaNet's input projection.

    HuggingFace groups the rows by key head: one tensor has the query, key, values and gates of each head, and a second
    tensor has the betas and alphas of each head. mcore has the queries of all heads first, then the keys of all heads,
    and so on (`GatedDeltaNet.forward`, 0.16.1).
    """
    heads, key = sizes["key_heads"], sizes["key_dim"]
    value, number = sizes["values"] // heads, sizes["value_heads"] // heads
    per_head = 2 * key + 2 * value
    parts = [(0, per_head, at, rows) for at, rows in ((0, key), (key, key), (2 * key, value), (2 * key + value, value))]
    parts += [(1, 2 * number, 0, number), (1, 2 * number, number, number)]
    return [RowRange(source, head * each + at, rows) for source, each, at, rows in parts for head in range(heads)]


class ZeroCentred:
    """Shifts the weight of a norm by 1, because mcore multiplies by 1 + weight and HuggingFace by weight.

    The shift is exact in both directions if HuggingFace's weight is in [0.5, 2], as trained weights of norms are. A
    weight outside of this range is rounded once to the dtype.
    """

    def to_hf(self, mcore: torch.Tensor) -> torch.Tensor:
        return mcore + 1

    def to_mcore(self, hf: torch.Tensor) -> torch.Tensor:
        return hf - 1


_CONVOLVED = {"query": "keys", "key": "keys", "value": "values"}
IN_PROJ_SECTIONS = {**_CONVOLVED, "z": "values", "beta": "value_heads", "alpha": "value_heads"}
_IN_PROJ = Row(
    "self_attention.in_proj.weight",
    {"linear_attn.in_proj_qkvz.weight": "qkvz hidden", "linear_attn.in_proj_ba.weight": "2*value_heads hidden"},
    _in_proj,
    when="linear",
    sections=IN_PROJ_SECTIONS,
)
# The rows of linear attention except its input projection.
LINEAR_ATTENTION = (
    Row(
        "self_attention.conv1d.weight",
        {"linear_attn.conv1d.weight": "convolved 1 kernel"},
        when="linear",
        sections=_CONVOLVED,
    ),
    Row("self_attention.dt_bias", {"linear_attn.dt_bias": "value_heads"}, when="linear"),
    Row("self_attention.A_log", {"linear_attn.A_log": "value_heads"}, when="linear"),
    # mcore multiplies by 1 + weight in all norms, and HuggingFace in all norms except this norm.
    Row(
        "self_attention.out_norm.weight", {"linear_attn.norm.weight": "value_dim"}, when="linear", change=ZeroCentred()
    ),
    Row("self_attention.out_proj.weight", {"linear_attn.out_proj.weight": "hidden values"}, when="linear"),
)
GATED_ATTENTION = (
    *attention("self_attn", when="!linear", queries="2*heads", order=gated_qkv),
    Row("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "head_dim"}, when="!linear"),
    Row("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "head_dim"}, when="!linear"),
)
MTP = (
    Row("enorm.weight", {"pre_fc_norm_embedding.weight": "hidden"}),
    Row("hnorm.weight", {"pre_fc_norm_hidden.weight": "hidden"}),
    Row("eh_proj.weight", {"fc.weight": "hidden 2*hidden"}),
    Row("final_layernorm.weight", {"norm.weight": "hidden"}),
)
_TABLE = Table(
    MODEL,
    (*NORMS, _IN_PROJ, *LINEAR_ATTENTION, *GATED_ATTENTION, *DENSE_MLP, *EXPERTS, *shared_experts("shared_expert")),
    # Published models have one layer of multi-token prediction. config.json does not mention this layer, and
    # transformers does not read it (Qwen3NextPreTrainedModel).
    MTP,
    stacked=STACKED_EXPERTS,
    hf_mtp_layer="mtp.",
    hf_mtp_decoder="layers.{mtp}.",
)

GATED_DELTA_NET: tuple[Rule, ...] = (
    Refused("attention_bias", False),
    Constant("qk_layernorm", True),
    Constant("layernorm_zero_centered_gamma", True),
    Constant("attention_output_gate", True),
    LinearLayers(),
    *(
        Same(name, name)
        for name in (
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
        )
    ),
)
"""The rules of a decoder with linear attention (GatedDeltaNet) in some layers and gated attention in the others."""

ARCHITECTURES = (
    Architecture(
        "qwen3_next",
        ("Qwen3NextForCausalLM", "Qwen3NextForTokenClassification"),
        _TABLE,
        _read,
        (
            *DENSE,
            Rope(default_partial=0.25),
            *SOFTMAX_ROUTER,
            Same("moe_ffn_hidden_size", "moe_intermediate_size"),
            SparseStep(),
            Same("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
            Constant("moe_shared_expert_gate", True),
            *GATED_DELTA_NET,
        ),
    ),
)
