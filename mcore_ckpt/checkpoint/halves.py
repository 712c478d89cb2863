"""Splits float32 values into upper and lower halves, and joins them, as FusedAdam's `store_param_remainders` does.

The upper half is a bfloat16, rounded half up. The lower half is a signed int16. The bits of a value are
`(upper << 16) + lower`, as in the kernel of transformer-engine's FusedAdam.
"""

from __future__ import annotations

import torch

_UPPER_BITS = 16


def split_halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the upper halves (bfloat16) and the lower halves (int16) of flat, contiguous float32 values."""
    bits = values.view(torch.int32)
    lower = bits.view(torch.int16)[::2]  # the lower half is first in each little-endian pair
    upper = (bits - lower.to(torch.int32)) >> _UPPER_BITS
    return upper.to(torch.int16).view(torch.bfloat16), lower


def join_halves(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values of upper halves (bfloat16) and lower halves (int16) of the same shape."""
    bits = (upper.view(torch.int16).to(torch.int32) << _UPPER_BITS) + lower.to(torch.int32)
    return bits.view(torch.float32)
