"""Translates between dtypes and the names that the checkpoint format uses for them."""

from __future__ import annotations

import torch

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that the format uses for a dtype. Raises ValueError if the format has no name for it."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype {dtype} cannot be stored: use one of {', '.join(_DTYPES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype with this name. Raises ValueError if the name is unknown."""
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def item_bytes(name: str) -> int:
    """Returns the bytes of one element of the dtype with this name. Raises ValueError if the name is unknown."""
    return torch_dtype(name).itemsize
