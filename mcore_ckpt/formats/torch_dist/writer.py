"""Writes torch_dist checkpoints for megatron's `dist_checkpointing.load`, without megatron.

The files have the form that torch's `FileSystemWriter` writes: the outputs of several `torch.save` calls one after the
other, with their places listed in `.metadata`. This module does not call `FileSystemWriter`, because that class keeps
the last tensor of every name in memory until the file is complete (`_write_files_from_queue`, torch 2.13), and these
tensors add up to the whole model.

torch's `FileSystemWriter` keeps the last tensor of every name until its file is done, which is the whole model, and
megatron's planner needs the model. So the bytes are written here. Layer specs name some norms differently, and which
spec will load the checkpoint is not known: such a norm is written under the names of both. `_extra_state` has
placeholders, because megatron asks for all of them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt.checkpoint.dtypes import dtype_name, torch_dtype
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.contract import FileReport, FileToWrite
from mcore_ckpt.formats.kinds import TORCH_DIST_CONFIG
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.keys import Place
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import open_new, write_file
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Piece, Region, Shape

_COMMON_FILE = "common.pt"
_METADATA_FILE = ".metadata"
# With two threads, one file is read while another is written.
_THREADS = 2


@dataclass(frozen=True)
class KeyRows:
    """The rows of a tensor that megatron stores under one key: all rows, or those of one section.

    Attributes:
        place: the key, and the tensor's index in the stored tensor's axes of layers and experts.
        first: the first of the rows.
        count: the number of the rows.
        other_keys: further keys under which readers find the same bytes.
    """

    place: Place
    first: int
    count: int
    other_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slice:
    """Rows of a tensor that are written with one `torch.save`. All of them are stored under one key.

    Attributes:
        tensor: the tensor's name, and which part of the training state it is.
        key_rows: the key, and all rows of the tensor that are stored under it.
        shape: the tensor's global shape.
        start: the first row of the slice, counted in the tensor.
        stop: the row after the last one.
        dtype: the dtype without "torch.".
    """

    tensor: ShardKey
    key_rows: KeyRows
    shape: Shape
    start: int
    stop: int
    dtype: str

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.tensor.name

    @property
    def key(self) -> str:
        """The key of the stored tensor."""
        return self.key_rows.place.key

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys under which readers find the slice."""
        return (self.key, *self.key_rows.other_keys)

    @property
    def sizes(self) -> Shape:
        """The shape of the slice in the stored tensor, with its axes of layers and experts."""
        return (*(1 for _ in self.key_rows.place.index), self.stop - self.start, *self.shape[1:])

    @property
    def offsets(self) -> Shape:
        """The offset of the slice in the stored tensor."""
        return (*self.key_rows.place.index, self.start - self.key_rows.first, *(0 for _ in self.shape[1:]))

    @property
    def global_shape(self) -> Shape:
        """The shape of the stored tensor."""
        return (*self.key_rows.place.lengths, self.key_rows.count, *self.shape[1:])

    @property
    def region(self) -> Region:
        """The slice as a region of the model's tensor."""
        local = (self.stop - self.start, *self.shape[1:])
        zeros = (0,) * (len(self.shape) - 1)
        return Region(self.shape, local, (Piece((0, *zeros), local, (self.start, *zeros)),), (0, prod(local)))

    @property
    def nbytes(self) -> int:
        """The size of the slice in bytes."""
        return self.region.numel * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class Contents:
    """Everything that one folder of `dist_checkpointing` is to hold.

    Attributes:
        files: the slices of each file.
        objects: the sharded objects: for each key (`ShardedObject.unique_key`) the bytes that `saved_object` returns.
        common: what all ranks share, the content of `common.pt`.
    """

    files: tuple[tuple[Slice, ...], ...]
    objects: Mapping[str, bytes] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        slices: Sequence[Slice], objects: Mapping[str, bytes] | None = None, common: Mapping[str, Any] | None = None
    ) -> Contents:
        """Divides slices into files of at most HF_LEAST_FILE_BYTES, or of one slice if a slice is larger."""
        return Contents(tuple(_in_files(slices)), objects or {}, common or {})

    def describe(self) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        """Returns the `state_dict_metadata` of `.metadata`: the stored tensors, each with its slices, and the objects.

        Raises:
            CheckpointMismatchError: tensors that are stored under one key differ in dtype.
        """
        return _describe((each for file in self.files for each in file), self.objects)


def slices_of(tensor: ShardKey, rows: KeyRows, shape: Shape, dtype: str) -> Iterator[Slice]:
    """Cuts the rows of a key into slices of at most SCATTER_BYTES, or of one row if a row is larger."""
    row_bytes = max(1, prod(shape[1:]) * torch_dtype(dtype).itemsize)
    step = max(1, tuning.SCATTER_BYTES // row_bytes)
    stop = rows.first + rows.count
    for start in range(rows.first, stop, step):
        yield Slice(tensor, rows, shape, start, min(stop, start + step), dtype)


def _in_files(slices: Iterable[Slice]) -> Iterator[tuple[Slice, ...]]:
    file: list[Slice] = []
    nbytes = 0
    for each in slices:
        if file and nbytes + each.nbytes > tuning.HF_LEAST_FILE_BYTES:
            yield tuple(file)
            file, nbytes = [], 0
        file.append(each)
        nbytes += each.nbytes
    if file:
        yield tuple(file)


def _describe(
    slices: Iterable[Slice], objects: Iterable[str]
) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {key: BytesStorageMetadata() for key in objects}
    for each in slices:
        for key in each.keys:
            entry = found.get(key)
            if entry is None:
                properties = TensorProperties(torch_dtype(each.dtype))
                entry = TensorStorageMetadata(properties, torch.Size(each.global_shape), [])
                found[key] = entry
            assert isinstance(entry, TensorStorageMetadata)
            if entry.properties.dtype != torch_dtype(each.dtype):
                raise CheckpointMismatchError(
                    f"tensor {each.tensor}: has dtype {each.dtype}, but another part of {key} has "
                    f"{dtype_name(entry.properties.dtype)}, and megatron stores both as one tensor (of several layers, "
                    "for example): cast them to one dtype, or use --format native for a HuggingFace model"
                )
            entry.chunks.append(ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)))
    return found


@dataclass(frozen=True, eq=False)
class TorchDistWriter:
    """Writes a folder for `dist_checkpointing.load`. It satisfies `formats.contract.CheckpointWriter`.

    Attributes:
        contents: everything that the folder is to hold.
        read: returns the elements of a slice as a tensor of the shape `Slice.sizes`. Two threads call it.
        place: the folder that `read` reads, for messages.
    """

    contents: Contents
    read: Callable[[Slice], torch.Tensor]
    place: Path | str

    @cached_property
    def files(self) -> Sequence[FileToWrite]:
        slices = enumerate(self.contents.files)
        return [FileToWrite(_file_name(number), sum(each.nbytes for each in file)) for number, file in slices]

    def write(self, numbers: Sequence[int], folder: Path, progress: Callable[[int], None]) -> list[FileReport]:
        reports = []

        def write_file_of(number: int) -> list[list[int]]:
            return _write_slices(self.contents.files[number], folder / _file_name(number), self.read)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="torch-dist") as pool:
            for number, places in zip(numbers, pool.map(write_file_of, numbers), strict=True):
                reports.append(FileReport(number, sum(places[-1]), places))
                progress(self.files[number].nbytes)
        return reports

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        _write_rest(self.contents, {report.number: report.details for report in reports}, folder)

    def check(self, folder: Path, part: int, parts: int) -> None:
        written = TorchDistFiles(folder, [folder])
        for each in [each for file in self.contents.files for each in file][part::parts]:
            self._check_slice(written, each)
        for key in self.contents.objects:
            written.read_object(key)

    def _check_slice(self, written: TorchDistFiles, each: Slice) -> None:
        wanted = self.read(each)
        for key in each.keys:
            found = torch.empty_like(wanted)
            written.read(WantedPart(key, each.global_shape, each.offsets, found))
            if not torch.equal(found.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)):
                raise CheckpointMismatchError(
                    f"{written.path}: tensor {key}: the written bits differ from {each.tensor} of {self.place}: check "
                    "the disks and convert again"
                )


def _file_name(number: int) -> str:
    return f"__{number}_0.distcp"


def _write_slices(slices: Sequence[Slice], path: Path, read: Callable[[Slice], torch.Tensor]) -> list[list[int]]:
    """Writes one file durably, slice by slice. Returns the offset and the length in bytes of each."""
    places = []
    with open(open_new(path), "wb") as stream:
        for each in slices:
            start = stream.tell()
            torch.save(read(each), stream)
            places.append([start, stream.tell() - start])
        stream.flush()
        os.fsync(stream.fileno())
    return places


def saved_object(value: Any) -> bytes:
    """Returns the bytes that stand for the value of a sharded object."""
    saved = io.BytesIO()
    torch.save([value], saved)
    return saved.getvalue()


def _write_rest(contents: Contents, places: Mapping[int, Sequence[Sequence[int]]], folder: Path) -> None:
    """Writes objects, `.metadata` and the other small files. `places` has the places of each file's slices."""
    stored = {
        MetadataIndex(key, each.offsets): _StorageInfo(_file_name(number), offset, length)
        for number, file in enumerate(contents.files)
        for each, (offset, length) in zip(file, places[number], strict=True)
        for key in each.keys
    }
    stored |= _write_objects(contents.objects, folder / _file_name(len(contents.files)))
    # `FileSystemWriter.finish` would store the path of the staging folder, which is about to be renamed.
    metadata = Metadata(contents.describe(), storage_data=stored, version=CURRENT_DCP_VERSION)
    write_file(folder / _METADATA_FILE, [pickle.dumps(metadata)])
    common = io.BytesIO()
    torch.save(dict(contents.common), common)
    write_file(folder / _COMMON_FILE, [common.getvalue()])
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    write_file(folder / TORCH_DIST_CONFIG, [json.dumps(config).encode()])


def _write_objects(objects: Mapping[str, bytes], path: Path) -> dict[MetadataIndex, _StorageInfo]:
    write_file(path, objects.values())
    stored, offset = {}, 0
    for key, data in objects.items():
        stored[MetadataIndex(key)] = _StorageInfo(path.name, offset, len(data))
        offset += len(data)
    return stored
