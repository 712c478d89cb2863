"""Reads JSON that may be damaged or forged, and checks the type and range of each field."""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mcore_ckpt import json_bounds
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.json_bounds import TooDenseError

T = TypeVar("T")

# The largest integer that a file may have. A file offset is smaller.
MAX_INT = 2**62
# The most characters of an accepted name. No tensor has a longer name, and no system accepts a longer path.
MAX_NAME = 4096


# `check_names` gets pieces of larger texts. A piece of at most this many bytes may have any number of values per byte:
# decoded, it takes up to 20 times as much memory, which is still little.
_FEW_BYTES = 1 << 18


class FieldError(ValueError):
    """A field is missing or violates the format. The message names the field."""


def encode(value: Any) -> bytes:
    """Encodes JSON in one canonical form (UTF-8, sorted keys, no spaces), so that a checksum identifies the value."""
    return _ENCODER.encode(value).encode()


# All calls share one encoder, because making an encoder takes longer than encoding a small value.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode(data: bytes) -> dict[str, Any]:
    """Decodes a JSON object that `encode` could have written.

    Raises FieldError if the data are not a JSON object, are nested too deeply for the parser, or contain NaN or text
    that UTF-8 cannot encode.
    """
    try:
        value = parse_text(data, _refuse)
        # Text without escapes need not be checked: only an escape can spell text that UTF-8 cannot encode.
        if b"\\u" in data:
            encode(value)
    except FieldError:
        raise
    except (ValueError, RecursionError) as error:
        raise FieldError(f"not JSON: {error}") from None
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def parse(data: bytes) -> dict[str, Any]:
    """Decodes a JSON object that another program has written. The object may contain NaN.

    Raises FieldError if the data are not a JSON object, if a name occurs twice in an object, or if the data have more
    values than their size allows.
    """
    try:
        value = json_bounds.loads(data, object_pairs_hook=_object)
    except TooDenseError as error:
        raise FieldError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise FieldError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FieldError("not a JSON object")
    return value


def parse_text(data: bytes, constant: Callable[[str], Any]) -> dict[str, Any]:
    """Decodes a JSON object and calls `constant` for the values of NaN, Infinity and -Infinity.

    Raises FieldError if the text is not a JSON object, if a name occurs twice in an object, if a number is too large
    for a float, or if there are more values than the size of the text allows.
    """
    try:
        value = json_bounds.loads(data, object_pairs_hook=_object, parse_constant=constant, parse_float=_finite)
    except TooDenseError as error:
        raise FieldError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise FieldError(f"not JSON: {error}") from None
    return as_dict(value, "all")


def check_names(data: bytes) -> None:
    """Raises FieldError if a name occurs twice in an object of a JSON text. The values are not checked."""
    try:
        if len(data) > _FEW_BYTES:
            json_bounds.check(data)
        json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, FieldError) else FieldError(f"not JSON: {error}") from None


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        # If a name occurs twice, some parsers use the first value and others the last. So one program could check one
        # value, while another program uses the other.
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise FieldError(f"{shown(name)} occurs twice")
    return value


def shown(value: Any) -> str:
    """Shortens a value for a message. The value can have any length and depth."""
    return reprlib.repr(value)


def as_name(value: Any, key: str) -> str:
    """Returns `value` if it is a printable name. Raises FieldError otherwise.

    A name with control characters is refused, because a terminal would obey them.
    """
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_NAME:
        raise FieldError(f"{key!r} is {shown(value)}, not a name")
    return value


def get_names(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Reads a field that must be a list of printable names. Raises FieldError."""
    return as_names(get_list(record, key), key)


def as_names(values: Sequence[Any], key: str) -> tuple[str, ...]:
    """Returns `values` as a tuple if they are printable names. Raises FieldError."""
    # Check all names together, because a large model has a hundred thousand names. If a name is wrong, check each name
    # separately, so that the error shows the wrong name.
    if (
        set(map(type, values)) <= {str}
        and all(map(str.isprintable, values))
        and max(map(len, values), default=0) <= MAX_NAME
    ):
        return tuple(values)
    return tuple(as_name(value, key) for value in values)


def as_int(value: Any, key: str) -> int:
    """Returns `value` if it is a non-negative integer that can be a file offset. Raises FieldError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INT:
        raise FieldError(f"{key!r} is {shown(value)}, not a non-negative integer")
    return value


def get_number(record: Mapping[str, Any], key: str) -> float:
    """Reads a field that must be a finite number of at least 0. Raises FieldError."""
    value = record.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= MAX_INT:
        raise FieldError(f"{key!r} is {shown(value)}, not a non-negative number")
    return float(value)


def as_ints(value: Any, key: str) -> tuple[int, ...]:
    """Returns `value` as a tuple if it is a list of non-negative integers. Raises FieldError."""
    items = as_list(value, key)
    # Check all integers together, because a checkpoint of many ranks has a million of them. If an integer is wrong,
    # check each one separately, so that the error shows the wrong integer.
    if items and not (set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= MAX_INT):
        return tuple(as_int(item, key) for item in items)
    return tuple(items)


def as_list(value: Any, key: str) -> list[Any]:
    """Returns `value` if it is a list. Raises FieldError."""
    if not isinstance(value, list):
        raise FieldError(f"{key!r} is {shown(value)}, not a list")
    return value


def as_dict(value: Any, key: str) -> dict[str, Any]:
    """Returns `value` if it is a JSON object. Raises FieldError."""
    if not isinstance(value, dict):
        raise FieldError(f"{key!r} is {shown(value)}, not an object")
    return value


def _field(check: Callable[[Any, str], T]) -> Callable[[Mapping[str, Any], str], T]:
    """Returns a function that reads a field of a record by its key, and returns the result of `check`."""
    return lambda record, key: check(record.get(key), key)


get_name, get_int, get_ints = _field(as_name), _field(as_int), _field(as_ints)
get_list, get_dict = _field(as_list), _field(as_dict)


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """Returns the JSON object in another program's file. Raises CheckpointCorruptError, which names `path`."""
    try:
        return parse(data)
    except FieldError as error:
        raise CheckpointCorruptError(f"{path}: {error}") from None
