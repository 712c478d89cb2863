"""Reads the values in a file of `torch.save`: containers, numbers, strings and tensors, and nothing else.

`torch.load` opens these files, too, but `torch.load` is not safe for files that somebody else may have written: see the
module `unpickling`. `torch.load` also decompresses records, however large the records become.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from mcore_ckpt.checkpoint.pt_archive import PtArchive, ReadAt
from mcore_ckpt.checkpoint.pt_tensors import PARAMETERS, StoredBytes, TensorFinder, TensorPlace
from mcore_ckpt.checkpoint.unpickling import Build, Find, PickleError, Unpickler, check_extent, find_plain, refuse_state

Storage = Callable[[StoredBytes], torch.Tensor]
"""Returns the memory of a storage: a 1-D tensor of dtype uint8."""


def decode_pt(data: bytes) -> Any:
    """Decodes the value in the bytes of a small `.pt` file. The tensors in the value do not share memory with `data`.

    Raises ValueError (ArchiveError, PickleError) if the file is damaged, or contains something other than plain values.
    """
    return load_pt(reader_of(data), len(data), copied_from(data))


def reader_of(data: bytes) -> ReadAt:
    """Returns a function that reads from `data` as if it were a file."""

    def read_at(offset: int, nbytes: int) -> bytes:
        if offset + nbytes > len(data):
            raise PickleError(
                f"the file was cut: {nbytes} bytes are needed at byte {offset}, but it ends at byte {len(data)}"
            )
        return data[offset : offset + nbytes]

    return read_at


def copied_from(data: bytes) -> Storage:
    """Returns a function that copies the bytes of a storage out of `data`."""

    def storage(stored: StoredBytes) -> torch.Tensor:
        memory = bytearray(memoryview(data)[stored.offset : stored.offset + stored.nbytes])
        return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)

    return storage


def load_pt(read_at: ReadAt, size: int, storage: Storage, find: Find = find_plain, build: Build = refuse_state) -> Any:
    """Reads the value in an archive of `size` bytes.

    `Unpickler` uses `find` and `build` for everything except tensors, which this function makes itself.

    Raises ValueError if the archive is damaged, or contains something that `find` or `build` refuses.
    """
    archive = PtArchive(read_at, size)
    memory: dict[str, torch.Tensor] = {}

    def tensor(place: TensorPlace) -> torch.Tensor:
        key = place.stored.key
        if key not in memory:
            memory[key] = storage(place.stored)
        return _view(memory[key], place)

    finder = TensorFinder(archive, tensor)

    def find_all(module: str, name: str) -> Any:
        if (found := finder.find(module, name) or PARAMETERS.get((module, name))) is not None:
            return found
        return find(module, name)

    data = archive.read("data.pkl")
    value = Unpickler(data, find_all, finder.stored, build).load()
    check_extent(value, len(data))
    return value


def _view(memory: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    # With strides of 0, one stored element can fill a tensor of any size. A copy of such a tensor could take all the
    # memory of the machine.
    if prod(place.shape) * place.dtype.itemsize > place.stored.nbytes:
        raise PickleError(f"a tensor of shape {place.shape} and strides {place.stride} is larger than its storage")
    if not memory.numel():
        return torch.empty(place.shape, dtype=place.dtype)
    whole = memory[: memory.numel() // place.dtype.itemsize * place.dtype.itemsize].view(place.dtype)
    # `as_strided` counts offsets from the start of the storage (such as a mapped file), not from the start of the view.
    tensor = whole.as_strided(place.shape, place.stride, whole.storage_offset() + place.start)
    for flag in place.flags:
        tensor = torch._conj(tensor) if flag == "conj" else torch._neg_view(tensor)
    return tensor
