"""The language models of Qwen3.5 and Qwen3.6: Qwen3-Next's layers with separate projections in linear attention.

Vision-language models describe such a language model in `text_config`. In these models, the names of the language
model's tensors begin with `model.language_model.`, but the tensors of multi-token prediction have the same names as
here. The tables of vision-language models use the rows, facts and rules of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import (
    DENSE_MLP,
    EXPERTS,
    MODEL,
    NORMS,
    STACKED_EXPERTS,
    facts_of,
    first_integer,
    integer,
    shared_experts,
    sizes_of,
)
from mcore_ckpt.models.architectures.qwen3_next import (
    GATED_ATTENTION,
    GATED_DELTA_NET,
    IN_PROJ_SECTIONS,
    LINEAR_ATTENTION,
    MTP,
    linear_sizes,
    mixed_layers,
)
from mcore_ckpt.models.config_fields import Constant, HfConfig, Refused, Rule, Same
from mcore_ckpt.models.config_rules import DENSE, EXPERT_COUNT, SPARSE, Mtp, NormalizedTopk, is_linear
from mcore_ckpt.models.rope_rules import Rope
from mcore_ckpt.models.table import Row, Table

_MTP_FIELD = "mtp_num_hidden_layers"


def read_dense(config: HfConfig) -> ModelFacts:
    """Reads the facts about a dense language model."""
    linear = is_linear(config)
    layers = mixed_layers(linear, [False] * len(linear))
    return ModelFacts(
        sizes_of(config) | linear_sizes(config), frozenset(facts_of(config)), layers, _mtp_layers(config, layers)
    )


def read_moe(config: HfConfig) -> ModelFacts:
    """Reads the facts about a mixture of experts."""
    linear = is_linear(config)
    layers = mixed_layers(linear, [True] * len(linear))
    sizes = sizes_of(config, ffn=False) | linear_sizes(config)
    sizes["experts"] = first_integer(config, "num_experts", "num_local_experts")
    sizes["moe_ffn"] = integer(config, "moe_intermediate_size")
    sizes["shared_ffn"] = integer(config, "shared_expert_intermediate_size")
    facts = facts_of(config) | {"shared", "shared_gate"}
    return ModelFacts(sizes, frozenset(facts), layers, _mtp_layers(config, layers))


def _mtp_layers(config: HfConfig, layers: Sequence[frozenset[str]]) -> tuple[frozenset[str], ...]:
    number = config.get(_MTP_FIELD) or 0
    if number > 1:
        raise UnsupportedError(
            f"config.json: {_MTP_FIELD} is {number}, but only 1 can be converted: in megatron-core 0.16.1, each layer "
            "of multi-token prediction has a separate fc and separate norms (MultiTokenPredictionLayer), but in "
            "Qwen's models all layers share these"
        )
    # Qwen's layer of multi-token prediction has full attention, but megatron builds this layer with the spec of the
    # decoder's last layer (get_gpt_mtp_block_spec, 0.16.1).
    if number and "linear" in layers[-1]:
        raise UnsupportedError(
            f"config.json: {_MTP_FIELD} is {number}, and the last layer has linear attention: in this case "
            "megatron-core 0.16.1 (get_gpt_mtp_block_spec) uses linear attention in multi-token prediction, too, but "
            f"Qwen uses full attention there: set {_MTP_FIELD} to 0 and leave the tensors out (ignore mtp\\..*)"
        )
    return (frozenset(layers[-1]),) * number


_LAYER = (
    *NORMS,
    Row(
        "self_attention.in_proj.weight",
        {
            "linear_attn.in_proj_qkv.weight": "convolved hidden",
            "linear_attn.in_proj_z.weight": "values hidden",
            "linear_attn.in_proj_b.weight": "value_heads hidden",
            "linear_attn.in_proj_a.weight": "value_heads hidden",
        },
        when="linear",
        sections=IN_PROJ_SECTIONS,
    ),
    *LINEAR_ATTENTION,
    *GATED_ATTENTION,
)
# transformers writes these names if it has loaded only the language model of a vision-language model
# (conversion_mapping.py, 5.23).
_SPELLINGS = (("model.language_model.", "model."),)
DENSE_TABLE = Table(
    MODEL, (*_LAYER, *DENSE_MLP), MTP, hf_mtp_layer="mtp.", hf_mtp_decoder="layers.{mtp}.", spellings=_SPELLINGS
)
MOE_TABLE = replace(DENSE_TABLE, layer=(*_LAYER, *EXPERTS, *shared_experts("shared_expert")), stacked=STACKED_EXPERTS)

_RULES: tuple[Rule, ...] = (
    # In text, the three coordinates of a position are equal, so mrope_section has no effect on the rotary embeddings.
    Rope(default_partial=0.25),
    *GATED_DELTA_NET,
    Refused("attn_output_gate", True),
    Refused("output_gate_type", "swish"),
    Refused("mtp_use_dedicated_embeddings", False),
    Mtp(_MTP_FIELD),
)
DENSE_RULES: tuple[Rule, ...] = (*DENSE, *_RULES)
MOE_RULES: tuple[Rule, ...] = (
    *SPARSE,
    *_RULES,
    *EXPERT_COUNT,
    NormalizedTopk(always=True),
    Same("moe_ffn_hidden_size", "moe_intermediate_size"),
    Constant("moe_layer_freq", 1),
    Refused("decoder_sparse_step", 1),
    Refused("mlp_only_layers", []),
    Same("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    Constant("moe_shared_expert_gate", True),
)

ARCHITECTURES = (
    Architecture("qwen3_5_text", ("Qwen3_5ForCausalLM",), DENSE_TABLE, read_dense, DENSE_RULES),
    Architecture("qwen3_5_moe_text", ("Qwen3_5MoeForCausalLM",), MOE_TABLE, read_moe, MOE_RULES),
)
