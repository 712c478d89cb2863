"""Gemma 3, which is refused by name because megatron-core 0.16.1 has no modules for it."""

from __future__ import annotations

from typing import NoReturn

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.table import Table


def _refuse(config: HfConfig) -> NoReturn:
    raise UnsupportedError(
        f"config.json: {config.get('model_type')} cannot be converted: megatron-core 0.16.1's TransformerLayer has no "
        "norms after attention and MLP (post_attention_layernorm, post_feedforward_layernorm), and its GPTModel "
        "neither scales embeddings by the square root of hidden_size nor has a rope base of its own for "
        "sliding-window layers (rope_local_base_freq)"
    )


ARCHITECTURES = tuple(
    Architecture(model_type, (name,), Table((), ()), _refuse)
    for model_type, name in (("gemma3_text", "Gemma3ForCausalLM"), ("gemma3", "Gemma3ForConditionalGeneration"))
)
