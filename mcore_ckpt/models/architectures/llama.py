"""Llama 2, Llama 3 and Mistral."""

from __future__ import annotations

from mcore_ckpt.models.architecture import Architecture
from mcore_ckpt.models.architectures.common import ATTENTION, DENSE_MLP, MODEL, NORMS, read_uniform
from mcore_ckpt.models.config_fields import Refused
from mcore_ckpt.models.config_rules import DENSE, SlidingWindow
from mcore_ckpt.models.rope_rules import ROPE
from mcore_ckpt.models.table import Table

_TABLE = Table(MODEL, (*NORMS, *ATTENTION, *DENSE_MLP))

ARCHITECTURES = (
    Architecture(
        "llama",
        ("LlamaForCausalLM", "LlamaForTokenClassification"),
        _TABLE,
        read_uniform,
        # In HuggingFace, these fields also add biases to o_proj or to the MLP, which megatron's add_qkv_bias does not
        # add. So both fields must be False.
        (*DENSE, ROPE, Refused("attention_bias", False), Refused("mlp_bias", False)),
    ),
    Architecture(
        "mistral",
        ("MistralForCausalLM", "MistralForTokenClassification"),
        _TABLE,
        read_uniform,
        (*DENSE, ROPE, SlidingWindow()),
    ),
)
