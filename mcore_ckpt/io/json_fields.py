"""Strict reading of JSON that may have been damaged or forged: every field has the type and range asked for."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

_MAX_INT = 2**62
# Longer than any tensor's, and than any path that a system takes.
MAX_NAME = 4096


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
    value = parse(data)
    try:
        encode(value)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"not JSON: {error}") from None
    return value


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object of other programs, which may hold NaN. Raises FieldError, also for a name that is there twice."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FieldError("not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        # Which of the two counts is not the same in all parsers: one may check what another uses.
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise FieldError(f"{shown(name)} is there twice")
    return value


def shown(value: Any) -> str:
    """A value for a message, shortened: it may be of any length and depth."""
    return reprlib.repr(value)


def as_name(value: Any, key: str) -> str:
    """A name that can be printed: a terminal obeys control characters."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_NAME:
        raise FieldError(f"{key!r} is {shown(value)}, not a name")
    return value


def get_name(record: Mapping[str, Any], key: str) -> str:
    return as_name(record.get(key), key)


def get_names(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(as_name(value, key) for value in get_list(record, key))


def get_int(record: Mapping[str, Any], key: str) -> int:
    return as_int(record.get(key), key)


def as_int(value: Any, key: str) -> int:
    """A non-negative integer that fits a file offset."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
        raise FieldError(f"{key!r} is {shown(value)}, not a non-negative integer")
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
        raise FieldError(f"{key!r} is {shown(value)}, not a list")
    return value


def get_dict(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    return as_dict(record.get(key), key)


def as_dict(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(f"{key!r} is {shown(value)}, not an object")
    return value
