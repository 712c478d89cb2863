"""Stores a trainer's values (`extra_state`, schedulers) so that a load returns them with their types.

`torch.load(weights_only=True)` creates values of only a few types. A value of any other type is stored as a dict of its
parts, in which the key `TYPE` names the type: `{"mcore_ckpt.type": "deque", "items": [1, 2], "maxlen": None}`. So the
file can be opened without this package, and `from_stored` turns the dict back into the value. docs/format.md lists the
types.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mcore_ckpt.checkpoint.unpickling import MOST_KEY_PARTS, check_key
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.sharding.data_position import ShardedPosition
from mcore_ckpt.state.plain import copy_tensor, is_atom, is_plain_key, refuse_key, refuse_type

TYPE = "mcore_ckpt.type"

# Readers refuse values that are nested more than 100 deep (`unpickling.check_extent`). A typed container
# takes two levels.
_MOST_DEPTH = 48

# A container that is in several other containers is stored once for each of them. With several levels of such sharing,
# the number of stored values grows exponentially, and a save would never end. So the number of repeated values is
# limited.
_MOST_REPEATED = 1 << 20

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}

# NumPy's dtypes of numbers, texts and times. Structured dtypes and objects are not allowed, because their values can
# refer to Python objects, which the bytes of an array do not contain.
_NUMPY_DTYPE = re.compile(r"[<>|](?:[biu][1248]|f[248]|c(?:8|16)|[SU][1-9]\d{0,8}|[mM]8(?:\[\d{0,9}[A-Za-zμ]{1,7}\])?)")

# The types that messages recommend.
_TYPES = (
    "numbers, strings, bytes, tensors, NumPy's numbers, texts and times, and dicts, lists, tuples, sets or deques of "
    "them"
)


def to_stored(value: Any, field: str) -> Any:
    """Returns a form of a value that `torch.load(weights_only=True)` opens and `from_stored` turns back into the value.

    Tensors are cloned to the host, so later changes do not affect the copy. A parameter comes back as a plain tensor.

    Args:
        value: the value to copy.
        field: the name of the value, for error messages.

    Raises UnsupportedError: the value contains an object of a type that cannot be stored, or is nested too deep. The
    message names the field.

    Example:
        >>> to_stored({"window": slice(0, 8)}, "extra_state")
        {'window': {'mcore_ckpt.type': 'slice', 'parts': [0, 8, None]}}
    """
    return _Writer().stored(value, (field,), 0)


Field = tuple[Any, ...]
"""The name of a value: `(name,)`, or `(the container's field, key)` in a container. `_text` formats it for messages."""


def _text(field: Field) -> str:
    keys = []
    while len(field) > 1:
        field, key = field
        keys.append(f"[{key!r}]")
    return "".join((field[0], *reversed(keys)))


class _Writer:
    """Makes the stored form of one value, and counts the values that are stored repeatedly."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._repeated = 0

    def stored(self, value: Any, field: Field, depth: int) -> Any:
        """Returns the stored form of a value that is in `depth` containers."""
        if is_atom(value):
            return value
        kind = type(value)
        if kind is ShardedPosition:  # stored as plain values, which older versions return unchanged
            return self.stored(value.record, field, depth)
        if kind in (torch.Tensor, torch.nn.Parameter):
            return copy_tensor(value, _text(field))
        if kind in _CONTAINERS:
            self._check(value, field, depth)
        if kind in (dict, OrderedDict) and TYPE not in value and all(map(is_plain_key, value)):
            return kind((key, self.stored(item, (field, key), depth + 1)) for key, item in value.items())
        if kind in (list, tuple) or (kind is set and all(map(is_plain_key, value))):
            return kind(self._items(value, field, depth))
        if kind in _MAPPINGS:
            of_keys = (f"a key of {_text(field)}",)
            keys = [self.stored(_checked_key(key, field), of_keys, depth + 1) for key in value]
            items = [self.stored(item, (field, key), depth + 1) for key, item in value.items()]
            return {TYPE: kind.__name__, "keys": keys, "values": items} | _factory_of(value, field)
        if kind in (set, frozenset):
            keys = [_checked_key(item, field) for item in value]
            return {TYPE: kind.__name__, "items": self._items(keys, field, depth)}
        if kind is deque:
            return {TYPE: "deque", "items": self._items(value, field, depth), "maxlen": value.maxlen}
        if kind is torch.Size:
            return {TYPE: "torch.Size", "items": list(value)}
        if kind is slice:
            return {TYPE: "slice", "parts": self._items((value.start, value.stop, value.step), field, depth)}
        if kind in (bytes, bytearray):  # torch's safe unpickler cannot create empty bytes
            return {TYPE: kind.__name__, "data": _tensor_of(value)}
        if kind is torch.Generator and value.device.type == "cpu":
            return {TYPE: "torch.Generator", "state": value.get_state().clone()}
        return self._of_numpy(value, field, depth)

    def _items(self, values: Iterable[Any], field: Field, depth: int) -> list[Any]:
        return [item if is_atom(item) else self._item(item, (field, i), depth + 1) for i, item in enumerate(values)]

    def _item(self, item: Any, field: Field, depth: int) -> Any:
        if type(item) is ShardedPosition:  # a load looks for data positions only in dicts, because lists may be long
            raise UnsupportedError(f"{_text(field)} is a data position in a list, tuple or set: put it into a dict")
        return self.stored(item, field, depth)

    def _check(self, container: Any, field: Field, depth: int) -> None:
        if id(container) in self._seen:
            self._repeated += 3 if type(container) is slice else len(container)
        self._seen.add(id(container))
        if depth <= _MOST_DEPTH and self._repeated <= _MOST_REPEATED:
            return
        name = _text(field)[:200]
        if depth > _MOST_DEPTH:
            raise UnsupportedError(
                f"{name} is nested more than {_MOST_DEPTH} deep, or contains itself: store flat containers"
            )
        raise UnsupportedError(
            f"{name} is in containers that are shared by other containers: more than {_MOST_REPEATED} values would be "
            "stored repeatedly: put each container into only one other container"
        )

    def _of_numpy(self, value: Any, field: Field, depth: int) -> dict[str, Any]:
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) in (numpy.bytes_, numpy.str_):
            # Stored as arrays, these texts would lose zeros at their ends.
            plain = bytes(value) if isinstance(value, bytes) else str.__str__(value)
            return {TYPE: f"numpy.{type(value).__name__}", "value": self.stored(plain, field, depth)}
        is_scalar = numpy is not None and isinstance(value, numpy.generic) and type(value) is value.dtype.type
        is_array = numpy is not None and type(value) is numpy.ndarray
        if not (is_scalar or is_array) or not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise refuse_type(value, _text(field), _TYPES)
        name = "numpy.generic" if is_scalar else "numpy.ndarray"
        return {TYPE: name, "dtype": value.dtype.str, "shape": list(value.shape), "data": _tensor_of(value.tobytes())}


def _checked_key(key: Any, field: Field) -> Any:
    """Returns the key. Refuses a key that a reader would not restore as an equal key."""
    numpy = sys.modules.get("numpy")
    parts, seen = [key], 0
    while parts:
        part = parts.pop()
        seen += 1
        if seen > MOST_KEY_PARTS:
            raise refuse_key(key, _text(field))
        if type(part) in (tuple, torch.Size):
            parts += part
        elif not is_atom(part) and part != b"" and not (numpy is not None and isinstance(part, numpy.generic)):
            raise refuse_key(key, _text(field))
    return key


def _factory_of(value: Any, field: Field) -> dict[str, str | None]:
    if type(value) is not defaultdict:
        return {}
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise UnsupportedError(
            f"{_text(field)} is a defaultdict whose default is made by {factory!r}, which cannot be stored without "
            f"pickling it: use one of {', '.join(_FACTORIES)}, or pass dict(...)"
        )
    return {"factory": name}


def _tensor_of(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def from_stored(value: Any) -> Any:
    """Returns the original value of a stored value. Values that earlier versions have stored are returned unchanged.

    Raises ValueError: a stored type is not known, or its parts do not fit together.
    """
    return _Reader().read(value)


class _Reader:
    """Makes the original values of stored values.

    Each tensor of bytes is accepted only once. Otherwise a hostile file could name one tensor many times, and fill the
    memory with copies of its bytes.
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
            raise ValueError(
                f"a value of the type {stored[TYPE]!r}, which this mcore_ckpt does not know: upgrade mcore_ckpt"
            )
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

    def text(self, stored: Mapping[str, Any]) -> Any:
        import numpy

        made = numpy.bytes_ if stored[TYPE] == "numpy.bytes_" else numpy.str_
        value = self.read(stored["value"])
        if type(value) not in (bytes, str):
            raise ValueError(f"its value is not bytes or text, but a {type(value).__name__}")
        return made(value)

    def numpy(self, stored: Mapping[str, Any]) -> Any:
        import numpy

        if not _NUMPY_DTYPE.fullmatch(stored["dtype"]):
            raise ValueError(f"an array of the dtype {stored['dtype']!r}, which is not allowed")
        array = numpy.ndarray(tuple(stored["shape"]), stored["dtype"], self.data(stored))
        return array if stored[TYPE] == "numpy.ndarray" else array[()]


_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS: tuple[type, ...] = (*_MAPPINGS, list, tuple, set, frozenset, deque, slice)
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
    "numpy.bytes_": _Reader.text,
    "numpy.str_": _Reader.text,
}
