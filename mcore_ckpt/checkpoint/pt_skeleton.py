"""Builds the skeleton of a `.pt` file: the file without its payload, which is the bytes of the tensors.

Under `torch.serialization.skip_data`, `torch.save` writes everything except the payload, and leaves room for the
payload. The zip directory contains the place of each tensor. A skeleton is small, because it keeps only the bytes
between the tensors. A save with a skeleton needs no pickling. The save copies tensors to known offsets, and writes the
tensors' CRCs to the places that the zip format has for CRCs.
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

from mcore_ckpt.checkpoint import zip_format as zf
from mcore_ckpt.checkpoint.file_names import INDEX_RECORD

# The version of the zip format (times ten) that a reader must support for a plain record, and the version for zip64.
_PLAIN_VERSION = 20
_ZIP64_VERSION = 45


@dataclass(frozen=True)
class PayloadSlot:
    """The places, in a file, of one tensor's bytes and of the CRC of these bytes. All numbers are in bytes."""

    offset: int
    nbytes: int
    descriptor_crc_at: int | None  # None for an empty record, which has no data descriptor
    directory_crc_at: int  # counted from the start of the zip directory


@dataclass(frozen=True)
class PtSkeleton:
    """A `.pt` file without its payload: the bytes that do not depend on the tensors' values.

    Attributes:
        slots: the place of each tensor, in the order given to `build_skeleton`, with ascending offsets.
        gaps: the bytes between the tensors, up to `records_end`, as pairs `(offset, bytes)`.
        records_end: the offset of torch's zip directory. In the finished file, the index record begins there.
        directory: the bytes of the zip directory's entries. The CRCs of tensors are still 0.
        entries: the number of entries in `directory`.
    """

    slots: tuple[PayloadSlot, ...]
    gaps: tuple[tuple[int, bytes], ...]
    records_end: int
    directory: bytes
    entries: int

    def tail(self, crcs: Sequence[int], index: bytes, index_crc: int) -> bytes:
        """Returns the bytes from `records_end` to the end of the file: index record, zip directory, end records.

        `crcs` are the CRC-32s of the tensors' bytes, in the order of `slots`.
        """
        directory = bytearray(self.directory)
        for slot, crc in zip(self.slots, crcs, strict=True):
            struct.pack_into("<I", directory, slot.directory_crc_at, crc)
        name = INDEX_RECORD.encode()
        sizes = (index_crc, len(index), len(index), len(name), 0)
        record = zf.LOCAL_HEADER.pack(zf.LOCAL_SIGNATURE, _PLAIN_VERSION, 0, 0, 0, 0, *sizes) + name
        directory += _directory_entry(name, index_crc, len(index), self.records_end)
        directory_at = self.records_end + len(record) + len(index)
        return record + index + bytes(directory) + _end_records(self.entries + 1, len(directory), directory_at)

    @property
    def index_offset(self) -> int:
        """The offset of the index's bytes in the file."""
        return self.records_end + zf.LOCAL_HEADER.size + len(INDEX_RECORD)


def _directory_entry(name: bytes, crc: int, size: int, header_at: int) -> bytes:
    extra = b""
    if header_at >= zf.MAX_32:
        extra = struct.pack("<HHQ", zf.ZIP64_FIELD, 8, header_at)
        header_at = zf.MAX_32
    versions = (_ZIP64_VERSION, _ZIP64_VERSION)
    sizes = (crc, size, size, len(name), len(extra), 0)
    entry = zf.DIRECTORY_ENTRY.pack(zf.DIRECTORY_SIGNATURE, *versions, 0, 0, 0, 0, *sizes, 0, 0, 0, header_at)
    return entry + name + extra


def _end_records(entries: int, size: int, offset: int) -> bytes:
    versions = (_ZIP64_VERSION, _ZIP64_VERSION)
    end_64 = zf.END_64.pack(zf.END_64_SIGNATURE, zf.END_64_LENGTH, *versions, 0, 0, entries, entries, size, offset)
    locator = zf.LOCATOR_64.pack(zf.LOCATOR_64_SIGNATURE, 0, offset + size, 1)
    few = min(entries, zf.MAX_16)
    end = zf.END.pack(zf.END_SIGNATURE, 0, 0, few, few, min(size, zf.MAX_32), min(offset, zf.MAX_32), 0)
    return end_64 + locator + end


def build_skeleton(tree: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> PtSkeleton:
    """Builds the skeleton of the file that `torch.save(tree)` would write. `slots[i]` belongs to `tensors[i]`.

    Args:
        tree: dicts, plain values and tensors. Each tensor must own its storage and fill it, so views are not allowed.
            Tensors on `meta` are not allowed either.
        tensors: the tensors of `tree`, each once, in the order in which torch pickles them.

    Raises ValueError if the tensors do not match the records that torch has written.
    """
    # torch writes into a memory file. Such a file is sparse, so the reserved payload takes no memory. torch names the
    # archive after the file's path. So torch gets the path of a link called `archive.pt`, and every archive has the
    # name `archive`.
    memory = os.memfd_create("mcore_ckpt_skeleton")
    try:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, "archive.pt")
            link.symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
            with torch.serialization.skip_data():
                torch.save(tree, link)
            with zipfile.ZipFile(link) as archive:
                records, directory_at = archive.infolist(), archive.start_dir
        return _read_skeleton(memory, records, directory_at, tensors)
    finally:
        os.close(memory)


def _read_skeleton(
    memory: int, records: list[zipfile.ZipInfo], directory_at: int, tensors: Sequence[torch.Tensor]
) -> PtSkeleton:
    crc_places = _directory_crc_places(records)
    by_name = {record.filename: record for record in records}
    slots = []
    for number, tensor in enumerate(tensors):
        record = by_name.get(f"archive/data/{number}")
        if record is None or record.file_size != tensor.nbytes:
            raise ValueError(
                f"tensor {number} of {tensor.nbytes} bytes does not match record {record} of torch's archive"
            )
        slots.append(_slot(memory, record, crc_places[record.filename]))
    if f"archive/data/{len(tensors)}" in by_name:
        raise ValueError(f"torch's archive has more than the {len(tensors)} tensors that were given")
    gaps = tuple(_gaps(memory, slots, directory_at))
    directory = os.pread(memory, crc_places[""], directory_at)
    return PtSkeleton(tuple(slots), gaps, directory_at, directory, len(records))


def _directory_crc_places(records: Iterable[zipfile.ZipInfo]) -> dict[str, int]:
    """Returns the position of each record's CRC in the directory, by record name. "" maps to the directory's size."""
    places, position = {}, 0
    for record in records:
        places[record.filename] = position + zf.DIRECTORY_CRC_OFFSET
        position += zf.DIRECTORY_ENTRY.size + len(record.filename.encode()) + len(record.extra) + len(record.comment)
    places[""] = position
    return places


def _slot(memory: int, record: zipfile.ZipInfo, directory_crc_at: int) -> PayloadSlot:
    *_, name_bytes, extra_bytes = zf.LOCAL_HEADER.unpack(os.pread(memory, zf.LOCAL_HEADER.size, record.header_offset))
    offset = record.header_offset + zf.LOCAL_HEADER.size + name_bytes + extra_bytes
    if not record.flag_bits & zf.DESCRIPTOR_FLAG:
        return PayloadSlot(offset, record.file_size, None, directory_crc_at)
    descriptor = offset + record.file_size
    (signature,) = struct.unpack("<I", os.pread(memory, 4, descriptor))
    if signature != zf.DESCRIPTOR_SIGNATURE:
        raise ValueError(f"record {record.filename} has no data descriptor after its bytes")
    return PayloadSlot(offset, record.file_size, descriptor + zf.DESCRIPTOR_CRC_OFFSET, directory_crc_at)


def _gaps(memory: int, slots: Iterable[PayloadSlot], end: int) -> Iterable[tuple[int, bytes]]:
    position = 0
    for slot in slots:
        if slot.offset > position:
            yield position, os.pread(memory, slot.offset - position, position)
        position = slot.offset + slot.nbytes
    if end > position:
        yield position, os.pread(memory, end - position, position)
