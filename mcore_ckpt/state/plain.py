"""Converts the small state of optimizers, schedulers and generators to plain values.

`torch.load(weights_only=True)` opens them, and each version of this package reads them. What a trainer hands over keeps
its types instead (typed_values.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from mcore_ckpt.errors import UnsupportedError

# Types of values without parts, which torch's safe unpickler makes.
ATOMS = (type(None), bool, int, float, complex, str, bytes)


def to_plain(value: Any, field: str) -> Any:
    """Returns a copy of `value` that consists of dicts, lists, tuples, sets, numbers, strings, bytes and CPU tensors.

    Tensors are cloned, so later changes do not affect the copy. NumPy scalars become Python scalars, mappings dicts,
    and generators their state.

    Args:
        value: the value to copy.
        field: the name of the value, for error messages.

    Raises:
        UnsupportedError: the value contains an object of another kind. The message names the field.

    Example:
        >>> to_plain({"betas": (0.9, 0.95)}, "param_groups")
        {'betas': (0.9, 0.95)}
    """
    if type(value) in ATOMS and value != b"":  # torch's safe unpickler cannot create empty bytes
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, torch.Generator):
        return value.get_state().clone()
    if isinstance(value, Mapping):
        return {_key(key, field): to_plain(item, f"{field}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(to_plain(item, f"{field}[{i}]") for i, item in enumerate(value))
    return _from_numpy(value, field)


def _key(key: Any, field: str) -> Any:
    if type(key) in ATOMS or (type(key) is tuple and all(type(part) in ATOMS for part in key)):
        return key
    return to_plain(key, f"a key of {field}")


def _from_numpy(value: Any, field: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        item = value.item()
        if type(item) in ATOMS:
            return to_plain(item, field)
    raise refuse_type(value, field)


def refuse_type(
    value: Any, field: str, use: str = "numbers, strings, bytes, tensors, and dicts, lists, tuples or sets of them"
) -> UnsupportedError:
    """Returns the error for a value of a type that cannot be stored. `use` names the types that can."""
    cls = type(value)
    return UnsupportedError(
        f"{field} is a {cls.__module__}.{cls.__qualname__}, which cannot be stored without pickling a class: use {use}"
    )
