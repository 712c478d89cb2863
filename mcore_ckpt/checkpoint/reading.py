"""Opens the files of one checkpoint folder, and checks each file against the manifest before its contents are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.index import FileIndex, decode_index
from mcore_ckpt.checkpoint.index_entries import IndexEntries
from mcore_ckpt.checkpoint.manifest import (
    FileRecord,
    IndexPlace,
    Manifest,
    ManifestSummary,
    NewerFormatError,
    decode_manifest,
    decode_summary,
)
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io import limits, tuning
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import inside, open_regular, read_exact, read_small
from mcore_ckpt.io.json_fields import FieldError
from mcore_ckpt.io.threads import results_of

Decoded = TypeVar("Decoded")


def read_manifest(role_dir: Path, manifest_file: str = file_names.MANIFEST_FILE) -> Manifest:
    """Reads the manifest in a role's folder.

    Raises CheckpointNotFoundError if the manifest is missing, which means that the folder is not a checkpoint. Raises
    CheckpointCorruptError if the manifest cannot be read, is damaged, or has a newer format version.
    """
    path = inside(role_dir, manifest_file)
    return parse_manifest(_manifest_data(path), path)


def read_manifest_summary(role_dir: Path) -> ManifestSummary:
    """Reads only the part of a role's manifest that a listing needs. Reading the whole manifest takes much longer.

    Raises as `read_manifest` does.
    """
    path = inside(role_dir, file_names.MANIFEST_FILE)
    return _decoded(_manifest_data(path), path, decode_summary)


def manifest_bytes(role_dir: Path) -> tuple[Path, bytes]:
    """Returns the path and the bytes of the manifest in a role's folder. Raises like `read_manifest`."""
    path = inside(role_dir, file_names.MANIFEST_FILE)
    return path, _manifest_data(path)


def _manifest_data(path: Path) -> bytes:
    try:
        return read_small(path, limits.MANIFEST_BYTES)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{path}: missing, so this folder is not a checkpoint. Perhaps its save did not finish: use another step"
        ) from None
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from error


def parse_manifest(data: bytes, path: Path | str) -> Manifest:
    """Decodes a manifest.

    Raises CheckpointCorruptError, which names `path`, if the manifest is damaged or has a newer format version.
    """
    return _decoded(data, path, decode_manifest)


def _decoded(data: bytes, path: Path | str, decode: Callable[[bytes], Decoded]) -> Decoded:
    try:
        return decode(data)
    except (FieldError, NewerFormatError) as error:
        raise CheckpointCorruptError(f"{path}: {error}") from None


class _ManifestStore(Protocol):
    def url_of(self, key: str) -> str: ...
    def read_all(self, key: str, most: int) -> bytes: ...


def read_remote_manifest(store: _ManifestStore, key: str) -> Manifest:
    """Reads a manifest in a remote store. Raises FileNotFoundError, CheckpointCorruptError, RemoteError."""
    path = f"{key}/{file_names.MANIFEST_FILE}"
    return parse_manifest(store.read_all(path, limits.MANIFEST_BYTES), store.url_of(path))


@contextmanager
def open_file(role_dir: Path, record: FileRecord) -> Iterator[int]:
    """Opens a file, checks that it has the size in the manifest, and yields its descriptor.

    Raises CheckpointCorruptError if the file is missing, cannot be opened, has another size, is not a regular file, or
    is a link that leads out of the folder.
    """
    with _opened(inside(role_dir, record.path), record) as descriptor:
        yield descriptor


def check_sizes(role_dir: Path, records: Sequence[FileRecord]) -> None:
    """Checks that files can be opened and have the sizes in the manifest.

    Raises CheckpointCorruptError as `open_file` does.

    A folder may have as many files as there are ranks. So this function looks for links in a folder's path only once
    per folder, and checks many files at a time.
    """
    for folder in {os.path.dirname(record.path) for record in records}:
        inside(role_dir, folder)

    def check(record: FileRecord) -> None:
        path = role_dir / record.path
        with _opened(inside(role_dir, record.path) if path.is_symlink() else path, record):
            pass

    results_of(records, check, tuning.LOOK_THREADS)


@contextmanager
def _opened(path: Path, record: FileRecord) -> Iterator[int]:
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        raise CheckpointCorruptError(
            f"{path}: missing; the manifest lists this file with {record.size} bytes, written by rank {record.rank}"
        ) from None
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be opened: {error}") from error
    try:
        size = os.fstat(descriptor).st_size
        if size != record.size:
            raise CheckpointCorruptError(
                f"{path}: has {size} bytes, not the {record.size} of the manifest: it was cut or replaced"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def read_index(role_dir: Path, record: FileRecord) -> FileIndex:
    """Reads a file's index and checks its checksum and all numbers in it. Raises CheckpointCorruptError."""
    path = role_dir / record.path
    data, place = _index_data(role_dir, record), _index_of(record)
    _check_index(data, place, path)
    try:
        return decode_index(data, record.path, place.offset)
    except FieldError as error:
        raise CheckpointCorruptError(f"{path}: index: {error}") from None


def read_entries(role_dir: Path, record: FileRecord) -> IndexEntries:
    """Reads a file's index. Decodes an entry only when a caller asks for it. Raises CheckpointCorruptError."""
    return parse_entries(_index_data(role_dir, record), record, role_dir / record.path)


def parse_entries(data: bytes, record: FileRecord, path: Path | str) -> IndexEntries:
    """Opens the bytes of an index, and checks them as `read_entries` does. Errors name `path`."""
    place = _index_of(record)
    _check_index(data, place, path)
    return IndexEntries(data, record.path, place.offset, path)


def _index_of(record: FileRecord) -> IndexPlace:
    assert record.index is not None
    return record.index


def _index_data(role_dir: Path, record: FileRecord) -> bytes:
    path, place = role_dir / record.path, _index_of(record)
    check_size(path, "an index", place.size, limits.INDEX_BYTES)
    with open_file(role_dir, record) as descriptor:
        return read_exact(descriptor, place.size, place.offset, path)


def _check_index(data: bytes, place: IndexPlace, path: Path | str) -> None:
    if crc32(data) != place.crc32:
        raise CheckpointCorruptError(
            f"{path}: the index at byte {place.offset} has a wrong CRC: the index is damaged, or belongs to another "
            "file"
        )


def check_size(path: Path | str, what: str, size: int, most: int) -> None:
    """Raises CheckpointCorruptError if `size` is above `most`, the largest number of bytes to read into memory."""
    if size > most:
        raise CheckpointCorruptError(
            f"{path}: the manifest lists {what} of {size} bytes, more than the {most} that are read into memory: the "
            "manifest is damaged or forged"
        )


def read_checked(role_dir: Path, record: FileRecord, most: int) -> bytes:
    """Reads a whole file and checks its size and CRC.

    Raises CheckpointCorruptError if the file is damaged, or has more than `most` bytes.
    """
    path = role_dir / record.path
    check_size(path, "a file", record.size, most)
    with open_file(role_dir, record) as descriptor:
        data = read_exact(descriptor, record.size, 0, path)
    check_crc(crc32(data), record, path)
    return data


def check_crc(found: int, record: FileRecord, path: Path | str) -> None:
    """Raises CheckpointCorruptError, which names `path`, if `found` is not the CRC of the file in the manifest."""
    if found != record.crc32:
        raise CheckpointCorruptError(wrong_crc(path))


def wrong_crc(path: Path | str) -> str:
    """Returns the message for a file whose CRC is wrong."""
    return f"{path}: has a wrong CRC: the file is damaged, or is another file with the same name"
