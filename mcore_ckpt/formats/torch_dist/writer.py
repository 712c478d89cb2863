"""Writes torch_dist checkpoints for megatron's `dist_checkpointing.load`, without megatron.

The files have the form that torch's `FileSystemWriter` writes: the outputs of several `torch.save` calls one after the
other, with their places listed in `.metadata`. `FileSystemWriter` itself is not used, for two reasons. First,
until a file is complete, `FileSystemWriter` keeps in memory the last tensor that it has written under each name.
Together, these tensors are the whole model (`_write_files_from_queue`, torch 2.13). Second, megatron's planner needs
the live model.

Layer specs name some norms differently, and it is unknown which spec will load the checkpoint. So such a norm is
written under both names. A placeholder is written for each module's `_extra_state`, because megatron requires every
`_extra_state`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.contract import FileReport, FileToWrite
from mcore_ckpt.formats.torch_dist.contents import Contents, Slice
from mcore_ckpt.formats.torch_dist.files import COMMON_FILE, METADATA_FILE, TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.kind import TORCH_DIST_CONFIG
from mcore_ckpt.io.files import open_new, write_file

# With two threads, one file is read while another is written.
_THREADS = 2


@dataclass(frozen=True, eq=False)
class TorchDistWriter:
    """Writes a folder for `dist_checkpointing.load`; implements `formats.contract.CheckpointWriter`.

    Attributes:
        contents: everything that the folder will hold.
        read: a function that returns the elements of a slice as a tensor of the shape `Slice.sizes`. Two threads call
            this function.
        place: the folder that `read` reads from, for messages.
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
        """Writes objects, `.metadata` and the other small files."""
        places: dict[int, Sequence[Sequence[int]]] = {report.number: report.details for report in reports}
        stored = {
            MetadataIndex(key, each.offsets): _StorageInfo(_file_name(number), offset, length)
            for number, file in enumerate(self.contents.files)
            for each, (offset, length) in zip(file, places[number], strict=True)
            for key in each.keys
        }
        stored |= _write_objects(self.contents.objects, folder / _file_name(len(self.contents.files)))
        # `FileSystemWriter.finish` would store the path of the staging folder. That folder will be renamed, so no path
        # is stored here.
        metadata = Metadata(self.contents.describe(), storage_data=stored, version=CURRENT_DCP_VERSION)
        write_file(folder / METADATA_FILE, [pickle.dumps(metadata)])
        common = io.BytesIO()
        torch.save(dict(self.contents.common), common)
        write_file(folder / COMMON_FILE, [common.getvalue()])
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        config |= {"common_backend": "torch", "common_backend_version": 1}
        write_file(folder / TORCH_DIST_CONFIG, [json.dumps(config).encode()])

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
    """Writes one file durably, slice by slice. Returns the offset and the length of each slice, in bytes."""
    places = []
    with open(open_new(path), "wb") as stream:
        for each in slices:
            start = stream.tell()
            torch.save(read(each), stream)
            places.append([start, stream.tell() - start])
        stream.flush()
        os.fsync(stream.fileno())
    return places


def _write_objects(objects: Mapping[str, bytes], path: Path) -> dict[MetadataIndex, _StorageInfo]:
    write_file(path, objects.values())
    stored, offset = {}, 0
    for key, data in objects.items():
        stored[MetadataIndex(key)] = _StorageInfo(path.name, offset, len(data))
        offset += len(data)
    return stored
