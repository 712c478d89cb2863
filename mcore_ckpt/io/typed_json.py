"""Decodes JSON to values of stated types, so that text that lies takes no more memory than text that does not.

A text that is not of the type is refused at its first wrong value. Long lists are decoded piece by piece, so that there
is never more of them than what the caller keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from mcore_ckpt.io.json_fields import MAX_INT, FieldError, decode

T = TypeVar("T")

# An integer that can be a file offset.
Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Place = tuple[int, int]
# How much text of a long list is decoded at a time, at least. The training runs in between.
_PIECE = 64 << 10
_MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode(value: Any) -> bytes:
    """Encodes a value without spaces, and the members of objects in the order of their names."""
    return msgspec.json.encode(value, order="sorted")


def parse(data: bytes | memoryview, decoder: msgspec.json.Decoder[T]) -> T:
    """Decodes a text. Members that the type does not have are ignored. Raises FieldError."""
    try:
        return decoder.decode(data)
    except _MALFORMED as error:
        raise FieldError(f"not as expected: {error}") from None


def parse_exactly(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decodes a text as `parse` does. Raises FieldError also if a name occurs twice in an object."""
    value = parse(data, decoder)
    # What is encoded again is as short as can be. So a longer text has spaces, or members that the value lacks: another
    # one of the same name, or one that the type does not have.
    if len(encode(value)) != len(data):
        decode(b'{"all":%b}' % data)
    return value


def members(data: bytes | memoryview) -> dict[str, Place] | None:
    """Returns the place of the value of each member of a JSON object, as a range of bytes of `data`.

    Returns None if there are spaces around members, if a name occurs twice or has an escape, or if it is no object.
    """
    try:
        values = _MEMBERS.decode(data)
    except _MALFORMED:
        return None
    places, at = {}, 1
    for name, value in values.items():
        start = at + len(name.encode()) + len('"":')
        places[name] = start, start + len(memoryview(value))
        at = places[name][1] + 1
    # A decoder keeps the last of two members of one name, so the text is longer than what was found.
    return places if at == len(data) and len(values) else None


class LongList(Generic[T]):
    """A long list of values of one type, none of them spelled with spaces.

    Args:
        of: the type: a Struct, a dataclass or a tuple.
        between: a text that is nothing but the end of one value and the beginning of the next one. It may have a quote,
            because inside of a string a quote has an escape.
        is_whole: whether the type has all members. If so, an object in which a name occurs twice is found.
    """

    def __init__(self, of: Any, between: bytes, is_whole: bool = True) -> None:
        self._decoder: msgspec.json.Decoder[list[T]] = msgspec.json.Decoder(list[of])
        self._between, self._parse = between, parse_exactly if is_whole else parse

    def read(self, data: bytes, place: Place) -> Iterator[T]:
        """Yields the values in the list that is at a place in a text. Members that the type lacks are ignored.

        Raises FieldError if a value has another type, or if a name occurs twice in an object.
        """
        for piece in _pieces(data, place, b"[]", self._between):
            yield from self._parse(piece, self._decoder)


class LongObject(Generic[T]):
    """An object of many members of one type, none of them spelled with spaces. `between` is as in LongList."""

    def __init__(self, of: Any, between: bytes) -> None:
        self._decoder: msgspec.json.Decoder[dict[str, T]] = msgspec.json.Decoder(dict[str, of])
        self._between = between

    def read(self, data: bytes, place: Place) -> Iterator[tuple[str, T]]:
        """Yields the members of the object that is at a place in a text.

        Raises FieldError if a value has another type, or if one name occurs twice and close to each other.
        """
        for piece in _pieces(data, place, b"{}", self._between):
            yield from parse_exactly(piece, self._decoder).items()


def _pieces(data: bytes, place: Place, brackets: bytes, between: bytes) -> Iterator[bytes]:
    start, stop = place
    if data[start : start + 1] != brackets[:1]:
        raise FieldError(f"begins with {data[start : start + 1]!r}, not with {brackets[:1]!r}")
    end = start
    while end < stop - 1:
        at, cut = end + 1, data.find(between, end + _PIECE, stop)
        end = stop - 1 if cut < 0 else cut + between.index(b",")
        yield b"%b%b%b" % (brackets[:1], data[at:end], brackets[1:])


def without_spaces(data: bytes) -> bytes:
    """Returns the same JSON without spaces between its values. Raises FieldError if it is none."""
    try:
        return msgspec.json.format(data, indent=-1)
    except _MALFORMED as error:
        raise FieldError(f"not JSON: {error}") from None
