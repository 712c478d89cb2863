"""Writes small `.pt` files of plain values, which `torch.load(weights_only=True)` opens."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.checkpoint.pt_values import decode_pt
from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import make_folders, write_file


def pickle_plain(value: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a small `.pt` file with these values, which have been checked (`check_plain`)."""
    return check_plain(pickle_unchecked(value))


def pickle_unchecked(value: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a small `.pt` file with these values. Checking them takes several times as long."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def check_plain(data: bytes) -> bytes:
    """Returns the bytes of a small `.pt` file.

    Raises ValueError if the file would be too large, or if torch (`weights_only`) or `read_plain` could not open it.
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
