"""Folders of `.safetensors` files: where each tensor's bytes are, and the index of several files.

The format: 8 bytes that say how long the header is, the header (JSON: dtype, shape, place of each tensor), the bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import open_regular, read_exact, read_small
from mcore_ckpt.sharding.regions import Shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# As the safetensors library refuses larger ones.
_MAX_HEADER_BYTES = 100_000_000
# As many as torch has.
_MOST_AXES = 64
_MOST_ELEMENTS = 2**62

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class HfStored:
    """A tensor in a file: bytes `[offset, offset + nbytes)` of `path`, row-major."""

    name: str
    dtype: torch.dtype
    shape: Shape
    path: Path
    offset: int
    nbytes: int


def read_folder(folder: Path) -> dict[str, HfStored]:
    """Every tensor of a HuggingFace model's folder, by name.

    Of several files the index says which has what; what it says is checked. A single file wins over an index beside it,
    as in transformers (`_get_resolved_checkpoint_files`, 4.57 and 5).

    Raises:
        CheckpointNotFoundError: there are no weights.
        CheckpointCorruptError: a file is missing, cut or no safetensors file, or differs from the index.
    """
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if single.exists():
        return {tensor.name: tensor for tensor in read_file(single)}
    if not index.exists():
        raise CheckpointNotFoundError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    where = read_weight_map(index)
    found: dict[str, HfStored] = {}
    for file in sorted(set(where.values())):
        for tensor in read_file(folder / file):
            if where.get(tensor.name) == file:
                found[tensor.name] = tensor
            else:
                raise CheckpointCorruptError(f"{folder / file}: tensor {tensor.name}: {INDEX_FILE} does not say so")
    if missing := sorted(where.keys() - found.keys()):
        raise CheckpointCorruptError(
            f"{folder / where[missing[0]]}: lacks tensor {missing[0]}, which {INDEX_FILE} names"
        )
    return found


def read_file(path: Path) -> list[HfStored]:
    """The tensors of one file. Raises CheckpointCorruptError."""
    try:
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            length = struct.unpack("<Q", read_exact(descriptor, 8, 0, path))[0] if size > 8 else -1
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointCorruptError(f"{path}: is not a safetensors file, or was cut")
            header = fields.parse(read_exact(descriptor, length, 8, path))
        finally:
            os.close(descriptor)
        tensors = [_tensor(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from error
    except fields.FieldError as error:
        raise CheckpointCorruptError(f"{path}: bad header: {error}") from None
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            raise CheckpointCorruptError(f"{path}: tensor {tensor.name}: its bytes are not where those before end")
        end += tensor.nbytes
    if end != size:
        raise CheckpointCorruptError(f"{path}: has {size} bytes, its header speaks of {end}: cut or damaged")
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int) -> HfStored:
    fields.as_name(name, "a tensor's name")
    record = fields.as_dict(entry, name)
    dtype, lengths = fields.get_name(record, "dtype"), fields.get_ints(record, "shape")
    offsets = fields.get_ints(record, "data_offsets")
    if dtype not in _DTYPES:
        raise fields.FieldError(f"tensor {name}: dtype {dtype!r} is not known")
    # Without empty axes: torch multiplies all of them.
    if len(lengths) > _MOST_AXES or prod(length or 1 for length in lengths) > _MOST_ELEMENTS or len(offsets) != 2:
        raise fields.FieldError(f"tensor {name}: shape {fields.shown(lengths)} at {fields.shown(offsets)}")
    nbytes = prod(lengths) * _DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise fields.FieldError(
            f"tensor {name}: shape {fields.shown(lengths)} of {dtype} is not {offsets[1] - offsets[0]} bytes"
        )
    return HfStored(name, _DTYPES[dtype], lengths, path, start + offsets[0], nbytes)


def read_weight_map(path: Path) -> dict[str, str]:
    """Which file has a tensor, from the index of several. Raises CheckpointCorruptError."""
    try:
        index = fields.parse(read_small(path, limits.HF_JSON_BYTES))
        where = fields.get_dict(index, "weight_map")
        pairs = {fields.as_name(name, "a tensor's name"): fields.as_name(file, name) for name, file in where.items()}
    except (OSError, fields.FieldError) as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from None
    for file in pairs.values():
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise CheckpointCorruptError(f"{path}: names {file!r}, which is not a file beside it")
    return pairs


def has_name(dtype: torch.dtype) -> bool:
    """Whether a file can have tensors of a dtype (complex numbers it cannot)."""
    return dtype in _NAMES


def encode_header(tensors: Iterable[tuple[str, torch.dtype, Shape]]) -> bytes:
    """The beginning of a file that holds these tensors one behind the other, in this order: length and header.

    The tensors' bytes begin behind it, at a multiple of 8 as the safetensors library puts them. transformers asks for
    its `format` entry.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def file_name(number: int, count: int) -> str:
    """The name of file `number` (from 0) of `count`."""
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def encode_index(files: dict[str, str], total_bytes: int) -> bytes:
    """The index of several files: `files` says which has a tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"
