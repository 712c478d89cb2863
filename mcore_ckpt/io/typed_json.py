"""Decodes JSON to values of stated types, so that forged text takes no more memory than honest text.

A text that is not of the type is refused at its first wrong value. Long lists are decoded piece by piece, so that
memory holds only one piece, and the values that the caller keeps.

A piece has about 64 KiB. Callers keep numbers packed in arrays. To find a name that occurs twice, the decoded values
are encoded again. If the original text is longer than the new text, the names in the original text are checked. JSON of
files that is not decoded here, and every message of more than 64 KiB, passes `json_bounds.py`. That module counts the
characters that begin or end values, and compares the counts with the size of the text. Honest text has few of these
characters. `json_bounds.py` decodes text that is not ASCII in such a way that one emoji does not make each character
take four bytes of memory. Compressed messages that may become too large are first decompressed only to count the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from mcore_ckpt.io.json_fields import MAX_INT, FieldError, as_names, check_names

T = TypeVar("T")

# An integer that can be a file offset.
Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Place = tuple[int, int]
# The least number of bytes of a long list that are decoded at a time. Between two pieces, the training can run.
_PIECE = 64 << 10
# How many places are tried as the end of a piece, if the text up to the first place is not JSON.
_TRIES = 4
_MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode(value: Any) -> bytes:
    """Encodes a value as JSON without spaces. The members of objects are sorted by their names."""
    return msgspec.json.encode(value, order="sorted")


def parse(data: bytes | memoryview, decoder: msgspec.json.Decoder[T]) -> T:
    """Decodes a text. Members that the type does not have are ignored. Raises FieldError."""
    try:
        return decoder.decode(data)
    except _MALFORMED as error:
        raise FieldError(f"not as expected: {error}") from None


def parse_exactly(data: bytes | memoryview, decoder: msgspec.json.Decoder[T]) -> T:
    """Decodes a text as `parse` does. Raises FieldError also if a name occurs twice in an object."""
    value = parse(data, decoder)
    # The encoded text is as short as possible. So a longer text has spaces, or members that the value lacks: a second
    # member of the same name, or a member that the type does not have.
    if len(encode(value)) != len(data):
        check_names(bytes(data))
    return value


def members(data: bytes | memoryview) -> dict[str, Place] | None:
    """Returns where the value of each member of a JSON object is, as a range of bytes of `data`.

    Returns None if there are spaces around members, if a name occurs twice or has an escape that it does not need, or
    if the text is not an object.
    """
    try:
        values = _MEMBERS.decode(data)
    except _MALFORMED:
        return None
    places, at = {}, 1
    for name, value in values.items():
        start = at + len(encode(name)) + len(":")
        places[name] = start, start + len(memoryview(value))
        at = places[name][1] + 1
    # A decoder keeps only the last of two members of one name. So a text with two members of one name is longer than
    # the members that were found.
    return places if at == len(data) and len(values) else None


class _Pieces(Generic[T]):
    """A long list or object that is decoded a few values at a time. The arguments are as in `LongList`.

    If a string contains the text `between`, no piece ends inside the string: a value that is cut in two is not JSON, so
    the next place is tried.
    """

    def __init__(
        self, decoder: msgspec.json.Decoder[T], brackets: bytes, between: bytes, is_whole: bool = True
    ) -> None:
        self._decoder, self._first, self._last = decoder, brackets[:1], brackets[1:]
        self._between, self._comma = between, between.index(b",")
        self._parse = parse_exactly if is_whole else parse

    def read(self, data: bytes, place: Place) -> Iterator[T]:
        """Yields the values at a place in a text, in pieces. Raises FieldError."""
        start, stop = place
        if data[start : start + 1] != self._first or data[stop - 1 : stop] != self._last or stop - start < 2:
            raise FieldError(f"is not between {self._first.decode()} and {self._last.decode()}")
        if data.find(self._between, start + _PIECE, stop) < 0:
            yield self._parse(memoryview(data)[start:stop], self._decoder)  # a view, not a copy of the text
            return
        end = start
        while end < stop - 1:
            end, values = self._piece(data, end + 1, stop - 1)
            yield values

    def _piece(self, data: bytes, start: int, stop: int) -> tuple[int, T]:
        cut = start + _PIECE
        for tries_left in reversed(range(_TRIES)):
            cut = data.find(self._between, cut, stop)
            end = stop if cut < 0 else cut + self._comma
            try:
                return end, self._parse(b"%b%b%b" % (self._first, data[start:end], self._last), self._decoder)
            except FieldError:
                if cut < 0 or not tries_left:
                    raise
            cut += 1
        raise AssertionError("unreachable: the last try returns or raises")


class LongList(Generic[T]):
    """A long list of values of one type, none of them spelled with spaces.

    `between` is the end of one value, a comma, and the beginning of the next value. `is_whole`: whether the type has
    all members of the values. If so, an object in which a name occurs twice is refused.
    """

    def __init__(self, of: Any, between: bytes, is_whole: bool = True) -> None:
        self._pieces: _Pieces[list[T]] = _Pieces(msgspec.json.Decoder(list[of]), b"[]", between, is_whole)

    def read(self, data: bytes, place: Place) -> Iterator[T]:
        """Yields the values in the list at a place, without members that the type lacks. Raises FieldError."""
        return chain.from_iterable(self.pieces(data, place))

    def pieces(self, data: bytes, place: Place) -> Iterator[list[T]]:
        """Yields the values as `read` does, but in lists. The text of a list has about 64 KiB."""
        return self._pieces.read(data, place)


class LongObject(Generic[T]):
    """An object of many members of one type, none of them spelled with spaces. `between` is as in `LongList`."""

    def __init__(self, of: Any, between: bytes) -> None:
        self._pieces: _Pieces[dict[str, T]] = _Pieces(msgspec.json.Decoder(dict[str, of]), b"{}", between)

    def read(self, data: bytes, place: Place) -> Iterator[tuple[str, T]]:
        """Yields the members of the object at a place. Raises FieldError, also if a name occurs twice in one piece."""
        for piece in self._pieces.read(data, place):
            yield from piece.items()


# A list of numbers.
NATURALS: LongList[int] = LongList(Natural, b",", is_whole=False)
_NAMES: msgspec.json.Decoder[Sequence[Any]] = msgspec.json.Decoder(list[str])


def read_names(data: bytes, place: Place, key: str) -> tuple[str, ...]:
    """Decodes the list of printable names that is at a place in a text. Raises FieldError, which names `key`."""
    return as_names(parse(memoryview(data)[slice(*place)], _NAMES), key)


def without_spaces(data: bytes) -> bytes:
    """Returns the same JSON without spaces between its values. Raises FieldError if the text is not JSON."""
    try:
        return msgspec.json.format(data, indent=-1)
    except _MALFORMED as error:
        raise FieldError(f"not JSON: {error}") from None
