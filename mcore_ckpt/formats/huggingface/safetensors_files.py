"""Reads and encodes headers and indexes of `.safetensors` files, which list the tensors and the places of their bytes.

A file has three parts: 8 bytes with the length of the header (little-endian), the header (JSON: dtype, shape and place
of each tensor), and the bytes of the tensors.

The native writer and reader of our own format handle these files, too, and treat a header as the first gap of the file
layout. The `safetensors` library is not used, because it has no bounded, unbuffered, multi-threaded reads, and no
writes in parts. Our parser of headers is as strict as the library's, and the tests read every file with the library.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec
import torch

from mcore_ckpt.checkpoint.shapes import is_possible_shape
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits, typed_json
from mcore_ckpt.io.files import opened, read_exact, read_small
from mcore_ckpt.io.typed_json import LongObject, Natural
from mcore_ckpt.sharding.regions import Shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_METADATA = "__metadata__"
# The safetensors library refuses larger headers.
_MAX_HEADER_BYTES = 100_000_000

DTYPES = {
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
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names that the format gives to dtypes. The format has no complex dtypes."""


@dataclass(frozen=True, slots=True)
class HfStored:
    """A tensor in a `.safetensors` file, stored row-major in bytes `[offset, offset + nbytes)` of `path`."""

    name: str
    dtype: torch.dtype
    shape: Shape
    path: Path
    offset: int
    nbytes: int


def read_folder(folder: Path) -> dict[str, HfStored]:
    """Returns every tensor in the folder of a HuggingFace model, by name.

    If there are several files, an index lists the file of each tensor, and this list is compared with the files. If the
    folder has both a single file and an index, the single file is read, as in transformers
    (`_get_resolved_checkpoint_files`, 4.57 and 5).

    Raises:
        CheckpointNotFoundError: the folder has no weights.
        CheckpointCorruptError: a file is missing, is truncated, is not a safetensors file, or does not match the index.
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
                raise CheckpointCorruptError(
                    f"{folder / file}: has tensor {tensor.name}, which {INDEX_FILE} does not list for this file"
                )
    if missing := sorted(where.keys() - found.keys()):
        raise CheckpointCorruptError(
            f"{folder / where[missing[0]]}: lacks tensor {missing[0]}, which {INDEX_FILE} lists for this file"
        )
    return found


def read_file(path: Path) -> list[HfStored]:
    """Reads the header of one file. Returns the tensors in the order of their bytes. Raises CheckpointCorruptError."""
    try:
        with opened(path) as (descriptor, size):
            length = struct.unpack("<Q", read_exact(descriptor, 8, 0, path))[0] if size > 8 else -1
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointCorruptError(f"{path}: is not a safetensors file, or was cut: fetch it again")
            header = read_exact(descriptor, length, 8, path).rstrip()
        if _SPACE.search(header) is not None:
            header = typed_json.without_spaces(header)
        tensors = _tensors(path, header, 8 + length)
        del header  # free its memory: a header is about as large as all its decoded entries
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise fields.FieldError("a tensor occurs twice")
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from error
    except fields.FieldError as error:
        raise CheckpointCorruptError(f"{path}: has a damaged header: {error}") from None
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            raise CheckpointCorruptError(
                f"{path}: tensor {tensor.name}: its bytes overlap those of the previous tensor, or leave a gap after "
                "them"
            )
        end += tensor.nbytes
    if end != size:
        raise CheckpointCorruptError(
            f"{path}: has {size} bytes, but its header describes {end} bytes: the file was cut or damaged"
        )
    return tensors


class _Entry(msgspec.Struct, gc=False, omit_defaults=True):
    """A header's entry for a tensor.

    The entry `__metadata__` is parsed with this class, too. The fields of `__metadata__` are texts, and can have the
    names of this class's fields.
    """

    data_offsets: tuple[Natural, Natural] | str | msgspec.UnsetType = msgspec.UNSET
    dtype: str | msgspec.UnsetType = msgspec.UNSET
    shape: tuple[Natural, ...] | str | msgspec.UnsetType = msgspec.UNSET


# Matches white space between two values, and also similar text inside strings. A match inside a string does no harm,
# because `without_spaces` does not change strings.
_SPACE = re.compile(rb"[\[{,:]\s|\s[\]},:]")
_ENTRIES: LongObject[_Entry] = LongObject(_Entry, b'},"')


def _tensors(path: Path, header: bytes, start: int) -> list[HfStored]:
    """Decodes a header. Raises FieldError."""
    same: dict[Shape, Shape] = {}
    entries = _ENTRIES.read(header, (0, len(header)))
    return [_tensor(path, name, entry, start, same) for name, entry in entries if name != _METADATA]


def _tensor(path: Path, name: str, entry: _Entry, start: int, same: dict[Shape, Shape]) -> HfStored:
    fields.as_name(name, "a tensor's name")
    dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
    if not (isinstance(dtype, str) and isinstance(shape, tuple) and isinstance(offsets, tuple)):
        raise fields.FieldError(f"tensor {name}: needs a dtype, a shape and data_offsets")
    (first, last), shape = offsets, same.setdefault(shape, shape)
    if dtype not in DTYPES:
        raise fields.FieldError(f"tensor {name}: dtype {fields.shown(dtype)} is not known")
    # is_possible_shape counts an empty axis as 1, because torch multiplies the other lengths to get the strides.
    if not is_possible_shape(shape):
        raise fields.FieldError(f"tensor {name}: impossible shape {fields.shown(shape)}")
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if last - first != nbytes:
        raise fields.FieldError(
            f"tensor {name}: has shape {fields.shown(shape)} of {dtype}, which does not fit its {last - first} bytes"
        )
    return HfStored(name, DTYPES[dtype], shape, path, start + first, nbytes)


def read_weight_map(path: Path) -> dict[str, str]:
    """Reads an index, which maps each tensor to the name of its file. Raises CheckpointCorruptError."""
    try:
        pairs = _weight_map(read_small(path, limits.HF_JSON_BYTES))
    except (OSError, fields.FieldError) as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from None
    for file in set(pairs.values()):
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise CheckpointCorruptError(f"{path}: names {file!r}, which is not a plain file name")
    return pairs


_FILES_OF_TENSORS: LongObject[str] = LongObject(str, b'","')


def _weight_map(data: bytes) -> dict[str, str]:
    text = typed_json.without_spaces(data)
    places, same = typed_json.members(text), dict[str, str]()
    if places is None or "weight_map" not in places:
        raise fields.FieldError("has no 'weight_map', or has a name twice")
    pairs: dict[str, str] = {}
    for name, file in _FILES_OF_TENSORS.read(text, places["weight_map"]):
        if name in pairs:
            raise fields.FieldError(f"{fields.shown(name)} occurs twice")
        pairs[fields.as_name(name, "a tensor's name")] = same.setdefault(file, fields.as_name(file, name))
    return pairs


def encode_header(tensors: Iterable[tuple[str, torch.dtype, Shape]]) -> bytes:
    """Encodes the beginning of a file with these tensors: the length of the header, and the header.

    The tensors' bytes must follow, one tensor after the other. They begin at a multiple of 8, as in files of the
    safetensors library. transformers requires the entry `format`.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def file_name(number: int, count: int) -> str:
    """Returns the name of file `number` (counted from 0) of `count` files."""
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def encode_index(files: dict[str, str], total_bytes: int) -> bytes:
    """Encodes the index of several files. `files` maps the name of each tensor to the name of the tensor's file."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"
