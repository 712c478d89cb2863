"""Refuses JSON that is small as text and large as Python objects, before a parser makes objects of it.

An empty list takes three bytes of text and 64 bytes of memory. So the characters that begin or end a value are counted
first, which takes no longer than reading the text from memory. Honest text has few such characters, because a tensor's
name, a path or a hash is long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Text of fewer bytes than this is not examined, because its values take at most a few MB of memory.
SMALL_BYTES = 64 << 10
# Text of more bytes than this must keep to a stricter bound (`Density.times`).
LARGE_BYTES = 4 << 20
# How many bytes of memory a parser takes for a string, a member, an object, a list and a value in a list or object
# (CPython 3.11 to 3.13, on 64 bits): the objects, their places in the containers that hold them, and a pair for each
# member.
_COSTS = (64, 180, 130, 72, 40)
# The deepest nesting that is allowed. Our own JSON is nested at most 6 deep, and so are configurations of models.
MOST_DEPTH = 100
# A text is searched for strings in pieces of this size, in bytes.
_PIECE = 16 << 10
# The size of the longest string whose characters may take several bytes of memory each, in bytes.
_LONG_STRING = 256 << 10

_STRING = re.compile(rb'"[^"]*"')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# Matches a character that makes Python take four bytes of memory for every character of the text.
_WIDE = re.compile(rb"[\xf0-\xff][\x80-\xbf]*")


class TooDenseError(ValueError):
    """A text has more values than its size allows, or nests them too deeply."""


@dataclass(frozen=True)
class Density:
    """The least number of bytes of text for each value of a kind, on average.

    A `string` is a string that is not the name of a member. A `value` is a value that follows another value, or is in a
    list. Text of more than LARGE_BYTES may take at most `times` its size in memory. Shorter text, such as a
    configuration with settings for each of 10,000 layers, may take up to 20 times its size: at most 80 MB.
    """

    string: int = 24
    member: int = 12
    object: int = 32
    list: int = 10
    value: int = 6
    times: int | None = 4


# Measured: text of a checkpoint has at least 13 bytes for each value, 19 for each member, 80 for each string.
USUAL = Density()
# Messages between ranks may be denser: for example, they have positions of files such as `[0,5],`.
MESSAGES = Density(string=8, member=6, object=12, list=6, value=3, times=None)


def loads(data: bytes | str, density: Density = USUAL, **options: Any) -> Any:
    """Decodes JSON like `json.loads` with these options. Raises ValueError; TooDenseError if the text is too dense."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    check(data, density)
    try:
        return json.loads(_text(data), **options)
    except RecursionError:
        raise TooDenseError("its values are nested more deeply than Python can follow") from None


def check(data: bytes, density: Density = USUAL) -> None:
    """Raises TooDenseError if a parser would take too much memory for a text."""
    if len(data) <= SMALL_BYTES:
        return
    # This count includes characters inside of strings. So a text that this count refuses is counted again without its
    # strings.
    if not _fits(_counts(data), len(data), density):
        counts = [0] * 5
        for piece in without_strings(data):
            counts = [a + b for a, b in zip(counts, _counts(piece), strict=True)]
        if not _fits(counts, len(data), density):
            raise TooDenseError(f"{len(data)} bytes of JSON have more values than their size allows")
    if not _is_shallow(data.translate(None, _NO_BRACKETS)):
        brackets = b"".join(piece.translate(None, _NO_BRACKETS) for piece in without_strings(data))
        if not _is_shallow(brackets):
            raise TooDenseError(f"its values are nested more than {MOST_DEPTH} deep, or a bracket is missing")


def _counts(data: bytes) -> list[int]:
    return [data.count(character) for character in (b'"', b":", b"{", b"[", b",")]


def _fits(counts: list[int], nbytes: int, density: Density) -> bool:
    quotes, members, objects, lists, commas = counts
    strings = quotes // 2 - members
    if density.times is not None and nbytes > LARGE_BYTES:
        # The text itself is in memory twice, as bytes and as characters, so its values may take only the rest.
        costs = zip((strings, members, objects, lists, commas), _COSTS, strict=True)
        return sum(count * cost for count, cost in costs) <= (density.times - 2) * nbytes
    return (
        strings * density.string <= nbytes
        and members * density.member <= nbytes
        and objects * density.object <= nbytes
        and lists * density.list <= nbytes
        and commas * density.value <= nbytes
    )


def _is_shallow(brackets: bytes) -> bool:
    for _ in range(MOST_DEPTH):
        if not brackets:
            return True
        before = len(brackets)
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(brackets) == before:
            return False
    return not brackets


def without_strings(data: bytes) -> Iterator[bytes]:
    """Yields the text in pieces, without the contents of quotes. The quotes stay."""
    start, is_inside = 0, False
    while start < len(data):
        piece = data[start : start + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = data[start : start + len(piece) + 1]  # keep a backslash and the next byte together
        start += len(piece)
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        before = b""
        if is_inside:
            _, before, piece = piece.partition(b'"')
            is_inside = not before
        piece = _STRING.sub(b"##", piece)  # a quote that is left begins a string that the piece cuts
        piece, begins, _ = piece.partition(b'"')
        is_inside = is_inside or bool(begins)
        yield before + piece.replace(b"##", b'""') + begins


def _text(data: bytes) -> str:
    """Decodes a text into at most 2.5 bytes of memory for each byte of the text. Raises UnicodeDecodeError."""
    is_plain = data.isascii() and b"\\u" not in data
    if is_plain or len(data) <= SMALL_BYTES:
        return data.decode()
    # If a text has one wide character, each character of the text takes four bytes.
    wide = length = 0
    for piece in _pieces(data):
        wide += len(_WIDE.findall(piece))
        length = 0 if b'"' in piece else length + len(piece)
        if length > _LONG_STRING:
            raise TooDenseError(f"a string of {length} bytes and more has characters that are not ASCII")
    if not wide or wide * 8 > len(data):
        return data.decode()
    return b"".join(_WIDE.sub(_escaped, piece) for piece in _pieces(data)).decode()


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yields the text in pieces that begin and end between characters."""
    start = 0
    while start < len(data):
        stop = start + _PIECE
        while stop < len(data) and data[stop] & 0xC0 == 0x80:
            stop -= 1
        # No character has more than four bytes. If no character ends here, the text is not UTF-8, and may be cut
        # anywhere.
        stop = stop if stop > start + _PIECE - 4 else start + _PIECE
        yield data[start:stop]
        start = stop


def _escaped(wide: re.Match[bytes]) -> bytes:
    return json.dumps(wide[0].decode())[1:-1].encode()
