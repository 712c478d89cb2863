"""The zip directory of a file that `torch.save` wrote, believed only where it can be no other than torch's.

Every record is stored as it is: what is compressed may stand for any number of bytes. Sizes, places and names are
checked against the file and each other before anybody reads or allocates what they say.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32

# Structures of the zip format, from PKWARE's APPNOTE.TXT 6.3.10: 4.3.7, 4.3.12, 4.3.14 to 4.3.16; 4.5.3.
_LOCAL_HEADER = struct.Struct("<I2xHH16xHH")
_ENTRY = struct.Struct("<I4xHHxxxxIIIHHHH6xI")
_END_64 = struct.Struct("<IQ4xIIQQQQ")
_LOCATOR_64 = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_MAX_32, _MAX_16 = 0xFFFFFFFF, 0xFFFF
_ZIP64_FIELD = 1
# A data descriptor behind the bytes, and a name in UTF-8. Not: encryption.
_KNOWN_FLAGS = 0x0808

ReadAt = Callable[[int, int], bytes]
"""(offset, nbytes) -> those bytes; raises an error of its own where the file ends before."""


class ArchiveError(ValueError):
    """It is not what `torch.save` writes, was cut, or lies about itself."""


@dataclass(frozen=True)
class _Entry:
    """`room_end`: where the next record begins."""

    name: str
    crc32: int
    nbytes: int
    header_at: int
    room_end: int


class PtArchive:
    """Where the records of one archive are.

    Args:
        read_at: reads from the file.
        size: bytes of the file, all of which are the archive.

    Raises:
        ArchiveError: see there.
    """

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at = read_at
        directory_at, directory_bytes, count = _find_directory(read_at, size)
        entries = list(_entries(read_at(directory_at, directory_bytes), directory_at))
        if len(entries) != count:
            raise ArchiveError(f"its directory has {len(entries)} entries, not {count}")
        self._entries = _placed(entries, directory_at)
        pickles = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ArchiveError(f"it has {len(pickles)} records data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")
        order = self._root + "byteorder"
        if order in self._entries and (self.place("byteorder")[1] > 16 or self.read("byteorder") != b"little"):
            raise ArchiveError("it was written by a big-endian machine")

    @property
    def names(self) -> Collection[str]:
        """Of all records, with the folder they are in."""
        return self._entries.keys()

    def place(self, name: str) -> tuple[int, int]:
        """Where in the file a record's bytes begin, and how many they are. `name`: below the archive's own folder."""
        entry = self._entries.get(self._root + name)
        if entry is None:
            raise ArchiveError(f"it has no record {name[:80]!r}")
        head = self._read_at(entry.header_at, _LOCAL_HEADER.size)
        signature, flags, method, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(head)
        start = entry.header_at + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if signature != 0x04034B50 or method or flags & ~_KNOWN_FLAGS or start + entry.nbytes > entry.room_end:
            raise ArchiveError(f"record {entry.name!r} is not where its directory says, or overlaps another")
        if self._read_at(entry.header_at + _LOCAL_HEADER.size, name_bytes) != entry.name.encode():
            raise ArchiveError(f"record {entry.name!r} has another name where it begins")
        return start, entry.nbytes

    def read(self, name: str) -> bytes:
        """A small record, its CRC checked."""
        start, nbytes = self.place(name)
        if nbytes > limits.PICKLE_BYTES:
            raise ArchiveError(f"record {name!r} has {nbytes} bytes, more than {limits.PICKLE_BYTES}")
        data = self._read_at(start, nbytes)
        if crc32(data) != self._entries[self._root + name].crc32:
            raise ArchiveError(f"record {name!r} has a wrong CRC: it is damaged")
        return data


def _find_directory(read_at: ReadAt, size: int) -> tuple[int, int, int]:
    """Where the directory is: offset, bytes, entries. It ends where the end records begin, and these end the file."""
    if size < _END.size:
        raise ArchiveError("it is too short for an archive")
    end_at = size - _END.size
    signature, disk, of_directory, here, count, nbytes, offset, comment = _END.unpack(read_at(end_at, _END.size))
    if signature != 0x06054B50 or comment or disk or of_directory or here != count:
        raise ArchiveError("it does not end as an archive of torch does: cut, or by torch before 1.6")
    end_at, large = _find_large(read_at, end_at)
    for small, most, said in zip((count, nbytes, offset), (_MAX_16, _MAX_32, _MAX_32), large or (), strict=False):
        if small not in (most, said):
            raise ArchiveError("its two end records contradict each other")
    count, nbytes, offset = large or (count, nbytes, offset)
    if nbytes > limits.DIRECTORY_BYTES or offset + nbytes != end_at:
        raise ArchiveError(f"its directory of {nbytes} bytes at byte {offset} does not end at byte {end_at}")
    return offset, nbytes, count


def _find_large(read_at: ReadAt, end_at: int) -> tuple[int, tuple[int, int, int] | None]:
    """Where the end records begin, and entries, bytes and offset of the directory if there is a zip64 record."""
    locator_at = end_at - _LOCATOR_64.size
    if locator_at < _END_64.size:
        return end_at, None
    signature, disk, large_at, disks = _LOCATOR_64.unpack(read_at(locator_at, _LOCATOR_64.size))
    if signature != 0x07064B50:
        return end_at, None
    if disk or disks != 1 or large_at != locator_at - _END_64.size:
        raise ArchiveError("its zip64 end record is not where it should be")
    signature, length, disk, of_directory, here, count, nbytes, offset = _END_64.unpack(read_at(large_at, _END_64.size))
    if signature != 0x06064B50 or length != _END_64.size - 12 or disk or of_directory or here != count:
        raise ArchiveError("its zip64 end record is none")
    return large_at, (count, nbytes, offset)


def _entries(directory: bytes, end: int) -> Iterator[_Entry]:
    at = 0
    while at < len(directory):
        if at + _ENTRY.size > len(directory):
            raise ArchiveError("its directory was cut")
        (signature, flags, method, crc, stored, nbytes, name_bytes, extra_bytes, comment, disk, header_at) = (
            _ENTRY.unpack_from(directory, at)
        )
        at += _ENTRY.size
        raw = directory[at : at + name_bytes]
        extra = directory[at + name_bytes : at + name_bytes + extra_bytes]
        at += name_bytes + extra_bytes
        if signature != 0x02014B50 or comment or disk or at > len(directory):
            raise ArchiveError("its directory is damaged")
        name = _checked_name(raw)
        if method or flags & ~_KNOWN_FLAGS:
            raise ArchiveError(f"record {name!r} is compressed or encrypted: torch stores records as they are")
        nbytes, stored, header_at = _large_numbers(name, extra, (nbytes, stored, header_at))
        if stored != nbytes:
            raise ArchiveError(f"record {name!r} of {nbytes} bytes is stored in {stored}")
        yield _Entry(name, crc, nbytes, header_at, end)


def _checked_name(raw: bytes) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise ArchiveError(f"a record's name is no UTF-8: {raw[:80]!r}") from None
    if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ArchiveError(f"{name[:80]!r} is not a record of torch")
    return name


def _large_numbers(name: str, extra: bytes, small: tuple[int, int, int]) -> Iterator[int]:
    """Uncompressed size, compressed size and offset, each from the zip64 field where its own is all ones."""
    field = b""
    while extra:
        if len(extra) < 4 or len(extra) < 4 + (length := int.from_bytes(extra[2:4], "little")):
            raise ArchiveError(f"record {name!r} has a damaged extra field")
        if int.from_bytes(extra[:2], "little") == _ZIP64_FIELD:
            if field:
                raise ArchiveError(f"record {name!r} has two zip64 fields")
            field = extra[4 : 4 + length]
        extra = extra[4 + length :]
    for number in small:
        if number != _MAX_32:
            yield number
        elif len(field) < 8:
            raise ArchiveError(f"record {name!r} lacks its zip64 field")
        else:
            yield int.from_bytes(field[:8], "little")
            field = field[8:]


def _placed(entries: list[_Entry], end: int) -> dict[str, _Entry]:
    """By name, each with the room up to the next one. Raises ArchiveError if one does not fit into its own."""
    placed: dict[str, _Entry] = {}
    for entry in sorted(entries, key=lambda e: e.header_at, reverse=True):
        least = entry.header_at + _LOCAL_HEADER.size + len(entry.name.encode()) + entry.nbytes
        if least > end:
            raise ArchiveError(f"record {entry.name!r} overlaps another, or leaves the file")
        if entry.name in placed:
            raise ArchiveError(f"record {entry.name!r} is there twice")
        placed[entry.name] = _Entry(entry.name, entry.crc32, entry.nbytes, entry.header_at, end)
        end = entry.header_at
    return placed
