"""Decodes an index tensor by tensor, because a rank needs only few tensors from most of the files that it opens."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import le
from pathlib import Path

from mcore_ckpt.checkpoint.index import Alias, FileIndex, Regions, decode_index, encode_index
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.json_fields import FieldError
from mcore_ckpt.sharding.plan import StoredShard

# Patterns of the entries that `encode_index` writes. The patterns are used only for an index without escapes, where
# every quote begins or ends a string. If a pattern matches wrongly, the decoder refuses the entry.
_INTS, _PIECES, _TEXT, _INT = r"\[[0-9,]*\]", r"\[[0-9,\[\]]*\]", '"[^"]*"', "([0-9]{1,19})"
_KIND, _NAME = (f'"{member}":"([^"]*)",' for member in ("kind", "name"))
_REGION = f'(?:"flat":{_INTS},)?"global_shape":{_INTS},{_KIND}"local_shape":{_INTS},{_NAME}'
_END = r"\}(?:,(?=\{)|\Z)"
_ALIAS = re.compile(rf'\{{"dtype":{_TEXT},{_REGION}"pieces":{_PIECES},"same_as":{_TEXT}{_END}'.encode())
_SHARD = re.compile(
    rf'\{{(?:"beside":{_TEXT},)?"crc32":{_INTS},"dtype":{_TEXT},{_REGION}"nbytes":{_INT},"offset":{_INT},'
    rf'"pieces":{_PIECES}(?:,"scale":{_TEXT})?(?:,"upper":{_TEXT})?{_END}'.encode()
)
_NOTHING = FileIndex((), ())
# How many kinds of shards one tensor may have in an index that is decoded tensor by tensor. Optimizers use up to 10
# kinds.
_MOST_KINDS = 64
# The text of an index before the aliases, between the aliases and the shards, and between the shards and the version.
_BEFORE, _BETWEEN, _BEHIND = encode_index(_NOTHING).removesuffix(b"1}").replace(b"[]", b"[\n]").split(b"\n")
_ENDS = (_BEHIND + b"1}", _BEHIND + b"2}")


class IndexEntries:
    """The index of a file. A tensor's entries are decoded when a caller asks for the tensor.

    The constructor checks that no tensor is in the index twice, and that no two shards overlap. The caller must have
    checked the CRC of `data`. `file` is the path in the manifest, and `path` is the path or URL for messages.
    `payload_end` is as in `decode_index`.

    Raises CheckpointCorruptError if the data are not an index, or the numbers in the index contradict each other.
    """

    def __init__(self, data: bytes, file: str, payload_end: int, path: Path | str) -> None:
        self._data, self._file, self._payload_end, self._path = data, file, payload_end, path
        self._regions: Regions = {}
        self._decoded: dict[str, FileIndex] = {}
        places = _places_by_name(data, payload_end)
        if places is None:
            self._decoded = _by_name(self._decode(data))
        self._places = places or {}
        # The place where the aliases end, and the text after the shards.
        self._middle, self._behind = data.find(_BETWEEN), data[data.rfind(_BEHIND) :]

    def of(self, name: str) -> FileIndex:
        """Returns the shards and aliases of one tensor.

        Raises CheckpointCorruptError if the entries contradict each other.
        """
        places = self._places.get(name)
        if places is not None:
            self._decoded[name] = self._decode(_text_of(self._data, places, self._middle, self._behind))
            # The places may be gone already, because another thread has decoded the same entries.
            self._places.pop(name, None)
        return self._decoded.get(name, _NOTHING)

    def _decode(self, data: bytes) -> FileIndex:
        try:
            return decode_index(data, self._file, self._payload_end, self._regions)
        except FieldError as error:
            raise CheckpointCorruptError(f"{self._path}: index: {error}") from None


# Three integers for each entry of a tensor: an id of the entry's kind, and the start and end of the entry's text in the
# index, in bytes.
_Places = tuple[int, ...]


def _places_by_name(data: bytes, payload_end: int) -> dict[str, _Places] | None:
    """Returns the places of each tensor's entries in the text of an index.

    Returns None if the index must be decoded as a whole, because the index contradicts itself, differs from the text
    that `encode_index` would write, or has a name with an escape.
    """
    head_end, tensors_end = data.find(_BETWEEN), data.rfind(_BEHIND)
    if b"\\" in data or not data.startswith(_BEFORE) or head_end < 0 or data[tensors_end:] not in _ENDS:
        return None
    found: dict[str, _Places] = {}
    kinds: dict[bytes, int] = {}
    offsets, sizes = array("q"), array("q")
    for pattern, start, stop in ((_ALIAS, len(_BEFORE), head_end), (_SHARD, head_end + len(_BETWEEN), tensors_end)):
        for entry in pattern.finditer(data, start, stop):
            try:
                name = entry[2].decode()
            except UnicodeDecodeError:
                return None
            kind, before = kinds.setdefault(entry[1], len(kinds)), found.get(name, ())
            if entry.start() != start or kind in before[::3] or len(before) > 3 * _MOST_KINDS:
                return None
            start = entry.end()
            found[name] = (*before, kind, entry.start(), start)
            if pattern is _SHARD:
                sizes.append(int(entry[3]))
                offsets.append(int(entry[4]))
        if start != stop:
            return None
    return found if _are_apart(offsets, sizes, payload_end) else None


def _are_apart(offsets: Sequence[int], sizes: Sequence[int], payload_end: int) -> bool:
    """Returns True if no shards overlap, and no shard reaches past the payload."""
    order = sorted(range(len(offsets)), key=lambda number: (offsets[number], sizes[number]))
    stops = (offsets[number] + sizes[number] for number in order)
    return all(map(le, stops, chain((offsets[number] for number in order[1:]), (payload_end,))))


def _text_of(data: bytes, places: _Places, middle: int, behind: bytes) -> bytes:
    """Returns the text of an index that has only the entries at `places`."""
    parts: tuple[list[bytes], list[bytes]] = [], []
    for start, end in zip(places[1::3], places[2::3], strict=True):
        parts[start > middle].append(data[start:end].rstrip(b","))
    return b"".join((_BEFORE, b",".join(parts[0]), _BETWEEN, b",".join(parts[1]), behind))


def _by_name(index: FileIndex) -> dict[str, FileIndex]:
    found: defaultdict[str, tuple[list[StoredShard], list[Alias]]] = defaultdict(lambda: ([], []))
    for shard in index.shards:
        found[shard.key.name][0].append(shard)
    for alias in index.aliases:
        found[alias.key.name][1].append(alias)
    return {name: FileIndex(tuple(shards), tuple(aliases)) for name, (shards, aliases) in found.items()}
