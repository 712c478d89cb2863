"""Stores what a trainer hands over (`extra_state`) so that it comes back with the types that it had.

`torch.load(weights_only=True)` makes few types. A value of any other type is stored as a dict whose key `TYPE` names
the type, beside its parts: `{"mcore_ckpt.type": "deque", "items": [1, 2], "maxlen": None}`. So the file opens on a
machine without this package, and `from_stored` makes the value again. docs/format.md lists the types.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mcore_ckpt.checkpoint.unpickling import check_key
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.state.plain import ATOMS, refuse_type

TYPE = "mcore_ckpt.type"

# Readers refuse values that are nested more than 100 deep (`unpickling.check_extent`). A typed container
# takes two levels.
_MOST_DEPTH = 48

# Readers refuse keys with more parts (`unpickling.check_key`).
_MOST_KEY_PARTS = 64

# What a user is told to use.
_TYPES = (
    "numbers, strings, bytes, tensors, NumPy's numbers, texts and times, and dicts, lists, tuples, sets or deques of "
    "them"
)

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}

# Kinds of numbers, texts and times that consist of nothing but their bytes. Structured types and objects do not.
_NUMPY_DTYPE = re.compile(r"[<>|](?:[biu][1248]|f[248]|c(?:8|16)|[SU][1-9]\d{0,8}|[mM]8(?:\[\d{0,9}[A-Za-zμ]{1,7}\])?)")


def to_stored(value: Any, field: str, depth: int = 0) -> Any:
    """Returns a copy of a value that `torch.load(weights_only=True)` opens, and that `from_stored` makes the value of.

    Tensors are cloned to the host, so later changes do not affect the copy. A parameter comes back as a plain tensor.

    Args:
        value: the value to copy.
        field: the name of the value, for error messages.
        depth: how many containers the value is in.

    Raises:
        UnsupportedError: the value contains an object of another type, or is nested too deep. The message names the
            field.

    Example:
        >>> to_stored({"window": slice(0, 8)}, "extra_state")
        {'window': {'mcore_ckpt.type': 'slice', 'parts': [0, 8, None]}}
    """
    if depth > _MOST_DEPTH:
        raise UnsupportedError(
            f"{field[:200]} is nested more than {_MOST_DEPTH} deep, or contains itself: store flat containers"
        )
    kind = type(value)
    if kind in ATOMS and value != b"":
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _stored_tensor(value, field)
    if kind in (dict, OrderedDict) and TYPE not in value and all(_is_plain_key(key) for key in value):
        return kind((key, to_stored(item, f"{field}[{key!r}]", depth + 1)) for key, item in value.items())
    if kind in (list, tuple) or (kind is set and all(_is_plain_key(item) for item in value)):
        return kind(_stored_items(value, field, depth))
    if kind in _MAPPINGS:
        keys = [to_stored(_checked_key(key, field), f"a key of {field}", depth + 1) for key in value]
        items = [to_stored(item, f"{field}[{key!r}]", depth + 1) for key, item in value.items()]
        return {TYPE: kind.__name__, "keys": keys, "values": items} | _factory_of(value, field)
    if kind in (set, frozenset):
        keys = [_checked_key(item, field) for item in value]
        return {TYPE: kind.__name__, "items": _stored_items(keys, field, depth)}
    if kind is deque:
        return {TYPE: "deque", "items": _stored_items(value, field, depth), "maxlen": value.maxlen}
    if kind is torch.Size:
        return {TYPE: "torch.Size", "items": list(value)}
    if kind is slice:
        return {TYPE: "slice", "parts": _stored_items((value.start, value.stop, value.step), field, depth)}
    if kind in (bytes, bytearray):  # torch's safe unpickler cannot create empty bytes
        return {TYPE: kind.__name__, "data": _tensor_of(value)}
    if kind is torch.Generator and value.device.type == "cpu":
        return {TYPE: "torch.Generator", "state": value.get_state().clone()}
    return _stored_numpy(value, field)


def _stored_items(values: Iterable[Any], field: str, depth: int) -> list[Any]:
    return [to_stored(item, f"{field}[{i}]", depth + 1) for i, item in enumerate(values)]


def _stored_tensor(value: torch.Tensor, field: str) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise UnsupportedError(
            f"{field} is a {value.layout} tensor of {value.dtype} on {value.device}, which cannot be stored: use dense "
            "tensors with values"
        )
    return value.detach().to("cpu", copy=True).contiguous()


def _is_plain_key(key: Any) -> bool:
    parts = key if type(key) is tuple else (key,)
    return all(type(part) in ATOMS and part != b"" for part in parts)


def _checked_key(key: Any, field: str) -> Any:
    """Returns a key if the key that a reader makes of it is equal to it, and may be used as one."""
    numpy = sys.modules.get("numpy")
    parts, seen = [key], 0
    while parts:
        part = parts.pop()
        seen += 1
        if isinstance(part, tuple) and type(part) in (tuple, torch.Size) and seen <= _MOST_KEY_PARTS:
            parts += part
        elif type(part) not in ATOMS and not (numpy is not None and isinstance(part, numpy.generic)):
            raise refuse_type(key, f"a key of {field}", "numbers, strings, bytes, or tuples of them")
    return key


def _factory_of(value: Any, field: str) -> dict[str, str | None]:
    if type(value) is not defaultdict:
        return {}
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise UnsupportedError(
            f"{field} is a defaultdict whose default is made by {factory!r}, which cannot be stored without pickling "
            f"it: use one of {', '.join(_FACTORIES)}, or pass dict(...)"
        )
    return {"factory": name}


def _stored_numpy(value: Any, field: str) -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    is_scalar = numpy is not None and isinstance(value, numpy.generic)
    is_array = numpy is not None and type(value) is numpy.ndarray
    if not (is_scalar or is_array) or not _NUMPY_DTYPE.fullmatch(value.dtype.str):
        raise refuse_type(value, field, _TYPES)
    name = "numpy.generic" if is_scalar else "numpy.ndarray"
    return {TYPE: name, "dtype": value.dtype.str, "shape": list(value.shape), "data": _tensor_of(value.tobytes())}


def _tensor_of(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def from_stored(value: Any) -> Any:
    """Returns the value that `to_stored` was given. Values that earlier versions have stored are returned as they are.

    Raises ValueError: a stored type is not known, or its parts do not fit together.
    """
    return _Reader().read(value)


class _Reader:
    """Makes values of stored ones.

    It takes each tensor once, because a hostile file could name the same bytes many times, each time to be copied.
    """

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def read(self, value: Any) -> Any:
        if type(value) in (dict, OrderedDict):
            if TYPE in value:
                return self._make(value)
            return type(value)((key, self.read(item)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(map(self.read, value))
        return value

    def _make(self, stored: Mapping[str, Any]) -> Any:
        maker = _MAKERS.get(str(stored[TYPE]))
        if maker is None:
            raise ValueError(f"a value of the type {stored[TYPE]!r}, which this mcore_ckpt does not know: upgrade it")
        try:
            return maker(self, stored)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
            raise ValueError(f"a {stored[TYPE]} whose parts do not fit together: {error}") from None

    def keys(self, stored: Iterable[Any]) -> Iterable[Any]:
        for item in stored:
            key = self.read(item)
            check_key(key)
            yield key

    def mapping(self, stored: Mapping[str, Any]) -> Any:
        made: Any = _MAPPINGS_BY_NAME[stored[TYPE]]()
        if type(made) is defaultdict:
            made.default_factory = None if stored["factory"] is None else _FACTORIES[stored["factory"]]
        for key, item in zip(self.keys(stored["keys"]), stored["values"], strict=True):
            made[key] = self.read(item)
        return made

    def data(self, stored: Mapping[str, Any]) -> bytearray:
        data = stored["data"]
        if data.data_ptr() in self._taken and data.numel():
            raise ValueError("two values share their bytes")
        self._taken.add(data.data_ptr())
        return bytearray(data.numpy())

    def numpy(self, stored: Mapping[str, Any]) -> Any:
        import numpy

        if not _NUMPY_DTYPE.fullmatch(stored["dtype"]):
            raise ValueError(f"an array of the dtype {stored['dtype']!r}, which is not allowed")
        array = numpy.ndarray(tuple(stored["shape"]), stored["dtype"], self.data(stored))
        return array if stored[TYPE] == "numpy.ndarray" else array[()]


_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, defaultdict, Counter)
_MAPPINGS_BY_NAME: dict[str, type] = {kind.__name__: kind for kind in _MAPPINGS}
_MAKERS: dict[str, Callable[[_Reader, Mapping[str, Any]], Any]] = {
    **dict.fromkeys(_MAPPINGS_BY_NAME, _Reader.mapping),
    "set": lambda reader, stored: set(reader.keys(stored["items"])),
    "frozenset": lambda reader, stored: frozenset(reader.keys(stored["items"])),
    "deque": lambda reader, stored: deque(map(reader.read, stored["items"]), stored["maxlen"]),
    "torch.Size": lambda reader, stored: torch.Size(stored["items"]),
    "slice": lambda reader, stored: slice(*map(reader.read, stored["parts"])),
    "bytes": lambda reader, stored: bytes(reader.data(stored)),
    "bytearray": _Reader.data,
    "torch.Generator": lambda reader, stored: torch.Generator().set_state(stored["state"]),
    "numpy.ndarray": _Reader.numpy,
    "numpy.generic": _Reader.numpy,
}
