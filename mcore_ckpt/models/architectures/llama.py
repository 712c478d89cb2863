"""Llama 2, Llama 3 and Mistral."""

from __future__ import annotations

from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import (
    ATTENTION,
    DENSE_MLP,
    MODEL,
    NORMS,
    facts_of,
    sizes_of,
    uniform_layers,
)
from mcore_ckpt.models.config_fields import HfConfig, Refused
from mcore_ckpt.models.config_rules import DENSE, SlidingWindow
from mcore_ckpt.models.rope_rules import ROPE
from mcore_ckpt.models.table import Table


def _read(config: HfConfig) -> ModelFacts:
    return ModelFacts(sizes_of(config), frozenset(facts_of(config)), uniform_layers(config))


_TABLE = Table(MODEL, (*NORMS, *ATTENTION, *DENSE_MLP))

ARCHITECTURES = (
    Architecture(
        "llama",
        ("LlamaForCausalLM", "LlamaForTokenClassification"),
        _TABLE,
        _read,
        # These fields also add biases to o_proj or to the MLP, but megatron's add_qkv_bias does not.
        (*DENSE, ROPE, Refused("attention_bias", False), Refused("mlp_bias", False)),
    ),
    Architecture(
        "mistral",
        ("MistralForCausalLM", "MistralForTokenClassification"),
        _TABLE,
        _read,
        (*DENSE, ROPE, SlidingWindow()),
    ),
)
