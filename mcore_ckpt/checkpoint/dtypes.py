"""Translates between torch's dtypes and the names that the checkpoint format uses for them."""

from __future__ import annotations

import torch

from mcore_ckpt.checkpoint.element_sizes import ITEM_BYTES, item_bytes

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that the format uses for a dtype. Raises ValueError if the format has no name for it."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype {dtype} cannot be stored: use one of {', '.join(_DTYPES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype with this name. Raises ValueError if the name is unknown."""
    item_bytes(name)  # raises
    return _DTYPES[name]
