"""DeepSeek-V2, V3 and R1, Moonlight and Kimi-K2.

These models have latent attention. The routers choose experts by sigmoid scores with a bias, but the router of V2 uses
a softmax without a bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_ckpt.errors import UnsupportedError
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
from mcore_ckpt.models.config_fields import HfConfig, HfFields, McoreValues, Refused, Same, factor_or_none, needed
from mcore_ckpt.models.config_rules import LATENT_ATTENTION, SIGMOID_ROUTER, DenseFirst, SharedExperts
from mcore_ckpt.models.table import Row, Table


def read_deepseek_experts(config: HfConfig) -> ModelFacts:
    """Reads all facts about a DeepSeek model except the facts about latent attention."""
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


def _read_2(config: HfConfig) -> ModelFacts:
    known = read_deepseek(config)
    return replace(known, facts=known.facts - {"expert_bias"})


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
DEEPSEEK_MLP = (*DENSE_MLP, *EXPERTS, *shared_experts("shared_experts"))
DEEPSEEK_TABLE = Table(MODEL, (*NORMS, *LATENT_ROWS, *DEEPSEEK_MLP), mtp=MTP, stacked=STACKED_EXPERTS)


class SoftmaxOfGroups:
    """The rule for the way in which DeepSeek-V2's router chooses experts, `topk_method`.

    "greedy" chooses the best of all experts. "group_limited_greedy" first chooses groups, by the best expert of each
    group, and then the best experts of these groups. The weights are the softmax over the scores of all experts.
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        # transformers ignores norm_topk_prob and does not normalize the weights (DeepseekV2TopkRouter, 5.23).
        for rule in (
            Refused("scoring_func", "softmax"),
            Refused("norm_topk_prob", False),
            Refused("moe_layer_freq", 1),
        ):
            rule.to_mcore(hf)
        groups, chosen = self._groups(hf)
        return {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
            "moe_router_enable_expert_bias": False,
            "moe_router_topk_scaling_factor": factor_or_none(hf.get("routed_scaling_factor")),
            "moe_router_num_groups": groups,
            "moe_router_group_topk": chosen,
        }

    def _groups(self, hf: HfConfig) -> tuple[int | None, int | None]:
        method = hf.get("topk_method") or "greedy"
        if method == "greedy":
            return None, None
        if method != "group_limited_greedy":
            raise UnsupportedError(
                f"config.json: topk_method is {method!r}: only 'greedy' and 'group_limited_greedy' can be converted"
            )
        groups, chosen, topk = needed(hf, "n_group"), needed(hf, "topk_group"), needed(hf, "num_experts_per_tok")
        if chosen >= groups:
            return None, None
        if topk // chosen != 1:
            raise UnsupportedError(
                f"config.json: topk_method is 'group_limited_greedy' with num_experts_per_tok {topk} and topk_group "
                f"{chosen}, but megatron-core up to 0.19 has no counterpart for this: megatron ranks groups by their "
                f"{topk // chosen} best experts (group_limited_topk), and DeepSeek-V2 by their single best expert. "
                "Only models that choose experts from all groups can be converted, such as DeepSeek-V2-Lite"
            )
        return groups, chosen

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        groups, scaling = mcore["moe_router_num_groups"], mcore["moe_router_topk_scaling_factor"]
        return {
            "topk_method": "greedy" if groups is None else "group_limited_greedy",
            "n_group": groups,
            "topk_group": mcore["moe_router_group_topk"],
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0 if scaling is None else scaling,
        }


_CLASSES = ("DeepseekV3ForCausalLM", "DeepseekV3ForTokenClassification")
DEEPSEEK_RULES = (*LATENT_ATTENTION, *SIGMOID_ROUTER, Refused("attention_bias", False))

_RULES_2 = (
    *LATENT_ATTENTION,
    Same("num_moe_experts", "n_routed_experts"),
    Same("moe_router_topk", "num_experts_per_tok"),
    Same("moe_ffn_hidden_size", "moe_intermediate_size"),
    SoftmaxOfGroups(),
    DenseFirst(),
    SharedExperts(),
    Refused("attention_bias", False),
    Refused("mlp_bias", False),
)

ARCHITECTURES = (
    Architecture("deepseek_v2", ("DeepseekV2ForCausalLM",), replace(DEEPSEEK_TABLE, mtp=()), _read_2, _RULES_2),
    # Kimi-K2 has the architecture of DeepSeek-V3 under another model_type.
    *(
        Architecture(model_type, _CLASSES, DEEPSEEK_TABLE, read_deepseek, DEEPSEEK_RULES)
        for model_type in ("deepseek_v3", "kimi_k2")
    ),
)
