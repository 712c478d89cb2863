"""DeepSeek-V3 and R1, Moonlight and Kimi-K2.

They have latent attention, and their routers choose experts by sigmoid scores with a bias.
"""

from __future__ import annotations

from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import (
    DENSE_MLP,
    EXPERTS,
    MODEL,
    MTP,
    NORMS,
    STACKED_EXPERTS,
    facts_of,
    first_integer,
    integer,
    moe_layers,
    shared_experts,
    sizes_of,
)
from mcore_ckpt.models.config_fields import HfConfig, Refused
from mcore_ckpt.models.config_rules import LATENT_ATTENTION, SIGMOID_ROUTER
from mcore_ckpt.models.table import Row, Table


def read_deepseek_experts(config: HfConfig) -> ModelFacts:
    """Reads all facts about a DeepSeek model except those of its latent attention."""
    number, dense = integer(config, "num_hidden_layers"), config.get("first_k_dense_replace") or 0
    layers = moe_layers([layer >= dense for layer in range(number)])
    sizes = sizes_of(config)
    sizes["experts"] = first_integer(config, "n_routed_experts", "num_local_experts", "num_experts")
    sizes["moe_ffn"] = integer(config, "moe_intermediate_size")
    facts = facts_of(config) | {"expert_bias"}
    if config.get("n_shared_experts"):
        facts.add("shared")
        sizes["shared_ffn"] = integer(config, "n_shared_experts") * sizes["moe_ffn"]
    # mcore gives multi-token-prediction layers the spec of the last decoder layer (get_gpt_mtp_block_spec, 0.16.1).
    mtp_layers = (layers[-1],) * (config.get("num_nextn_predict_layers") or 0)
    return ModelFacts(sizes, frozenset(facts), layers, mtp_layers)


def read_deepseek(config: HfConfig) -> ModelFacts:
    """Reads all facts about a DeepSeek model."""
    known = read_deepseek_experts(config)
    sizes = {name: size for name, size in known.sizes.items() if name not in ("head_dim", "groups")}
    sizes["nope"], sizes["rope"] = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    sizes |= {"kv_rank": integer(config, "kv_lora_rank"), "value_dim": integer(config, "v_head_dim")}
    sizes |= {"query_dim": sizes["nope"] + sizes["rope"], "kv_down": sizes["kv_rank"] + sizes["rope"]}
    sizes["kv_dim"] = sizes["nope"] + sizes["value_dim"]
    facts = set(known.facts)
    if config.get("q_lora_rank") is not None:
        facts.add("q_lora")
        sizes["q_rank"] = integer(config, "q_lora_rank")
    return ModelFacts(sizes, frozenset(facts), known.layers, known.mtp_layers)


LATENT_ROWS = (
    Row("self_attention.linear_q_proj.weight", {"self_attn.q_proj.weight": "heads*query_dim hidden"}, when="!q_lora"),
    Row("self_attention.linear_q_down_proj.weight", {"self_attn.q_a_proj.weight": "q_rank hidden"}, when="q_lora"),
    Row("self_attention.q_layernorm.weight", {"self_attn.q_a_layernorm.weight": "q_rank"}, when="q_lora"),
    Row(
        "self_attention.linear_q_up_proj.weight", {"self_attn.q_b_proj.weight": "heads*query_dim q_rank"}, when="q_lora"
    ),
    Row("self_attention.linear_kv_down_proj.weight", {"self_attn.kv_a_proj_with_mqa.weight": "kv_down hidden"}),
    Row("self_attention.kv_layernorm.weight", {"self_attn.kv_a_layernorm.weight": "kv_rank"}),
    Row("self_attention.linear_kv_up_proj.weight", {"self_attn.kv_b_proj.weight": "heads*kv_dim kv_rank"}),
    Row("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "hidden heads*value_dim"}),
)
DEEPSEEK_TABLE = Table(
    MODEL,
    (*NORMS, *LATENT_ROWS, *DENSE_MLP, *EXPERTS, *shared_experts("shared_experts")),
    mtp=MTP,
    stacked=STACKED_EXPERTS,
)
_CLASSES = ("DeepseekV3ForCausalLM", "DeepseekV3ForTokenClassification")
DEEPSEEK_RULES = (*LATENT_ATTENTION, *SIGMOID_ROUTER, Refused("attention_bias", False))

# Kimi-K2 has the architecture of DeepSeek-V3 under another model_type.
ARCHITECTURES = tuple(
    Architecture(model_type, _CLASSES, DEEPSEEK_TABLE, read_deepseek, DEEPSEEK_RULES)
    for model_type in ("deepseek_v3", "kimi_k2")
)
