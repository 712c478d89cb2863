"""Strict reading of JSON that may have been damaged or forged: every field has the type and range asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_INT = 2**62


class FieldError(ValueError):
    """A field is missing or not what the format says; the message names it."""


def encode(value: Any) -> bytes:
    """The one form we write: UTF-8, keys sorted, no spaces, so that a checksum of it means something."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode(data: bytes) -> dict[str, Any]:
    """A JSON object that `encode` could have written.

    Raises:
        FieldError: anything else: nesting too deep for the parser, NaN, text that UTF-8 cannot hold.
    """
    try:
        value = json.loads(data)
        encode(value)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FieldError("not a JSON object")
    return value


def get_str(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise FieldError(f"{key!r} is {value!r}, not a string")
    return value


def get_int(record: Mapping[str, Any], key: str) -> int:
    return as_int(record.get(key), key)


def as_int(value: Any, key: str) -> int:
    """A non-negative integer that fits a file offset."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
        raise FieldError(f"{key!r} is {value!r}, not a non-negative integer")
    return value


def get_ints(record: Mapping[str, Any], key: str) -> tuple[int, ...]:
    return as_ints(record.get(key), key)


def as_ints(value: Any, key: str) -> tuple[int, ...]:
    items = as_list(value, key)
    # One by one only to say which is bad: a checkpoint of many ranks has a million of them.
    if items and not (set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= _MAX_INT):
        return tuple(as_int(item, key) for item in items)
    return tuple(items)


def get_list(record: Mapping[str, Any], key: str) -> list[Any]:
    return as_list(record.get(key), key)


def as_list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise FieldError(f"{key!r} is {value!r}, not a list")
    return value


def get_strs(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = get_list(record, key)
    for value in values:
        if not isinstance(value, str):
            raise FieldError(f"{key!r} holds {value!r}, not a string")
    return tuple(values)


def get_dict(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    return as_dict(record.get(key), key)


def as_dict(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(f"{key!r} is {value!r}, not an object")
    return value
