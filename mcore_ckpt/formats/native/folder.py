"""Defines the folder that a checkpoint's files are read from, on a file system or in a remote store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from mcore_ckpt.checkpoint.damage import Damage, verify_files
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.plain_files import read_plain
from mcore_ckpt.checkpoint.reading import check_sizes, read_manifest
from mcore_ckpt.formats.contract import ReadTarget
from mcore_ckpt.formats.native.ranges import read_ranges
from mcore_ckpt.formats.native.stored_tensors import IndexFolder, LocalIndexes
from mcore_ckpt.io import tuning
from mcore_ckpt.io.file_copies import copy_checked
from mcore_ckpt.io.node_memory import is_memory


class Folder(IndexFolder, Protocol):
    """The folder of one checkpoint's files. The methods raise the errors of `checkpoint.reading`."""

    def manifest(self) -> Manifest: ...

    def check(self, records: Sequence[FileRecord]) -> None:
        """Raises CheckpointCorruptError if a file is missing or does not have the size in its record."""

    def plain(self, record: FileRecord) -> dict[str, Any]: ...

    def fill(self, files: Mapping[str, FileRecord], reads: Sequence[ReadTarget], check: bool = True) -> int: ...

    def fetch(self, record: FileRecord, target: Path) -> None:
        """Copies a whole file to the new file `target`.

        Raises CheckpointCorruptError if bytes differ from the record.
        """

    def verify(self, files: Sequence[FileRecord]) -> list[Damage]:
        """Reads whole files and lists all differences between a file and its record."""


@dataclass(frozen=True)
class LocalFolder(LocalIndexes):
    """A folder on a file system."""

    def manifest(self) -> Manifest:
        return read_manifest(self.place)

    def check(self, records: Sequence[FileRecord]) -> None:
        check_sizes(self.place, records)

    def plain(self, record: FileRecord) -> dict[str, Any]:
        return read_plain(self.place, record)

    def fill(self, files: Mapping[str, FileRecord], reads: Sequence[ReadTarget], check: bool = True) -> int:
        return read_ranges(self.place, files, reads, check, self._piece_bytes)

    @cached_property
    def _piece_bytes(self) -> int:
        with suppress(OSError):  # the type of the file system is unknown, as in a sandbox without /proc
            if is_memory(self.place):
                return tuning.READ_MEMORY_BYTES
        return tuning.READ_BYTES

    def fetch(self, record: FileRecord, target: Path) -> None:
        copy_checked(self.place / record.path, target, record.size, record.crc32)

    def verify(self, files: Sequence[FileRecord]) -> list[Damage]:
        return verify_files(self.place, files)
