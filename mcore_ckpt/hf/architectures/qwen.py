"""Qwen2, Qwen2.5, Qwen3, Qwen3-MoE."""

from __future__ import annotations

from mcore_ckpt.hf.architecture import Architecture, HfConfig, ModelFacts, register_architecture
from mcore_ckpt.hf.architectures.common import (
    ATTENTION,
    DENSE_MLP,
    EXPERTS,
    MODEL,
    NORMS,
    QK_NORMS,
    STACKED_EXPERTS,
    facts_of,
    integer,
    sizes_of,
)
from mcore_ckpt.hf.table import Table


def _qwen2(config: HfConfig) -> ModelFacts:
    layers = (frozenset[str](),) * integer(config, "num_hidden_layers")
    return ModelFacts(sizes_of(config), frozenset(facts_of(config) | {"qkv_bias"}), layers)


def _qwen3(config: HfConfig) -> ModelFacts:
    facts = facts_of(config) | {"qk_norm"} | ({"qkv_bias"} if config.get("attention_bias") else set())
    layers = (frozenset[str](),) * integer(config, "num_hidden_layers")
    return ModelFacts(sizes_of(config), frozenset(facts), layers)


def _qwen3_moe(config: HfConfig) -> ModelFacts:
    known = _qwen3(config)
    experts = config.get("num_local_experts") or integer(config, "num_experts")
    sizes = {**known.sizes, "experts": experts, "moe_ffn": integer(config, "moe_intermediate_size")}
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    layers = tuple(
        frozenset({"moe"}) if (number + 1) % step == 0 and number not in dense else frozenset[str]()
        for number in range(len(known.layers))
    )
    return ModelFacts(sizes, known.facts, layers)


_DENSE = Table(MODEL, (*NORMS, *ATTENTION, *QK_NORMS, *DENSE_MLP))
_MOE = Table(MODEL, (*NORMS, *ATTENTION, *QK_NORMS, *DENSE_MLP, *EXPERTS), stacked=STACKED_EXPERTS)

for architecture in (
    Architecture("qwen2", ("Qwen2ForCausalLM", "Qwen2ForTokenClassification"), _DENSE, _qwen2),
    Architecture("qwen3", ("Qwen3ForCausalLM", "Qwen3ForTokenClassification"), _DENSE, _qwen3),
    Architecture("qwen3_moe", ("Qwen3MoeForCausalLM", "Qwen3MoeForTokenClassification"), _MOE, _qwen3_moe),
):
    register_architecture(architecture)
