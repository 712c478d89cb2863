"""Models that are refused by name, because no released megatron-core has modules for them (0.16.1 to 0.19.2)."""

from __future__ import annotations

from typing import NoReturn

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.table import Table

_NORMS = (
    "its TransformerLayer has no norms after attention and MLP (post_attention_layernorm, post_feedforward_layernorm)"
)
_ROPES = "its GPTModel has no separate rope base for sliding-window layers (rope_local_base_freq)"
_VARIANTS = "its experimental_attention_variant can only be gated_delta_net or dsa"

_REASONS = {
    "gemma2": _NORMS,
    "gemma3": f"{_NORMS}, and {_ROPES}",
    "gemma3_text": f"{_NORMS}, and {_ROPES}",
    "gemma3n": f"{_NORMS}, and {_ROPES}",
    "gemma3n_text": f"{_NORMS}, and {_ROPES}",
    "gemma4": _NORMS,
    "gemma4_text": _NORMS,
    "deepseek_v4": f"{_VARIANTS}, not attention to compressed tokens (compress_rates), and its TransformerLayer has no "
    "hyper-connections (hc_mult)",
    "minimax": f"{_VARIANTS}, not the lightning attention of this model",
}


def _refuse(config: HfConfig) -> NoReturn:
    model_type = str(config.get("model_type"))
    raise UnsupportedError(
        f"config.json: {model_type} cannot be converted to megatron-core 0.19.2 or older: {_REASONS[model_type]}"
    )


ARCHITECTURES = tuple(Architecture(model_type, (), Table((), ()), _refuse) for model_type in _REASONS)
