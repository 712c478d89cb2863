"""DeepSeek-V2 and V2-Lite: DeepSeek-V3's layers with experts that are chosen by a softmax, without a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import (
    DENSE_MLP,
    EXPERTS,
    MODEL,
    NORMS,
    STACKED_EXPERTS,
    shared_experts,
)
from mcore_ckpt.models.architectures.deepseek import LATENT_ROWS, read_deepseek
from mcore_ckpt.models.config_fields import (
    HfConfig,
    HfFields,
    McoreValues,
    Refused,
    Same,
    factor_or_none,
    needed,
)
from mcore_ckpt.models.config_rules import LATENT_ATTENTION, DenseFirst, SharedExperts
from mcore_ckpt.models.table import Table


def _read(config: HfConfig) -> ModelFacts:
    known = read_deepseek(config)
    return replace(known, facts=known.facts - {"expert_bias"})


class SoftmaxOfGroups:
    """The rule for the way in which DeepSeek-V2's router chooses experts, `topk_method`.

    "greedy" chooses the best of all experts. "group_limited_greedy" first chooses groups, by the best expert of each
    group, and then the best experts of these groups. The weights are the softmax of all experts.
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        # transformers leaves the weights as they are, whatever norm_topk_prob says (DeepseekV2TopkRouter, 5.23).
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
                f"{chosen}, which no megatron-core up to 0.19 has a counterpart for: it ranks groups by their "
                f"{topk // chosen} best experts (group_limited_topk), but DeepSeek-V2 by their best one. Only models "
                "that choose experts from all groups can be converted, such as DeepSeek-V2-Lite"
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


ARCHITECTURES = (
    Architecture(
        "deepseek_v2",
        ("DeepseekV2ForCausalLM",),
        Table(
            MODEL,
            (*NORMS, *LATENT_ROWS, *DENSE_MLP, *EXPERTS, *shared_experts("shared_experts")),
            stacked=STACKED_EXPERTS,
        ),
        _read,
        (
            *LATENT_ATTENTION,
            Same("num_moe_experts", "n_routed_experts"),
            Same("moe_router_topk", "num_experts_per_tok"),
            Same("moe_ffn_hidden_size", "moe_intermediate_size"),
            SoftmaxOfGroups(),
            DenseFirst(),
            SharedExperts(),
            Refused("attention_bias", False),
            Refused("mlp_bias", False),
        ),
    ),
)
