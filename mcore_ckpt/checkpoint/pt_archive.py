"""Reads the zip directory of a file that `torch.save` wrote, and refuses everything that torch does not write.

Compressed records are refused, because a few compressed bytes can expand to any number of bytes. Sizes, places and
names are checked against the file and against each other before they decide what is read or allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from mcore_ckpt.checkpoint import zip_format as zf
from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32

# The flags that torch sets. All other flags are refused, encryption among them.
_KNOWN_FLAGS = zf.DESCRIPTOR_FLAG | zf.UTF8_FLAG

ReadAt = Callable[[int, int], bytes]
"""Reads bytes: (offset, nbytes) -> bytes. Raises its own type of error if the file is too short."""


class ArchiveError(ValueError):
    """A file is not what `torch.save` writes, was cut, or contradicts itself."""


@dataclass(slots=True)  # not frozen: `_placed` sets `next_at`, because copies would take a third more memory
class _Entry:
    """The zip directory's entry for one record.

    The record's header begins at byte `header_at` of the file. The next record, or the zip directory, begins at byte
    `next_at`.
    """

    name: str
    crc32: int
    nbytes: int
    header_at: int
    next_at: int


class PtArchive:
    """The records of an archive, and their places in its file. The file must contain nothing except the archive.

    Raises ArchiveError if the file is not what `torch.save` writes, was cut, or contradicts itself.
    """

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at = read_at
        directory_at, directory_bytes, count = _find_directory(read_at, size)
        # Every record has an entry and a header, so the size of the file limits the number of entries.
        if count * (zf.LOCAL_HEADER.size + zf.DIRECTORY_ENTRY.size) > size:
            raise ArchiveError(f"its end record gives {count} entries, more than {size} bytes can have")
        entries = list(islice(_entries(read_at(directory_at, directory_bytes), directory_at), count + 1))
        if len(entries) != count:
            raise ArchiveError(f"its zip directory does not have the {count} entries that its end record gives")
        self._entries = _placed(entries, directory_at)
        pickles = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ArchiveError(f"it has {len(pickles)} records called data.pkl, not one")
        self._root = pickles[0].removesuffix("data.pkl")
        order = self._root + "byteorder"
        if order in self._entries and (self.place("byteorder")[1] > 16 or self.read("byteorder") != b"little"):
            raise ArchiveError("it was written by a big-endian machine, which is not supported")

    @property
    def names(self) -> Collection[str]:
        """The names of all records. Each name includes the folders, such as `archive/data/0`."""
        return self._entries.keys()

    def place(self, name: str) -> tuple[int, int]:
        """Returns the offset and size, in bytes, of a record's content. `name` leaves out the archive's top folder."""
        entry = self._entries.get(self._root + name)
        if entry is None:
            raise ArchiveError(f"it has no record {name[:80]!r}")
        head = self._read_at(entry.header_at, zf.LOCAL_HEADER.size)
        signature, _, flags, method, *_, name_bytes, extra_bytes = zf.LOCAL_HEADER.unpack(head)
        name_at = entry.header_at + zf.LOCAL_HEADER.size
        start = name_at + name_bytes + extra_bytes
        if signature != zf.LOCAL_SIGNATURE or method or flags & ~_KNOWN_FLAGS or start + entry.nbytes > entry.next_at:
            raise ArchiveError(
                f"record {entry.name!r} is not where the zip directory places it, or overlaps another record"
            )
        if self._read_at(name_at, name_bytes) != entry.name.encode():
            raise ArchiveError(f"record {entry.name!r} has a different name in its own header")
        return start, entry.nbytes

    def read(self, name: str) -> bytes:
        """Reads a small record and checks its CRC."""
        start, nbytes = self.place(name)
        if nbytes > limits.PICKLE_BYTES:
            raise ArchiveError(f"record {name!r} has {nbytes} bytes, more than {limits.PICKLE_BYTES}")
        data = self._read_at(start, nbytes)
        if crc32(data) != self._entries[self._root + name].crc32:
            raise ArchiveError(f"record {name!r} has a wrong CRC: it is damaged")
        return data


def _find_directory(read_at: ReadAt, size: int) -> tuple[int, int, int]:
    """Returns the directory's offset and size, in bytes, and its number of entries.

    Raises ArchiveError unless the end records follow the directory and are the last bytes of the file.
    """
    if size < zf.END.size:
        raise ArchiveError("it is too short for an archive")
    end_at = size - zf.END.size
    signature, disk, of_directory, here, count, nbytes, offset, comment = zf.END.unpack(read_at(end_at, zf.END.size))
    if signature != zf.END_SIGNATURE or comment or disk or of_directory or here != count:
        raise ArchiveError("it does not end like torch's archives: it was cut, or written by torch before 1.6")
    end_at, large = _find_zip64_end(read_at, end_at)
    small = ((count, zf.MAX_16), (nbytes, zf.MAX_32), (offset, zf.MAX_32))
    if large and any(number not in (most, other) for (number, most), other in zip(small, large, strict=True)):
        raise ArchiveError("its two end records contradict each other")
    count, nbytes, offset = large or (count, nbytes, offset)
    if nbytes > limits.DIRECTORY_BYTES or offset + nbytes != end_at:
        raise ArchiveError(f"its zip directory of {nbytes} bytes at byte {offset} does not end at byte {end_at}")
    return offset, nbytes, count


def _find_zip64_end(read_at: ReadAt, end_at: int) -> tuple[int, tuple[int, int, int] | None]:
    """Returns the offset of the first end record, and the directory as the zip64 end record describes it.

    The description is (number of entries, size in bytes, offset) of the directory; None without a zip64 end record.
    """
    locator_at = end_at - zf.LOCATOR_64.size
    if locator_at < zf.END_64.size:
        return end_at, None
    signature, disk, large_at, disks = zf.LOCATOR_64.unpack(read_at(locator_at, zf.LOCATOR_64.size))
    if signature != zf.LOCATOR_64_SIGNATURE:
        return end_at, None
    if disk or disks != 1 or large_at != locator_at - zf.END_64.size:
        raise ArchiveError("its zip64 end record is not where it should be")
    signature, length, _, _, disk, of_directory, here, count, nbytes, offset = zf.END_64.unpack(
        read_at(large_at, zf.END_64.size)
    )
    if signature != zf.END_64_SIGNATURE or length != zf.END_64_LENGTH or disk or of_directory or here != count:
        raise ArchiveError("its zip64 end record is damaged")
    return large_at, (count, nbytes, offset)


def _entries(directory: bytes, end: int) -> Iterator[_Entry]:
    at = 0
    while at < len(directory):
        if at + zf.DIRECTORY_ENTRY.size > len(directory):
            raise ArchiveError("its zip directory was cut")
        (signature, _, _, flags, method, _, _, crc, stored, nbytes, *lengths, disk, _, _, header_at) = (
            zf.DIRECTORY_ENTRY.unpack_from(directory, at)
        )
        name_bytes, extra_bytes, comment = lengths
        at += zf.DIRECTORY_ENTRY.size
        raw = directory[at : at + name_bytes]
        extra = directory[at + name_bytes : at + name_bytes + extra_bytes]
        at += name_bytes + extra_bytes
        if signature != zf.DIRECTORY_SIGNATURE or comment or disk or at > len(directory):
            raise ArchiveError("its zip directory is damaged")
        name = _checked_name(raw)
        if method or flags & ~_KNOWN_FLAGS:
            raise ArchiveError(f"record {name!r} is compressed or encrypted, unlike the records that torch writes")
        nbytes, stored, header_at = _large_numbers(name, extra, (nbytes, stored, header_at))
        if stored != nbytes:
            raise ArchiveError(f"record {name!r} has {nbytes} bytes, but its stored size is {stored}")
        yield _Entry(name, crc, nbytes, header_at, end)


def _checked_name(raw: bytes) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise ArchiveError(f"the name of a record is not UTF-8: {raw[:80]!r}") from None
    if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ArchiveError(f"torch writes no record called {name[:80]!r}")
    return name


def _large_numbers(name: str, extra: bytes, small: tuple[int, int, int]) -> Iterator[int]:
    """Yields size, stored size and offset. A number that is MAX_32 in `small` is read from the zip64 field."""
    field = b""
    while extra:
        if len(extra) < 4 or len(extra) < 4 + (length := int.from_bytes(extra[2:4], "little")):
            raise ArchiveError(f"record {name!r} has a damaged extra field")
        if int.from_bytes(extra[:2], "little") == zf.ZIP64_FIELD:
            if field:
                raise ArchiveError(f"record {name!r} has two zip64 fields")
            field = extra[4 : 4 + length]
        extra = extra[4 + length :]
    for number in small:
        if number != zf.MAX_32:
            yield number
        elif len(field) < 8:
            raise ArchiveError(f"record {name!r} lacks its zip64 field")
        else:
            yield int.from_bytes(field[:8], "little")
            field = field[8:]


def _placed(entries: list[_Entry], end: int) -> dict[str, _Entry]:
    """Returns the entries by name and sets their `next_at`. Raises ArchiveError if records overlap."""
    placed: dict[str, _Entry] = {}
    entries.sort(key=lambda e: e.header_at, reverse=True)
    for entry in entries:
        least = entry.header_at + zf.LOCAL_HEADER.size + len(entry.name.encode()) + entry.nbytes
        if least > end:
            raise ArchiveError(f"record {entry.name!r} overlaps another record or the zip directory")
        if entry.name in placed:
            raise ArchiveError(f"record {entry.name!r} is listed twice")
        entry.next_at = end
        placed[entry.name] = entry
        end = entry.header_at
    return placed
