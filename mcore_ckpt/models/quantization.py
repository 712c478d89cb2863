"""Reads from a `config.json` in which form the weights are published: plain, or quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.config_fields import HfConfig

_FIELD = "quantization_config"
_FIELDS = (_FIELD, "compression_config")  # early versions of llm-compressor wrote the second field
_METHODS = ("fp8", "mxfp4", "compressed-tensors")
# Models with a vision tower have the configuration of their language model in one of these fields.
_NESTED = ("text_config", "llm_config")


@dataclass(frozen=True)
class Quantization:
    """The form of quantized weights.

    Attributes:
        method: `quant_method` of the config: "fp8", "mxfp4" or "compressed-tensors".
        fields: all fields of `quantization_config`.
    """

    method: str
    fields: Mapping[str, Any]


def quantization_of(config: HfConfig) -> Quantization | None:
    """Returns the form in which the weights are quantized, or None if they are plain.

    Raises UnsupportedError for a form that cannot be read.
    """
    for part in (config, *(config.get(name) for name in _NESTED)):
        fields = next(filter(None, map(part.get, _FIELDS)), None) if isinstance(part, Mapping) else None
        if fields:
            method = fields.get("quant_method") if isinstance(fields, Mapping) else fields
            if method not in _METHODS or not isinstance(fields, Mapping):
                raise UnsupportedError(
                    f"config.json: {_FIELD} is {method!r}, but only weights that are plain or quantized as "
                    f"{', '.join(_METHODS)} can be read: dequantize the model first with transformers "
                    "(from_pretrained, then save_pretrained)"
                )
            return Quantization(method, fields)
    return None


def without_quantization(config: HfConfig) -> dict[str, Any]:
    """Returns the config of the same model with plain weights, in which no section has quantization fields."""
    return {
        name: without_quantization(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _FIELDS
    }


def stated_dtype(config: HfConfig) -> torch.dtype:
    """Returns the dtype that a config states for the model: bfloat16, float16 or float32. The default is bfloat16."""
    for part in (config, *(config.get(name) for name in _NESTED)):
        name = (part.get("dtype") or part.get("torch_dtype")) if isinstance(part, Mapping) else None
        dtype = getattr(torch, str(name), None)
        if dtype in (torch.bfloat16, torch.float16, torch.float32):
            return dtype
    return torch.bfloat16
