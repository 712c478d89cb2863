"""Lists the format's dtypes by name, without torch.

Commands that read no tensor must not wait for the import of torch.
"""

from __future__ import annotations

# The dtypes of the format, by torch's names, with the bytes of one element.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


def item_bytes(name: str) -> int:
    """Returns the bytes of one element of the dtype with this name. Raises ValueError if the name is unknown."""
    if name not in ITEM_BYTES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[name]
