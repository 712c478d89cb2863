"""Qwen2, Qwen2.5 and Qwen3: dense models and mixtures of experts."""

from __future__ import annotations

from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import (
    ATTENTION,
    DENSE_MLP,
    EXPERTS,
    MODEL,
    NORMS,
    QK_NORMS,
    STACKED_EXPERTS,
    facts_of,
    first_integer,
    integer,
    moe_layers,
    read_uniform,
    shared_experts,
    sizes_of,
)
from mcore_ckpt.models.config_fields import Constant, HfConfig, Refused, Same
from mcore_ckpt.models.config_rules import DENSE, SOFTMAX_ROUTER, SlidingWindow, SparseStep, is_sparse
from mcore_ckpt.models.rope_rules import ROPE
from mcore_ckpt.models.table import Table


def _qwen2_moe(config: HfConfig) -> ModelFacts:
    facts = facts_of(config) | {"shared", "shared_gate"} | ({"qkv_bias"} if config.get("qkv_bias", True) else set())
    sizes = {**moe_sizes(config), "shared_ffn": integer(config, "shared_expert_intermediate_size")}
    return ModelFacts(sizes, frozenset(facts), moe_layers(is_sparse(config)))


def read_qwen3_moe(config: HfConfig) -> ModelFacts:
    """Reads all facts about a Qwen3 mixture of experts."""
    return ModelFacts(moe_sizes(config), frozenset(facts_of(config) | {"qk_norm"}), moe_layers(is_sparse(config)))


def moe_sizes(config: HfConfig) -> dict[str, int]:
    """Reads the sizes of a Qwen mixture of experts."""
    experts = first_integer(config, "num_experts", "num_local_experts")
    return {**sizes_of(config), "experts": experts, "moe_ffn": integer(config, "moe_intermediate_size")}


_DENSE = Table(MODEL, (*NORMS, *ATTENTION, *QK_NORMS, *DENSE_MLP))
_MOE = Table(
    MODEL,
    (*NORMS, *ATTENTION, *QK_NORMS, *DENSE_MLP, *EXPERTS, *shared_experts("shared_expert")),
    stacked=STACKED_EXPERTS,
)
# With attention_bias, o_proj has a bias, too, which megatron's add_qkv_bias does not add. So attention_bias must be
# False.
_QWEN3 = (Constant("qk_layernorm", True), Refused("attention_bias", False))
_MIXTURE = (*SOFTMAX_ROUTER, Same("moe_ffn_hidden_size", "moe_intermediate_size"), SparseStep())

ARCHITECTURES = (
    Architecture(
        "qwen2",
        ("Qwen2ForCausalLM", "Qwen2ForTokenClassification"),
        _DENSE,
        lambda config: read_uniform(config, "qkv_bias"),
        (*DENSE, ROPE, SlidingWindow(), Constant("add_qkv_bias", True)),
    ),
    Architecture(
        "qwen3",
        ("Qwen3ForCausalLM", "Qwen3ForTokenClassification"),
        _DENSE,
        lambda config: read_uniform(config, "qk_norm"),
        (*DENSE, ROPE, SlidingWindow(), *_QWEN3),
    ),
    Architecture(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM", "Qwen2MoeForTokenClassification"),
        _MOE,
        _qwen2_moe,
        (
            *DENSE,
            ROPE,
            SlidingWindow(),
            *_MIXTURE,
            Same("add_qkv_bias", "qkv_bias", default=True),
            Same("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
            Constant("moe_shared_expert_gate", True),
        ),
    ),
    Architecture(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM", "Qwen3MoeForTokenClassification"),
        _MOE,
        read_qwen3_moe,
        (*DENSE, ROPE, SlidingWindow(), *_MIXTURE, *_QWEN3),
    ),
)
