"""Cuts the bytes of `manifest.json` into its members, and decodes large members quickly for thousands of ranks.

Most of a large manifest consists of the entries of files. Most of an entry consists of `holds`, the list of the tensors
in the file. Many files hold the same tensors, so each distinct `holds` is encoded once and decoded once. Encoding and
decoding make no large objects except the result, and let other threads, such as the training, run in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import le, lt
from typing import Any, TypeVar, overload

import msgspec

from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import typed_json
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.typed_json import LongList, Natural, Place
from mcore_ckpt.json_bounds import SMALL_BYTES
from mcore_ckpt.sharding.plan import ends_of_runs

T = TypeVar("T")

_FILES, _CHECKSUM, _PLACEMENT = "files", "crc32", "placement"
# The members whose size grows with the number of ranks, tensors and files.
_LARGE = frozenset((_FILES, _PLACEMENT, "ranks", "save_timeline", "tensors"))
_CHECKSUM_KEY = b',"crc32":'
# How many entries of files are encoded at a time.
_ENTRIES = 512
# Triples (member, text, bytes): each occurrence of `text` in the member counts as `bytes` bytes. A large manifest is
# refused if the sum is larger than the manifest, because its Python objects would take more than five times the size of
# the manifest. The texts stand for files, for the names of tensors and nodes (two quotes each), and for node numbers. A
# part's file has the shortest entry: 80 bytes with the shortest names.
_LEAST_BYTES = ((_FILES, b'"path":', 80), ("tensors", b'"', 12), (_PLACEMENT, b'"', 12), (_PLACEMENT, b",", 16))
_DIGITS = b"0123456789"
# The value of `Holds._count` if the ranges do not ascend.
_OUT_OF_ORDER = -1


class Holds(Sequence[tuple[int, int]]):
    """The tensors in a file, as ranges `(first, last)` of positions in the manifest's `tensors`.

    A range includes `last`, and takes 8 bytes of memory. The ranges never change, so their JSON text and the number of
    their tensors are computed only once for all saves.
    """

    __slots__ = ("_count", "_text", "ends")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self.ends = array("I", chain.from_iterable(runs))
        self._count: int | None = None
        self._text: msgspec.Raw | None = None

    @staticmethod
    def of(positions: Iterable[int]) -> Holds:
        """Returns a `Holds` with the ranges that `positions` make up."""
        found = Holds()
        found.ends.fromlist(ends_of_runs(positions))
        return found

    def __len__(self) -> int:
        return len(self.ends) // 2

    @overload
    def __getitem__(self, number: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[tuple[int, int]]: ...
    def __getitem__(self, number: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        return list(self)[number] if isinstance(number, slice) else (self.ends[::2][number], self.ends[1::2][number])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        ends = self.ends.tolist()
        return zip(ends[::2], ends[1::2], strict=True)

    def __eq__(self, other: object) -> bool:
        return self.ends == other.ends if isinstance(other, Holds) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.ends.tobytes())

    def __repr__(self) -> str:
        return f"Holds({list(self)})"

    def count_of(self, tensors: int) -> int | None:
        """Returns the number of tensors in the file. `tensors` is the number of all tensors in the manifest.

        Returns None if the ranges do not ascend, or if a position is not below `tensors`.
        """
        if not self.ends:
            return 0
        if self._count is None:
            ends = self.ends.tolist()
            firsts, lasts = ends[::2], ends[1::2]
            is_ascending = all(map(le, firsts, lasts)) and all(map(lt, lasts, firsts[1:]))
            self._count = sum(lasts) - sum(firsts) + len(firsts) if is_ascending else _OUT_OF_ORDER
        return None if self._count == _OUT_OF_ORDER or self.ends[-1] >= tensors else self._count

    @property
    def text(self) -> msgspec.Raw:
        """The ranges as JSON. Raises FieldError if the JSON would be decoded to other ranges."""
        if self._text is None:
            text = typed_json.encode(list(self))
            if _decoded(text) != self:
                raise fields.FieldError(f"'holds' {fields.shown(text)} is not decoded as it was encoded")
            self._text = msgspec.Raw(text)
        return self._text


NO_TENSORS = Holds()


class _Index(msgspec.Struct, gc=False, omit_defaults=True):
    """The index of a file, as the manifest spells it. The members are in the order of the JSON text."""

    crc32: Natural
    offset: Natural
    size: Natural
    version: Natural = 1


class Entry(msgspec.Struct, gc=False, kw_only=True):
    """The entry of a file, as the manifest spells it.

    The members are in the order of the JSON text. A file without an index has no `holds`.
    """

    crc32: Natural
    holds: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    index: _Index | msgspec.UnsetType = msgspec.UNSET
    kind: str
    path: str
    rank: Natural
    size: Natural

    def set_index(self, offset: int, size: int, checksum: int, version: int) -> None:
        """Sets the place of the file's index; see `IndexPlace`."""
        self.index = _Index(checksum, offset, size, version)


class _Size(msgspec.Struct, gc=False):
    path: str
    size: Natural


ENTRY_LIST: LongList[Entry] = LongList(Entry, b"},{")
_SIZE_LIST: LongList[_Size] = LongList(_Size, b"},{", is_whole=False)


@dataclass(frozen=True)
class Members:
    """The members of a manifest.

    The large members, which grow with the ranks, tensors and files, are decoded when a caller asks for them.

    Attributes:
        data: the text of the manifest.
        places: the byte range `[start, stop)` of each member's value in `data`, by the member's name.
        small: the decoded values of the members that are not large.
        is_intact: whether the checksum is right. If the checksum is wrong, callers must not read the large members.
    """

    data: bytes
    places: Mapping[str, Place]
    small: Mapping[str, Any]
    is_intact: bool = True

    def entries(self) -> Iterator[tuple[Entry, Holds]]:
        """Yields the entry of each file, with the `Holds` of the file.

        Equal `holds` are the same object. Raises FieldError.
        """
        known: dict[bytes, Holds] = {}
        for entry in self.objects(_FILES, ENTRY_LIST):
            yield entry, _holds_of(entry, known)

    def objects(self, name: str, of: LongList[T]) -> Iterator[T]:
        """Yields the objects in the member `name`, which is a list. Raises FieldError."""
        return of.read(self.data, self._place(name))

    def names(self, name: str) -> tuple[str, ...]:
        """Returns the printable names in the member `name`, which is a list. Raises FieldError."""
        return typed_json.read_names(self.data, self._place(name), name)

    def text(self, name: str) -> bytes | None:
        """Returns the text of a member; None if the manifest does not have the member."""
        return self.data[slice(*self.places[name])] if name in self.places else None

    def _place(self, name: str) -> Place:
        if name not in self.places:
            raise fields.FieldError(f"{name!r} is missing")
        return self.places[name]


def _holds_of(entry: Entry, known: dict[bytes, Holds]) -> Holds:
    if entry.index is msgspec.UNSET:
        return NO_TENSORS
    if entry.holds is msgspec.UNSET:
        raise fields.FieldError(f"{entry.path}: 'holds' is missing")
    text = bytes(memoryview(entry.holds))
    if (holds := known.get(text)) is None:
        holds = known[text] = _decoded(text)
    return holds


def _decoded(text: bytes) -> Holds:
    """Decodes a `holds` without making a list for each of its ranges."""
    if text == b"[]":
        return NO_TENSORS
    runs = text.count(b"],[") + 1
    if text.translate(None, _DIGITS) != b"[" + b"[,]," * (runs - 1) + b"[,]]":
        raise fields.FieldError(f"'holds' is {fields.shown(text)}, not a list of runs [first, last]")
    numbers = b"[%b]" % text.translate(None, b"[]")
    holds = Holds()
    try:
        for piece in typed_json.NATURALS.pieces(numbers, (0, len(numbers))):
            holds.ends.fromlist(piece)
    except OverflowError:
        raise fields.FieldError("'holds' has a number that is no position of a tensor") from None
    return holds


def encode(record: Mapping[str, Any], entries: Sequence[Entry]) -> bytes:
    """Encodes a manifest as one line of canonical JSON with a checksum.

    `record` has all members except `files`, which is made from `entries`, and `crc32`, which is computed. `record` must
    have a member whose name sorts before `crc32`.
    """
    head = b"{" + _texts(record, lambda name: name < _CHECKSUM)
    middle = _texts(record, lambda name: _CHECKSUM < name < _FILES)
    tail = _texts(record, lambda name: name > _FILES)
    pieces = [b",", middle, b',"files":[', *_entry_texts(entries), b"],", tail, b"}"]
    checksum = crc32(head)
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return b"".join((head, b',"crc32":%d' % checksum, *pieces, b"\n"))


def _texts(record: Mapping[str, Any], is_here: Callable[[str], bool]) -> bytes:
    # The large members use `typed_json.encode`, which is faster. The large members consist of names and whole numbers,
    # which both encoders encode alike.
    encoders = ((name, typed_json.encode if name in _LARGE else fields.encode) for name in sorted(record))
    return b",".join(b'"%b":%b' % (name.encode(), encode(record[name])) for name, encode in encoders if is_here(name))


def _entry_texts(entries: Sequence[Entry]) -> Iterator[bytes]:
    for start in range(0, len(entries), _ENTRIES):
        yield (b"," if start else b"") + typed_json.encode(entries[start : start + _ENTRIES])[1:-1]


def read(data: bytes) -> Members:
    """Finds the members of a manifest that `encode` has encoded.

    Also reads the same JSON in another spelling, if the checksum is right for the canonical form of the JSON. Raises
    FieldError if the data are not a JSON object, or have more values than their size allows.
    """
    if (found := _canonical(data)) is not None and found.is_intact:
        return found
    try:
        record = fields.decode(data)
        checksum = crc32(fields.encode({key: value for key, value in record.items() if key != _CHECKSUM}))
        again = _canonical(fields.encode(record) + b"\n") if checksum == record.get(_CHECKSUM) else None
    except fields.FieldError:
        # If the data have the form that `encode` writes, their members are returned even if the data as a whole are not
        # JSON. Then `is_intact` is False.
        if found is not None:
            return found
        raise
    except (ValueError, RecursionError) as error:
        raise fields.FieldError(f"not JSON: {error}") from None
    return again or Members(data, {}, record, is_intact=False)


def _canonical(data: bytes) -> Members | None:
    """Returns the members if the data have the form that `encode` writes; None otherwise."""
    view = memoryview(data)
    places = typed_json.members(view[:-1]) if data.endswith(b"}\n") else None
    if places is None or _CHECKSUM not in places:
        return None
    start, stop = places[_CHECKSUM]
    before = start - len(_CHECKSUM_KEY)
    checksum = b"%d" % crc32(view[stop:-1], crc32(view[:before]))
    is_intact = data[start:stop] == checksum and data[before:start] == _CHECKSUM_KEY
    small = [name for name in places if name not in _LARGE]
    texts = (b"%b:%b" % (typed_json.encode(name), data[slice(*places[name])]) for name in small)
    members = Members(data, places, fields.decode(b"{%b}" % b",".join(texts)), is_intact)
    least = sum(data.count(text, *places.get(name, (0, 0))) * nbytes for name, text, nbytes in _LEAST_BYTES)
    if is_intact and least > max(len(data), SMALL_BYTES):
        raise fields.FieldError(f"{len(data)} bytes have more values than their size allows")
    return members


def decode_sizes(data: bytes) -> dict[str, int] | None:
    """Returns the size of each file in bytes, by path. This is faster than decoding all of a large manifest.

    Returns None if the data must be decoded completely: they are damaged, or `encode` has not written them, or the
    manifest has a placement, so that files may be on other nodes.
    """
    try:
        found = _canonical(data)
        if found is not None and found.is_intact and _PLACEMENT not in found.places:
            return {each.path: each.size for each in found.objects(_FILES, _SIZE_LIST)}
    except fields.FieldError:
        pass
    return None
