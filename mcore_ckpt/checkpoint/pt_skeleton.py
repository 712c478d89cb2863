"""The bytes of a `.pt` file without its payload.

`torch.save` under `torch.serialization.skip_data` writes everything but the tensors' bytes and reserves
their place; the zip directory says where. What is kept of it is small: the bytes between the payloads. A save is then
copies into known offsets, and CRCs patched where zip wants them, with no pickling.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INDEX_RECORD = "archive/.mcore_ckpt/index.json"

# Structures of the zip format, from PKWARE's APPNOTE.TXT 6.3.10: 4.3.7, 4.3.9, 4.3.12, 4.3.14 to 4.3.16.
_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_DIRECTORY_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
_END_64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_DESCRIPTOR_SIGNATURE = 0x08074B50
_DESCRIPTOR_CRC_OFFSET = 4
_DIRECTORY_CRC_OFFSET = 16
_ZIP64_VERSION = 45
_MAX_32 = 0xFFFFFFFF
_MAX_16 = 0xFFFF


@dataclass(frozen=True)
class PayloadSlot:
    """Where one tensor's bytes go in the file, and where zip wants their CRC (both in bytes)."""

    offset: int
    nbytes: int
    descriptor_crc_at: int | None  # None for an empty record: it has no data descriptor
    directory_crc_at: int  # in the zip directory


@dataclass(frozen=True)
class PtSkeleton:
    """Everything of a `.pt` file that does not depend on the tensors' values.

    Attributes:
        slots: one per tensor, in the order given to `build_skeleton`, ascending in offset.
        gaps: `(offset, bytes)` between the payloads, up to `records_end`.
        records_end: where the zip directory of torch began: the index record goes here.
        directory: the zip directory's entries, CRCs of payloads still 0.
        entries: how many those are.
    """

    slots: tuple[PayloadSlot, ...]
    gaps: tuple[tuple[int, bytes], ...]
    records_end: int
    directory: bytes
    entries: int

    def tail(self, crcs: Sequence[int], index: bytes, index_crc: int) -> bytes:
        """The bytes from `records_end` to the end of the file: the index record, the directory, the end records."""
        directory = bytearray(self.directory)
        for slot, crc in zip(self.slots, crcs, strict=True):
            struct.pack_into("<I", directory, slot.directory_crc_at, crc)
        name = INDEX_RECORD.encode()
        record = _LOCAL_HEADER.pack(0x04034B50, 20, 0, 0, 0, 0, index_crc, len(index), len(index), len(name), 0) + name
        directory += _directory_entry(name, index_crc, len(index), self.records_end)
        directory_at = self.records_end + len(record) + len(index)
        return record + index + bytes(directory) + _end_records(self.entries + 1, len(directory), directory_at)

    @property
    def index_offset(self) -> int:
        """Where the index's bytes begin in the file."""
        return self.records_end + _LOCAL_HEADER.size + len(INDEX_RECORD)


def _directory_entry(name: bytes, crc: int, size: int, header_at: int) -> bytes:
    extra = b""
    if header_at >= _MAX_32:
        extra = struct.pack("<HHQ", 1, 8, header_at)
        header_at = _MAX_32
    fields = (
        0x02014B50,
        _ZIP64_VERSION,
        _ZIP64_VERSION,
        0,
        0,
        0,
        0,
        crc,
        size,
        size,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        header_at,
    )
    return _DIRECTORY_ENTRY.pack(*fields) + name + extra


def _end_records(entries: int, size: int, offset: int) -> bytes:
    end_64 = _END_64.pack(
        0x06064B50, _END_64.size - 12, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0, entries, entries, size, offset
    )
    locator = _LOCATOR_64.pack(0x07064B50, 0, offset + size, 1)
    few = min(entries, _MAX_16)
    end = _END.pack(0x06054B50, 0, 0, few, few, min(size, _MAX_32), min(offset, _MAX_32), 0)
    return end_64 + locator + end


def build_skeleton(tree: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> PtSkeleton:
    """The image of `torch.save(tree)`.

    Args:
        tree: dicts, plain values and tensors; each tensor owns its storage and fills it (no views, nothing on `meta`).
        tensors: the tensors in `tree` in the order torch pickles them, each once.

    Returns:
        The image; `slots[i]` belongs to `tensors[i]`.

    Raises:
        ValueError: the tensors do not match the records torch has written.
    """
    # A memory file keeps the reserved payload sparse; the link gives the archive the same name in every run.
    memory = os.memfd_create("mcore_ckpt_image")
    try:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, "archive.pt")
            link.symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
            with torch.serialization.skip_data():
                torch.save(tree, link)
            with zipfile.ZipFile(link) as archive:
                records, directory_at = archive.infolist(), archive.start_dir
        return _read_image(memory, records, directory_at, tensors)
    finally:
        os.close(memory)


def _read_image(
    memory: int, records: list[zipfile.ZipInfo], directory_at: int, tensors: Sequence[torch.Tensor]
) -> PtSkeleton:
    crc_places = _directory_crc_places(records)
    by_name = {record.filename: record for record in records}
    slots = []
    for number, tensor in enumerate(tensors):
        record = by_name.get(f"archive/data/{number}")
        if record is None or record.file_size != tensor.nbytes:
            raise ValueError(f"tensor {number} of {tensor.nbytes} bytes is not record {record} of the archive")
        slots.append(_slot(memory, record, crc_places[record.filename]))
    if f"archive/data/{len(tensors)}" in by_name:
        raise ValueError(f"the archive holds more than the {len(tensors)} tensors named")
    gaps = tuple(_gaps(memory, slots, directory_at))
    directory = os.pread(memory, crc_places[""], directory_at)
    return PtSkeleton(tuple(slots), gaps, directory_at, directory, len(records))


def _directory_crc_places(records: Iterable[zipfile.ZipInfo]) -> dict[str, int]:
    """Position of each record's CRC in the directory; under "" the directory's size."""
    places, position = {}, 0
    for record in records:
        places[record.filename] = position + _DIRECTORY_CRC_OFFSET
        position += _DIRECTORY_ENTRY.size + len(record.filename.encode()) + len(record.extra) + len(record.comment)
    places[""] = position
    return places


def _slot(memory: int, record: zipfile.ZipInfo, directory_crc_at: int) -> PayloadSlot:
    header = _LOCAL_HEADER.unpack(os.pread(memory, _LOCAL_HEADER.size, record.header_offset))
    offset = record.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
    if not record.flag_bits & 0x8:
        return PayloadSlot(offset, record.file_size, None, directory_crc_at)
    descriptor = offset + record.file_size
    (signature,) = struct.unpack("<I", os.pread(memory, 4, descriptor))
    if signature != _DESCRIPTOR_SIGNATURE:
        raise ValueError(f"record {record.filename} has no data descriptor where zip puts it")
    return PayloadSlot(offset, record.file_size, descriptor + _DESCRIPTOR_CRC_OFFSET, directory_crc_at)


def _gaps(memory: int, slots: Iterable[PayloadSlot], end: int) -> Iterable[tuple[int, bytes]]:
    position = 0
    for slot in slots:
        if slot.offset > position:
            yield position, os.pread(memory, slot.offset - position, position)
        position = slot.offset + slot.nbytes
    if end > position:
        yield position, os.pread(memory, end - position, position)
