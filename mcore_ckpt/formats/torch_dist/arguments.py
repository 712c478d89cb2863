"""Reads the arguments that Megatron-LM stores in its checkpoints, and derives facts about the model from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.checkpoint.model_facts import Facts, config_facts

# Megatron-LM's arguments (`core_transformer_config_from_args`, 0.15 to 0.19) that set a field of another name.
_ARGUMENTS = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}
# Megatron-LM stores all of these arguments. If one of them is missing, another program wrote the checkpoint. Then a
# missing argument says nothing about the model, so no facts are derived.
_OF_MEGATRON_LM = {"norm_epsilon", "swiglu", "squared_relu", "position_embedding_type", "group_query_attention"}


def arguments_in(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments in the state that all ranks share; empty if another program has stored that state."""
    found: Mapping[str, Any] = getattr(common.get("args"), "__dict__", {})
    return found


def facts_of_arguments(arguments: Mapping[str, Any]) -> Facts:
    """Returns the facts that Megatron-LM's arguments state; empty if another program has stored the arguments."""
    if not arguments.keys() >= _OF_MEGATRON_LM:
        return {}
    fields = {_ARGUMENTS.get(name, name): value for name, value in arguments.items()}
    fields |= {"activation_func": "gelu", "gated_linear_unit": False}
    if arguments["swiglu"]:
        fields |= {"activation_func": "silu", "gated_linear_unit": True}
    if arguments["squared_relu"]:
        fields |= {"activation_func": "squared_relu"}
    elif arguments.get("quick_geglu"):
        fields |= {"activation_func": "quick_gelu", "gated_linear_unit": True}
    if not arguments["group_query_attention"]:
        fields["num_query_groups"] = None
    return config_facts(fields, {})
