"""Recognizes parameters that transformer-engine keeps in 8 or 4 bits (FP8, MXFP8, NVFP4)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Classes are recognized by name, because importing them needs transformer-engine.
_CLASSES = frozenset({"QuantizedTensor", "Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor"})
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def is_quantized(parameter: torch.Tensor) -> bool:
    """Returns True if a parameter's memory has quantized values.

    The bytes of such values mean nothing without the scales, and quantizing loses precision. So a checkpoint has values
    that were rounded from the main parameters, and a load fills the main parameters.
    """
    # Look at the parameter and at its `data`. A Parameter that is made from a subclass of Tensor has that class. If
    # only `data` has been set to a tensor of the subclass, only `data` has that class.
    classes = {type(parameter), type(parameter.data)} - _PLAIN
    return any(base.__name__ in _CLASSES for cls in classes for base in cls.__mro__)


def has_quantized(modules: Iterable[torch.nn.Module]) -> bool:
    """Returns True if a module has a parameter that is quantized."""
    return any(is_quantized(parameter) for module in modules for parameter in module.parameters())
