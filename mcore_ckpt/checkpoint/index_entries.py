"""Decodes an index tensor by tensor, because a rank needs few of the tensors in most files that it looks into."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import le
from pathlib import Path

from mcore_ckpt.checkpoint.index import Alias, FileIndex, decode_index, encode_index
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.json_fields import FieldError
from mcore_ckpt.sharding.plan import StoredShard

# The texts of entries as `encode_index` writes them. They are sought only in an index without escapes, where every
# quote begins or ends a string. What these let through is checked when the entry is decoded.
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
# The text of an index before the aliases, between them and the shards, and from there to the version.
_BEFORE, _BETWEEN, _BEHIND = encode_index(_NOTHING).removesuffix(b"1}").replace(b"[]", b"[\n]").split(b"\n")


class IndexEntries:
    """The index of a file, of which each tensor's entries are decoded when they are asked for.

    That no tensor is in the index twice, and that no two overlap, is checked for all of them at once.

    Args:
        data: the bytes of the index. Their CRC must have been checked.
        file: the path of the file in the manifest.
        payload_end: as in `decode_index`.
        path: the path or URL of the file, for messages.

    Raises:
        CheckpointCorruptError: the data are not an index, or the numbers in the index contradict each other.
    """

    def __init__(self, data: bytes, file: str, payload_end: int, path: Path | str) -> None:
        self._file, self._payload_end, self._path = file, payload_end, path
        self._decoded: dict[str, FileIndex] = {}
        texts = _texts_by_name(data, payload_end)
        if texts is None:
            self._decoded = _by_name(self._decode(data))
        self._texts = texts or {}

    def of(self, name: str) -> FileIndex:
        """Returns the shards and aliases of one tensor. Raises CheckpointCorruptError if they contradict each other."""
        text = self._texts.get(name)
        if text is not None:
            self._decoded[name] = self._decode(text)
            # Another thread may have decoded the same entries.
            self._texts.pop(name, None)
        return self._decoded.get(name, _NOTHING)

    def _decode(self, data: bytes) -> FileIndex:
        try:
            return decode_index(data, self._file, self._payload_end)
        except FieldError as error:
            raise CheckpointCorruptError(f"{self._path}: index: {error}") from None


def _texts_by_name(data: bytes, payload_end: int) -> dict[str, bytes] | None:
    """Returns, for each tensor, the text of an index of its entries alone.

    Returns None if the index must be decoded as a whole: it contradicts itself, or `encode_index` would write it in
    another way, or a name in it has an escape.
    """
    head_end, tensors_end = data.find(_BETWEEN), data.rfind(_BEHIND)
    version = data[tensors_end + len(_BEHIND) :]
    if b"\\" in data or not data.startswith(_BEFORE) or head_end < 0 or version not in (b"1}", b"2}"):
        return None
    aliases = _entries(_ALIAS, data, len(_BEFORE), head_end)
    shards = _entries(_SHARD, data, head_end + len(_BETWEEN), tensors_end)
    if aliases is None or shards is None or not _are_apart([shard.groups()[2:] for shard in shards], payload_end):
        return None
    keys = {entry.group(1, 2) for entry in chain(aliases, shards)}
    if len(keys) < len(aliases) + len(shards):
        return None
    by_name: defaultdict[bytes, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
    for number, entries in enumerate((aliases, shards)):
        for entry in entries:
            by_name[entry[2]][number].append(entry[0].rstrip(b","))
    try:
        return {
            name.decode(): b"".join((_BEFORE, b",".join(of_aliases), _BETWEEN, b",".join(of_shards), _BEHIND, version))
            for name, (of_aliases, of_shards) in by_name.items()
        }
    except UnicodeDecodeError:
        return None


def _entries(pattern: re.Pattern[bytes], data: bytes, start: int, stop: int) -> list[re.Match[bytes]] | None:
    """Returns the entries in the text of a list, or None if there is anything else in it."""
    found, at = [], start
    for entry in pattern.finditer(data, start, stop):
        if entry.start() != at:
            return None
        found.append(entry)
        at = entry.end()
    return found if at == stop else None


def _are_apart(sizes: Sequence[Sequence[bytes]], payload_end: int) -> bool:
    """Returns True if shards, given as (nbytes, offset), neither overlap nor reach past the payload."""
    places = sorted((int(offset), int(nbytes)) for nbytes, offset in sizes)
    stops = (offset + nbytes for offset, nbytes in places)
    return all(map(le, stops, chain((offset for offset, _ in places[1:]), (payload_end,))))


def _by_name(index: FileIndex) -> dict[str, FileIndex]:
    found: defaultdict[str, tuple[list[StoredShard], list[Alias]]] = defaultdict(lambda: ([], []))
    for shard in index.shards:
        found[shard.key.name][0].append(shard)
    for alias in index.aliases:
        found[alias.key.name][1].append(alias)
    return {name: FileIndex(tuple(shards), tuple(aliases)) for name, (shards, aliases) in found.items()}
