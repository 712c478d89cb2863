"""Reads the facts of a live model, which tell how the model computes with its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_ckpt.checkpoint.model_facts import Facts, config_facts
from mcore_ckpt.io.device_waits import wait_before_reading
from mcore_ckpt.state.model import language_model_of, unwrap

# The number of rotary frequencies to keep, evenly spaced. Eight are enough to distinguish any two kinds of scaling.
_FREQUENCIES = 8
# `RotaryEmbedding._apply_scaling` (0.16 to 0.19) divides a frequency by the whole factor if its wavelength is longer
# than this number of positions.
_LLAMA3_WAVELENGTH = 8192


def read_facts(chunks: Sequence[torch.nn.Module]) -> Facts:
    """Returns the facts of a live model: of its language model, and of each other part that has a config."""
    found: dict[str, Any] = {}
    for chunk in map(unwrap, chunks):
        whole = getattr(chunk, "thinker", chunk)  # Qwen3-Omni
        language = language_model_of(whole)
        parts = {"": language} if language is whole else {"": language, **dict(whole.named_children())}
        of_language = getattr(language, "config", None)
        for name, part in parts.items():
            config = getattr(part, "config", None)
            if config is not None and (not name or config is not of_language):
                prefix = f"{name}." if name else ""
                found |= {prefix + fact: value for fact, value in config_facts(config, _arguments(part)).items()}
    return found


def _arguments(model: Any) -> dict[str, Any]:
    """Returns the arguments that a `GPTModel`, `HybridModel` or `MambaModel` keeps, and the model's rotary facts."""
    rotary = getattr(model, "rotary_pos_emb", None)
    names = ("position_embedding_type", "rotary_base", "rotary_percent", "share_embeddings_and_output_weights")
    found = {name: getattr(model, name, None) for name in names}
    found["rope_scaling"] = getattr(model, "rotary_scaling", None)
    # MambaModel (0.16) uses the second name.
    patterns = (getattr(model, name, None) for name in ("hybrid_layer_pattern", "hybrid_override_pattern"))
    found["hybrid_layer_pattern"] = next((each for each in patterns if each), None)
    found["attn_mask_type"] = _mask_of(model)
    found["seq_len_interpolation_factor"] = getattr(rotary, "seq_len_interpolation_factor", None)
    frequencies = getattr(rotary, "inv_freq", None)
    if isinstance(frequencies, torch.Tensor) and frequencies.ndim == 1 and len(frequencies) and not frequencies.is_meta:
        wait_before_reading(frequencies)
        found |= _of_frequencies(frequencies.tolist(), found)
    return found


def _mask_of(model: Any) -> Any:
    """Returns the kind of mask of the first layer that has attention; None if this rank has no such layer."""
    layers = getattr(getattr(model, "decoder", None), "layers", ())
    masks = (getattr(getattr(layer, "self_attention", None), "attn_mask_type", None) for layer in layers)
    return next((mask for mask in masks if mask is not None), None)


def _of_frequencies(frequencies: Sequence[float], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that follow from a model's rotary frequencies.

    HybridModel does not keep the rotary base, and no model keeps the scaling factor, so both are computed here.
    """
    count = len(frequencies)
    at = {round(number * (count - 1) / (_FREQUENCIES - 1)) for number in range(_FREQUENCIES)}
    found: dict[str, Any] = {"rotary_frequencies": [_rounded(frequencies[index]) for index in sorted(at)]}
    base = known["rotary_base"]
    if base is None and count > 1 and frequencies[1] > 0:
        base = found["rotary_base"] = float(f"{frequencies[1] ** -count:.5g}")
    if known["rope_scaling"] and isinstance(base, (int, float)) and frequencies[-1] > 0:
        unscaled = base ** -((count - 1) / count)
        if 2 * math.pi / unscaled > _LLAMA3_WAVELENGTH:
            found["rope_scaling_factor"] = float(f"{unscaled / frequencies[-1]:.5g}")
    return found


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")
