"""Seed-OSS: Llama with biases in the projections of queries, keys and values."""

from __future__ import annotations

from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import ATTENTION, DENSE_MLP, MODEL, NORMS, read_uniform
from mcore_ckpt.models.config_fields import HfConfig, Refused, Same
from mcore_ckpt.models.config_rules import DENSE
from mcore_ckpt.models.rope_rules import ROPE
from mcore_ckpt.models.table import Table


def _read(config: HfConfig) -> ModelFacts:
    return read_uniform(config, *(["qkv_bias"] if config.get("attention_bias", True) else []))


ARCHITECTURES = (
    Architecture(
        "seed_oss",
        ("SeedOssForCausalLM", "SeedOssForTokenClassification"),
        Table(MODEL, (*NORMS, *ATTENTION, *DENSE_MLP)),
        _read,
        (
            *DENSE,
            ROPE,
            # In SeedOssAttention, `attention_out_bias` controls the bias of o_proj. megatron's add_qkv_bias adds no
            # bias to o_proj, so `attention_out_bias` must be False.
            Same("add_qkv_bias", "attention_bias", default=True),
            Refused("attention_out_bias", False),
            Refused("mlp_bias", False),
            Same("attention_dropout", "attention_dropout", default=0.1),
            Same("hidden_dropout", "residual_dropout", default=0.1),
        ),
    ),
)
