"""Converts the small state of optimizers, megatron's scheduler and generators to plain values.

`torch.load(weights_only=True)` opens plain values, and each version of this package reads them. The trainer's own
values, and the state of schedulers other than megatron's, are stored with their types instead (typed_values.py).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import torch

from mcore_ckpt.checkpoint.pt_tensors import is_known
from mcore_ckpt.checkpoint.unpickling import MOST_KEY_PARTS
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io.device_waits import wait_before_reading

# Values of these types have no parts, and torch's safe unpickler can create such values.
ATOMS = (type(None), bool, int, float, complex, str, bytes)
# The most bits that a stored integer may have. A pickle stores longer integers in a form that torch's safe unpickler
# and ours cannot read.
_MOST_INT_BITS = 2039
_PLAIN = "numbers, strings, bytes, tensors, and dicts, lists, tuples or sets of them"


def is_atom(value: Any) -> bool:
    """Returns True if a value has no parts and can be stored unchanged."""
    if type(value) is int:
        return value.bit_length() <= _MOST_INT_BITS
    return type(value) in ATOMS and value != b""  # torch's safe unpickler cannot create empty bytes


def is_plain_key(key: Any) -> bool:
    """Returns True if a key of a dict, or an item of a set, can be stored unchanged."""
    parts = key if type(key) is tuple else (key,)
    return len(parts) < MOST_KEY_PARTS and all(map(is_atom, parts))


def to_plain(value: Any, field: str) -> Any:
    """Returns a copy of `value` that consists of dicts, lists, tuples, sets, numbers, strings, bytes and CPU tensors.

    Tensors are cloned, so later changes do not affect the copy. NumPy scalars become Python scalars, and a generator
    becomes its state.

    `field` is the name of the value. Raises UnsupportedError: the value contains an object of another kind. The message
    names the field.

    Example:
        >>> to_plain({"betas": (0.9, 0.95)}, "param_groups")
        {'betas': (0.9, 0.95)}
    """
    if is_atom(value):
        return value
    if isinstance(value, torch.Tensor):
        return copy_tensor(value, field)
    if isinstance(value, torch.Generator):
        return value.get_state().clone()
    if type(value) in (dict, OrderedDict):
        return type(value)((_key(key, field), to_plain(item, f"{field}[{key!r}]")) for key, item in value.items())
    if type(value) is set:
        return {_key(item, field) for item in value}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, f"{field}[{i}]") for i, item in enumerate(value))
    return _from_numpy(value, field)


def _key(key: Any, field: str) -> Any:
    if is_plain_key(key):
        return key
    try:
        return _from_numpy(key, field)
    except UnsupportedError:
        raise refuse_key(key, field) from None


def _from_numpy(value: Any, field: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        item = value.item()
        if is_atom(item):
            return item
    raise refuse_type(value, field, _PLAIN)


def copy_tensor(value: torch.Tensor, field: str) -> torch.Tensor:
    """Returns a copy of a tensor on the host. Raises UnsupportedError if readers would refuse the tensor."""
    is_dense = value.layout is torch.strided and not value.is_nested and value.device.type != "meta"
    if not is_dense or not is_known(value.dtype):
        kind = "nested" if value.is_nested else str(value.layout)
        raise UnsupportedError(
            f"{field} is a {kind} tensor of {value.dtype} on {value.device}, which cannot be stored: use dense tensors "
            "of a float, int, bool or complex dtype, not on the meta device"
        )
    wait_before_reading(value)
    return value.detach().to("cpu", copy=True).contiguous()


def refuse_key(key: Any, field: str) -> UnsupportedError:
    """Returns the error for the key of a dict, or the item of a set, that cannot be stored."""
    return UnsupportedError(
        f"a key of {field} is a {_name_of(type(key))}, which readers do not accept as a key: use numbers of at most "
        f"{_MOST_INT_BITS} bits, strings, bytes, or tuples of fewer than {MOST_KEY_PARTS} of these"
    )


def refuse_type(value: Any, field: str, instead: str) -> UnsupportedError:
    """Returns the error for a value that cannot be stored. `instead` names the types to use."""
    if type(value) is int:
        return UnsupportedError(f"{field} is an int of {value.bit_length()} bits, more than {_MOST_INT_BITS}: use text")
    return UnsupportedError(
        f"{field} is a {_name_of(type(value))}, which cannot be stored without pickling a class: use {instead}"
    )


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
