"""Llama 2 and 3, Mistral."""

from __future__ import annotations

from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import ATTENTION, DENSE_MLP, MODEL, NORMS, alike, facts_of, sizes_of
from mcore_ckpt.models.config_fields import HfConfig, Refused
from mcore_ckpt.models.config_rules import DENSE, Window
from mcore_ckpt.models.rope_rules import ROPE
from mcore_ckpt.models.table import Table


def _read(config: HfConfig) -> ModelFacts:
    return ModelFacts(sizes_of(config), frozenset(facts_of(config)), alike(config))


_TABLE = Table(MODEL, (*NORMS, *ATTENTION, *DENSE_MLP))

ARCHITECTURES = (
    Architecture(
        "llama",
        ("LlamaForCausalLM", "LlamaForTokenClassification"),
        _TABLE,
        _read,
        # attention_bias and mlp_bias are those of all linear layers, the ones behind attention and MLP too.
        (*DENSE, ROPE, Refused("attention_bias", False), Refused("mlp_bias", False)),
    ),
    Architecture(
        "mistral",
        ("MistralForCausalLM", "MistralForTokenClassification"),
        _TABLE,
        _read,
        (*DENSE, ROPE, Window()),
    ),
)
