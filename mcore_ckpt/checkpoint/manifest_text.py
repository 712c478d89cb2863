"""Translates a manifest's record to the bytes of `manifest.json` and back, quickly for thousands of ranks.

Most of a large manifest are the entries of its files, and most of such an entry are its `holds`. Many files hold the
same tensors, so each distinct list of runs is encoded once and decoded once. Encoding and decoding make no large
objects besides the result, and let other threads, such as the training, run in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain
from operator import le, lt
from typing import Any

from mcore_ckpt import json_bounds
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io.checksums import crc32

# The tensors in a file: runs `(first, last)` of positions, `last` included.
Holds = tuple[tuple[int, int], ...]

_FILES, _CHECKSUM = "files", "crc32"
# How many files' entries are joined at a time.
_ENTRIES = 512
# In the text that `encode` returns, no name contains an unescaped quote, so these find members of objects alone.
_CHECKSUM_MEMBER = re.compile(rb',"crc32":([0-9]{1,10})(?=,)')
# Only the manifests in the fast tier, and of saves, have these members.
_PLACEMENT, _TIMELINE = b',"placement":{', b',"save_timeline":{'
# The members whose size grows, each from its name to the name of the next one.
_LARGE_MEMBERS = (
    (b',"files":[', b'],"format":'),
    (_PLACEMENT, b'},"ranks":'),
    (b',"ranks":[', b'],"role":'),
    (_TIMELINE, b'},"stages":'),
    (b',"tensors":[', b'],"topology":'),
)
_HOLDS_KEY = b'"holds":'
# The shortest entry of a file. A text with shorter ones is not decoded as what `encode` returns.
_LEAST_ENTRY = 64
_RANKS, _DIGITS = b',"ranks":[', b"0123456789"
# How long the entry of a rank is without its digits.
_LEAST_OF_RANK, _MOST_OF_RANK = 32, 256
# The last members of a file's entry. No path that a manifest may have contains an escaped character.
_SIZE_MEMBERS = re.compile(rb'"path":"([^"\\]*)","rank":[0-9]+,"size":([0-9]+)}')


class _NotCanonicalError(Exception):
    """The data are not exactly what `encode` returns for some record."""


def encode(record: Mapping[str, Any], files: Sequence[tuple[Mapping[str, Any], Holds]]) -> bytes:
    """Encodes a manifest as one line of canonical JSON with a checksum.

    Args:
        record: all members but `files` and `crc32`. At least one member is sorted before `crc32`.
        files: for each file, its members but `holds`, and its `holds`. Only files with an `index` have `holds`.
    """
    head = fields.encode({key: value for key, value in record.items() if key < _CHECKSUM})[:-1]
    middle = fields.encode({key: value for key, value in record.items() if _CHECKSUM < key < _FILES})[1:-1]
    tail = fields.encode({key: value for key, value in record.items() if key > _FILES})[1:]
    pieces = [b",", middle, b',"files":[', *_entries(files), b"],", tail]
    checksum = crc32(head)
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return b"".join((head, b',"crc32":%d' % checksum, *pieces, b"\n"))


def _entries(files: Sequence[tuple[Mapping[str, Any], Holds]]) -> Iterator[bytes]:
    texts: dict[int, bytes] = {}
    for start in range(0, len(files), _ENTRIES):
        part = [_entry(members, holds, texts) for members, holds in files[start : start + _ENTRIES]]
        yield (b"," if start else b"") + b",".join(part)


def _entry(members: Mapping[str, Any], holds: Holds, texts: dict[int, bytes]) -> bytes:
    entry = fields.encode(members)
    if "index" not in members:
        return entry
    # Files that hold the same tensors have the same tuple, which is kept alive by the caller.
    text = texts.get(id(holds))
    if text is None:
        text = texts[id(holds)] = fields.encode(holds)
    # The members are sorted: crc32, holds, index and so on.
    before, _, after = entry.partition(b',"index":')
    return b'%s,"holds":%s,"index":%s' % (before, text, after)


def decode(data: bytes) -> tuple[dict[str, Any], bool]:
    """Decodes what `encode` has encoded. Returns the record, and whether its checksum is right.

    In the record, each `holds` that `runs_of` would accept is already what `runs_of` returns, and files that hold the
    same tensors share it. Other JSON is decoded, too, if it is in any form that has the same checksum.

    Raises FieldError if the data are not a JSON object.
    """
    try:
        return _decode_canonical(data), True
    except (_NotCanonicalError, fields.FieldError, json_bounds.TooDenseError):
        record = fields.decode(data)
    try:
        found = crc32(fields.encode({key: value for key, value in record.items() if key != _CHECKSUM}))
    except (ValueError, RecursionError) as error:
        raise fields.FieldError(f"not JSON: {error}") from None
    stored = record.get(_CHECKSUM)
    return record, isinstance(stored, int) and found == stored


def decode_summary(data: bytes) -> dict[str, Any] | None:
    """Decodes the members whose size does not depend on the number of ranks, tensors and files.

    Returns None if the data must be decoded completely, because they are damaged or are not what `encode` returns.
    """
    try:
        _checked(data)
    except _NotCanonicalError:
        return None
    at, pieces = 0, []
    for start, end in _LARGE_MEMBERS:
        begin = data.find(start, at)
        if start in (_PLACEMENT, _TIMELINE) and begin < 0:
            continue
        close = data.find(end, begin + len(start))
        if begin < 0 or close < 0:
            return None
        pieces.append(data[at:begin])
        at = close + 1
    try:
        return fields.decode(b"".join((*pieces, data[at:])))
    except fields.FieldError:
        return None


def decode_sizes(data: bytes) -> dict[str, int] | None:
    """Decodes only the sizes of the files, by their paths, ten times as fast as all of a large manifest.

    Returns None if the data must be decoded completely: they are damaged or not what `encode` returns, or the files may
    be elsewhere, because the manifest has a placement.
    """
    try:
        _checked(data)
    except _NotCanonicalError:
        return None
    start, end = data.find(b',"files":['), data.find(b'],"format":')
    if _PLACEMENT in data or data.count(b'"path":') * _LEAST_ENTRY > len(data) or not 0 <= start < end:
        return None
    found = _SIZE_MEMBERS.findall(data, start, end)
    if len(found) != data.count(b'"path":', start, end):
        return None  # an entry has members that this version does not know, or a path that must be refused
    try:
        return {path.decode(): int(size) for path, size in found}
    except UnicodeDecodeError:
        return None


def _checked(data: bytes) -> int:
    """Returns the checksum of data that `encode` may have returned. Raises _NotCanonicalError if it is not right."""
    member = _CHECKSUM_MEMBER.search(data)
    # Only characters that no name may have are escaped in this way.
    if member is None or not data.endswith(b"}\n") or b"\\u" in data:
        raise _NotCanonicalError
    view = memoryview(data)
    if crc32(view[member.end() : -1], crc32(view[: member.start()])) != int(member[1]):
        raise _NotCanonicalError
    return int(member[1])


def _decode_canonical(data: bytes) -> dict[str, Any]:
    checksum = _checked(data)
    short = _without_dense(data)
    json_bounds.check(short)  # before the rest is decoded
    left = iter(_dense_in(data))

    def put(constant: str) -> Holds | list[Any]:
        found = next(left, None)
        if found is None or constant != "NaN":
            raise _NotCanonicalError
        return found

    record = fields.parse_text(short, put)
    if next(left, None) is not None or record.get(_CHECKSUM) != checksum:
        raise _NotCanonicalError
    return record


def _without_dense(data: bytes) -> bytes:
    """Returns the text with NaN in place of the value of each `holds`, and of `ranks`.

    No other value in JSON is spelled like this, so a parser calls its function for NaN for exactly these values.
    """
    if data.count(_HOLDS_KEY) * _LEAST_ENTRY > len(data):
        raise _NotCanonicalError
    at, pieces = 0, []
    for begin, end in _places_of_dense(data):
        pieces.append(data[at:begin])
        at = end
    return b"NaN".join((*pieces, data[at:]))


def _places_of_holds(data: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while (key := data.find(_HOLDS_KEY, at)) >= 0:
        begin = key + len(_HOLDS_KEY)
        at = begin + 2 if data.startswith(b"[]", begin) else data.find(b"]]", begin) + 2
        if at <= begin:
            raise _NotCanonicalError
        yield begin, at


def _places_of_dense(data: bytes) -> Iterator[tuple[int, int]]:
    ranks = _place_of_ranks(data)
    return merge(_places_of_holds(data), [] if ranks is None else [ranks])


def _place_of_ranks(data: bytes) -> tuple[int, int] | None:
    """Returns the place of the list of ranks; None if its members are not the same numbers in the same order for all.

    Such a list has more members than any other text of its size. They take little memory, because all have one name.
    """
    begin = data.find(_RANKS) + len(_RANKS) - 1
    end = data.find(b"}]", begin) + 2
    if begin < len(_RANKS) or end < begin:
        return None
    members = data[begin + 1 : end - 1].translate(None, _DIGITS) + b","
    first = members[: members.find(b"},") + 2]
    is_same = _LEAST_OF_RANK < len(first) < _MOST_OF_RANK and members == first * (len(members) // len(first))
    return (begin, end) if is_same else None


def _dense_in(data: bytes) -> Iterator[Holds | list[Any]]:
    """Yields the value of each `holds`, and of `ranks`, in their order. Equal `holds` are the same object."""
    ranks = _place_of_ranks(data)
    distinct: dict[bytes, Holds] = {}
    most = data.count(b'"') // 2  # there are fewer tensors than strings, and no more runs than tensors
    for begin, end in _places_of_dense(data):
        text = data[begin:end]
        if (begin, end) == ranks:
            yield fields.parse_list(text)
            continue
        holds = distinct.get(text)
        if holds is None:
            holds = distinct[text] = _parse_holds(text, most)
        yield holds


def _parse_holds(text: bytes, most: int) -> Holds:
    """Decodes a `holds` without making a list for each of its runs."""
    if text == b"[]":
        return ()
    runs = text.count(b"],[") + 1
    if runs > most or text.translate(None, _DIGITS) != b"[" + b"[,]," * (runs - 1) + b"[,]]":
        raise _NotCanonicalError
    return _pairs(fields.parse_list(b"[%s]" % text.translate(None, b"[]")))


def runs_of(items: Any) -> Holds:
    """Returns the runs in a `holds`. Raises FieldError if it is not a list of pairs of non-negative integers."""
    if isinstance(items, tuple):
        return items  # decoded already
    pairs = fields.as_list(items, "holds")
    # All runs are checked together, because a checkpoint of many ranks has a million of them.
    if not (set(map(type, pairs)) <= {list} and set(map(len, pairs)) <= {2}):
        for pair in pairs:
            if len(fields.as_ints(pair, "holds")) != 2:
                raise fields.FieldError(f"'holds' has {fields.shown(pair)}, not [first, last]")
    return _pairs(list(chain.from_iterable(pairs)))


def _pairs(items: list[Any]) -> Holds:
    numbers = fields.as_ints(items, "holds")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def count_held(holds: Holds, count: int) -> int | None:
    """Returns how many tensors there are in the runs; None if the runs do not ascend, or not below `count`.

    In ascending runs no tensor is counted twice.
    """
    if not holds:
        return 0
    firsts, lasts = zip(*holds, strict=True)
    if not (all(map(le, firsts, lasts)) and all(map(lt, lasts, firsts[1:])) and lasts[-1] < count):
        return None
    return sum(lasts) - sum(firsts) + len(holds)
