"""MiniMax-M2, M2.5 and M2.7: Mixtral's layers with norms of queries and keys, and with sigmoid router scores.

One norm covers the queries of all heads together, and another norm covers the keys of all heads together. megatron-core
up to 0.19 has only norms of each head's queries and keys. So the `GPTModel` must be built with Megatron-Bridge's layer
spec (`minimax_m2_layer_spec`). The norms of this spec cover all heads, and tensor parallelism cuts them in the same way
as the heads. With megatron's own specs, a load is refused, because the shapes differ.
"""

from __future__ import annotations

from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture
from mcore_ckpt.models.architectures.common import ATTENTION, MODEL, NORMS, read_mixture
from mcore_ckpt.models.architectures.mixtral import BLOCK_SPARSE_EXPERTS, BLOCK_SPARSE_STACKED
from mcore_ckpt.models.config_fields import Constant, HfConfig, HfFields, McoreValues, Refused, Rule, Same, needed
from mcore_ckpt.models.config_rules import DENSE, EXPERT_COUNT, NormalizedTopk
from mcore_ckpt.models.rope_rules import Rope
from mcore_ckpt.models.table import Row, Table

# transformers' default for theta (MiniMaxM2Config).
_THETA = 5e6


class RotaryDim:
    """The rule for rotary embeddings whose config has `rotary_dim`, the number of rotated elements of a head."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        values, size = self._rope(hf).to_mcore(hf), hf.get("rotary_dim")
        rotated = values["gpt.rotary_percent"] * needed(hf, "head_dim")
        if size is not None and rotated != size:
            raise UnsupportedError(
                f"config.json: rotary_dim is {size}, but partial_rotary_factor says that {rotated:g} elements of each "
                "head are rotated: correct one of the two fields"
            )
        return values

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        rotated = round(mcore["gpt.rotary_percent"] * mcore["kv_channels"])
        return Rope(_THETA).to_hf(mcore, base) | {"rotary_dim": rotated}

    def spelling(self, hf: HfConfig) -> HfFields:
        """Returns the config's rotary fields in the spellings of transformers 4 and 5."""
        return self._rope(hf).spelling(hf)

    def _rope(self, hf: HfConfig) -> Rope:
        size = hf.get("rotary_dim")
        return Rope(_THETA, 1.0 if size is None else size / needed(hf, "head_dim"))


class FullAttention(Rule):
    """The rule for each layer's kind of attention, which must be 1 (full).

    Older models of MiniMax also have layers of kind 0 (lightning attention).
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        kinds = hf.get("attn_type_list") or []
        if any(kind != 1 for kind in kinds):
            raise UnsupportedError(
                f"config.json: attn_type_list is {kinds}: only 1 (full attention) can be converted, because "
                "megatron-core up to 0.19 has no lightning attention"
            )
        return {}


_NORMS_OF_ALL_HEADS = (
    Row("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "heads*head_dim"}),
    Row("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "groups*head_dim"}),
)
_BIAS = "mlp.router.expert_bias"

ARCHITECTURES = (
    Architecture(
        "minimax_m2",
        ("MiniMaxM2ForCausalLM",),
        Table(
            MODEL,
            (
                *NORMS,
                *ATTENTION,
                *_NORMS_OF_ALL_HEADS,
                *BLOCK_SPARSE_EXPERTS,
                Row(_BIAS, {"block_sparse_moe.e_score_correction_bias": "experts"}),
            ),
            stacked=(*BLOCK_SPARSE_STACKED, Row(_BIAS, {"mlp.e_score_correction_bias": "experts"})),
        ),
        read_mixture,
        (
            *DENSE,
            RotaryDim(),
            FullAttention(),
            *EXPERT_COUNT,
            Same("moe_ffn_hidden_size", "intermediate_size"),
            NormalizedTopk(always=True),
            Constant("moe_router_score_function", "sigmoid"),
            Constant("moe_router_enable_expert_bias", True),
            *(Constant(f"moe_router_{name}", None) for name in ("topk_scaling_factor", "num_groups", "group_topk")),
            Constant("qk_layernorm", True),
            # The configs also state modules for multi-token prediction. No published folder has such modules, so no
            # rule reads these fields.
            *(
                Refused(name, allowed)
                for name, allowed in (
                    ("scoring_func", "sigmoid"),
                    ("use_routing_bias", True),
                    ("use_qk_norm", True),
                    ("qk_norm_type", "per_layer"),
                    ("shared_intermediate_size", 0),
                    ("router_jitter_noise", 0.0),
                    ("sliding_window", None),
                )
            ),
        ),
    ),
)
