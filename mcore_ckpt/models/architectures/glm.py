"""GLM-4.5 and its successors with the same model_type, which combine Qwen's attention with DeepSeek's experts."""

from __future__ import annotations

from dataclasses import replace

from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import ATTENTION, NORMS, QK_NORMS
from mcore_ckpt.models.architectures.deepseek import DEEPSEEK_MLP, DEEPSEEK_TABLE, read_deepseek_experts
from mcore_ckpt.models.config_fields import HfConfig, Same
from mcore_ckpt.models.config_rules import DENSE, SIGMOID_ROUTER
from mcore_ckpt.models.rope_rules import Rope


def _read(config: HfConfig) -> ModelFacts:
    known = read_deepseek_experts(config)
    facts = {fact for fact, field in (("qkv_bias", "attention_bias"), ("qk_norm", "use_qk_norm")) if config.get(field)}
    return replace(known, facts=known.facts | facts)


ARCHITECTURES = (
    Architecture(
        "glm4_moe",
        ("Glm4MoeForCausalLM",),
        replace(DEEPSEEK_TABLE, layer=(*NORMS, *ATTENTION, *QK_NORMS, *DEEPSEEK_MLP)),
        _read,
        (
            *DENSE,
            Rope(default_partial=0.5),
            *SIGMOID_ROUTER,
            # In Glm4MoeAttention, attention_bias adds a bias only to the projections of queries, keys and values.
            Same("add_qkv_bias", "attention_bias", default=False),
            Same("qk_layernorm", "use_qk_norm", default=False),
        ),
    ),
)
