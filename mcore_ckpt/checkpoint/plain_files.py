"""Reads and writes small `.pt` files of plain values, which `torch.load(weights_only=True)` opens, too."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.manifest import FileRecord, WrittenFile
from mcore_ckpt.checkpoint.pt_values import decode_pt
from mcore_ckpt.checkpoint.reading import check_crc, read_checked
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import make_folders, write_file


def pickle_plain(value: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a small `.pt` file with these values, and checks them (`check_plain`)."""
    return check_plain(pickle_unchecked(value))


def pickle_unchecked(value: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a small `.pt` file with these values.

    Skips the check, which would take several times as long as the pickling.
    """
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def check_plain(data: bytes) -> bytes:
    """Checks and returns `data`, the bytes of a small `.pt` file.

    Raises ValueError if the file is too large, or if torch (`weights_only`) or `read_plain` could not open the file.
    """
    if len(data) > limits.PLAIN_BYTES:
        raise ValueError(f"has {len(data)} bytes, more than the {limits.PLAIN_BYTES} that are allowed")
    try:
        torch.load(io.BytesIO(data), weights_only=True)
        decode_pt(data)
    except Exception as error:
        raise ValueError(f"could not be opened again: {error}") from error
    return data


def write_plain(role_dir: Path, path: str, kind: str, data: bytes) -> WrittenFile:
    """Writes a file durably, with bytes from `pickle_plain`. Raises OSError."""
    make_folders(role_dir, path)
    write_file(role_dir / path, [data])
    return WrittenFile(path, kind, len(data), crc32(data))


def read_plain(role_dir: Path, record: FileRecord) -> dict[str, Any]:
    """Reads and checks the values in a small `.pt` file. Executes no code from it. Raises CheckpointCorruptError."""
    path = role_dir / record.path
    return _decode_plain(read_checked(role_dir, record, limits.PLAIN_BYTES), path)


def parse_plain(data: bytes, record: FileRecord, path: Path | str) -> dict[str, Any]:
    """Decodes the bytes of a small `.pt` file, and checks them as `read_plain` does. Errors name `path`."""
    check_crc(crc32(data), record, path)
    return _decode_plain(data, path)


def _decode_plain(data: bytes, path: Path | str) -> dict[str, Any]:
    try:
        value = decode_pt(data)
    except Exception as error:  # torch can raise exceptions of any type for bytes that are not a valid tensor.
        raise CheckpointCorruptError(f"{path}: cannot be read as plain values: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointCorruptError(f"{path}: holds a {type(value).__name__}, not a dict")
    return value
