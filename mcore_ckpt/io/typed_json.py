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
        self._between, self._end = between, between.index(b",")
        self._is_whole = is_whole

    def read(self, data: bytes, place: Place) -> Iterator[T]:
        """Yields the values in the list that is at a place in a text. Members that the type lacks are ignored.

        Raises FieldError if a value has another type, or if a name occurs twice in an object.
        """
        start, stop = place
        if data[start : start + 1] != b"[":
            raise FieldError("not a list")
        end = start
        while end < stop - 1:
            at, cut = end + 1, data.find(self._between, end + _PIECE, stop)
            end = stop - 1 if cut < 0 else cut + self._end
            piece = b"[%b]" % data[at:end]
            yield from parse_exactly(piece, self._decoder) if self._is_whole else parse(piece, self._decoder)
