"""Converts a HuggingFace folder for megatron's `dist_checkpointing.load`, without megatron or the built model.

The files have the form that torch's `FileSystemWriter` writes: the outputs of several `torch.save` calls one after the
other, with their places listed in `.metadata`. This module does not call `FileSystemWriter`, because that class keeps
the last tensor of every name in memory until the file is complete (`_write_files_from_queue`, torch 2.13), and these
tensors add up to the whole model.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
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

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import dtype_name, torch_dtype
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.huggingface.assets import copy_assets
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader
from mcore_ckpt.formats.kinds import TORCH_DIST_CONFIG
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.keys import Keys, Place
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import FILE_MODE, FOLDER_MODE, sync_file, write_file
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.sharding.placement import share_of
from mcore_ckpt.sharding.plan import plan_reads
from mcore_ckpt.sharding.regions import Piece, Region, Shape
from mcore_ckpt.steps import commit, leftovers
from mcore_ckpt.tools.convert import ConversionReport, Progress, check_written, open_folder

_COMMON_FILE = "common.pt"
_METADATA_FILE = ".metadata"
# With two threads, one file is read while another is written.
_THREADS = 2


@dataclass(frozen=True)
class _KeyRows:
    """The rows of a tensor that megatron stores under one key: all rows, or those of one section.

    Attributes:
        place: the key, and the tensor's index in the stored tensor's axes of layers and experts.
        first: the first of the rows.
        count: the number of the rows.
    """

    place: Place
    first: int
    count: int


@dataclass(frozen=True)
class _Slice:
    """Rows of a tensor that are written with one `torch.save`. All of them are stored under one key.

    Attributes:
        name: the tensor's name.
        key_rows: the key, and all rows of the tensor that are stored under it.
        shape: the tensor's global shape.
        start: the first row of the slice, counted in the tensor.
        stop: the row after the last one.
        dtype: the dtype without "torch.".
    """

    name: str
    key_rows: _KeyRows
    shape: Shape
    start: int
    stop: int
    dtype: str

    @property
    def key(self) -> str:
        """The key of the stored tensor."""
        return self.key_rows.place.key

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

    @property
    def index(self) -> MetadataIndex:
        """The key of the slice in the `storage_data` of `.metadata`."""
        return MetadataIndex(self.key, self.offsets)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Everything to write.

    Attributes:
        files: the slices of each file.
        states: the keys of the modules' `_extra_state`.
        key_rows: by tensor name, one entry for each place where the tensor is stored: its keys with their rows.
        described: the `state_dict_metadata` of `.metadata`.
    """

    files: tuple[tuple[_Slice, ...], ...]
    states: tuple[str, ...]
    key_rows: Mapping[str, Sequence[Sequence[_KeyRows]]]
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata]


def convert_to_torch_dist(
    source: Path,
    path: Path,
    agreement: Agreement,
    test: bool = False,
    progress: Progress = lambda done, total: None,
    ignore: Sequence[str] = (),
) -> ConversionReport:
    """Writes the folder `path`, which appears only when it is complete. Every process must call it.

    A model of any layout can load the folder, with local or with transformer-engine's layer specs. The vocabulary has
    HuggingFace's size, without padding. Configuration and tokenizer are in `huggingface/` below the folder. The
    conversion needs a few times SCATTER_BYTES of memory.

    Args:
        source: the folder of the HuggingFace model; every process must see it.
        path: the folder to write; it must be empty or not exist.
        agreement: connects this process with the other processes that share the work.
        test: True to read everything back and compare it before the folder appears.
        progress: called with the number of bytes that this process has written and the number that it will write.
        ignore: regular expressions of HuggingFace tensors to leave out.

    Raises:
        CheckpointError: the HuggingFace folder is damaged, `path` is not empty, or `path` cannot be written. All
            processes raise it, and `path` is as it was.
    """
    started = time.monotonic()
    source, path = source.absolute(), path.absolute()
    reader = open_folder(agreement, source, ignore)
    plan = _plan(reader)
    attempt = _open(agreement, path)
    staging = file_names.staging_dir(path, attempt)
    try:
        nbytes = _write(agreement, reader, plan, staging, progress)
        if test:
            _test(agreement, reader, plan, staging)
        decide(
            agreement,
            f"putting {path} in place",
            dict,
            lambda _: {},
            act=lambda: commit.publish(staging, path, attempt),
        )
    except BaseException:
        if agreement.is_coordinator:
            commit.discard(staging)
        raise
    return ConversionReport(source, path, reader.model.describe(), nbytes, time.monotonic() - started)


# -- plan -------------------------------------------------------------------------------------------------


def are_alike(reader: HuggingFaceReader) -> bool:
    """Returns True if megatron gives all decoder layers the same keys (`TransformerBlock.sharded_state_dict`, 0.16.1).

    Megatron does so unless the layers differ, or the config selects the layers that have experts or linear attention.
    """
    lists = ("moe_layer_freq", "linear_attention_freq")
    values: dict[str, Any] = {}
    if reader.model.architecture.rules:
        values = to_mcore_config(reader.model).transformer
    return len(set(reader.model.layers)) <= 1 and not any(
        isinstance(values.get(name), list) or (values.get(name) or 1) != 1 for name in lists
    )


def _plan(reader: HuggingFaceReader) -> _Plan:
    names = tuple(reader.names)
    experts = 1 + max((expert[1] for name in names if (expert := expert_of(name))), default=0)
    keys = Keys(reader.names, len(reader.model.layers), experts, are_alike(reader))
    key_rows = {name: [_key_rows(reader, name, place) for place in keys.places(name)] for name in names}
    slices = [
        each
        for name in names
        for at_place in key_rows[name]
        for rows in at_place
        for each in _slices(reader, name, rows)
    ]
    states = dict.fromkeys(place.object_key for name in names for place in keys.states(name))
    return _Plan(tuple(_in_files(slices)), tuple(states), key_rows, _describe(slices, states))


def _key_rows(reader: HuggingFaceReader, name: str, place: Place) -> list[_KeyRows]:
    """Divides a tensor into the rows of its keys.

    Megatron gives each section its own key (`_split_tensor_factory` of GatedDeltaNet, megatron-core 0.16.1).
    """
    sections = reader.sections_of(name)
    if not sections:
        return [_KeyRows(place, 0, reader.parts_of(name)[0].region.global_shape[0])]
    starts = accumulate((section.rows for section in sections), initial=0)
    return [
        _KeyRows(replace(place, key=f"{place.key}.{section.name}"), start, section.rows)
        for start, section in zip(starts, sections, strict=False)
    ]


def _slices(reader: HuggingFaceReader, name: str, rows: _KeyRows) -> Iterator[_Slice]:
    """Cuts the rows of a key into slices of at most SCATTER_BYTES, or of one row if a row is larger."""
    first = reader.parts_of(name)[0]
    shape = first.region.global_shape
    row_bytes = max(1, prod(shape[1:]) * torch_dtype(first.dtype).itemsize)
    step = max(1, tuning.SCATTER_BYTES // row_bytes)
    stop = rows.first + rows.count
    for start in range(rows.first, stop, step):
        yield _Slice(name, rows, shape, start, min(stop, start + step), first.dtype)


def _in_files(slices: Iterable[_Slice]) -> Iterator[tuple[_Slice, ...]]:
    """Groups slices into files of at most HF_LEAST_FILE_BYTES, or of one slice if a slice is larger."""
    file: list[_Slice] = []
    nbytes = 0
    for each in slices:
        if file and nbytes + each.nbytes > tuning.HF_LEAST_FILE_BYTES:
            yield tuple(file)
            file, nbytes = [], 0
        file.append(each)
        nbytes += each.nbytes
    if file:
        yield tuple(file)


def _open(agreement: Agreement, path: Path) -> str:
    def combine(_: Sequence[Record]) -> Record:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointMismatchError(f"{path}: exists already and is not empty: name another folder, or remove it")
        leftovers.remove_leftovers_beside(path)
        attempt = commit.new_attempt()
        commit.open_staging(path, attempt)
        return {"attempt": attempt}

    return str(decide(agreement, f"opening {path}", dict, combine)["attempt"])


# -- write ------------------------------------------------------------------------------------------------


def _write(agreement: Agreement, reader: HuggingFaceReader, plan: _Plan, staging: Path, progress: Progress) -> int:
    sizes = [sum(each.nbytes for each in file) for file in plan.files]
    mine = share_of(sizes, agreement.rank, agreement.world_size)
    total = sum(sizes[number] for number in mine)

    def work() -> Record:
        done = 0
        places: dict[str, list[list[int]]] = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="torch-dist") as pool:
            written = pool.map(lambda number: _write_file(reader, plan.files[number], staging / _file(number)), mine)
            for number, offsets in zip(mine, written, strict=True):
                places[str(number)] = offsets
                done += sizes[number]
                progress(done, total)
        return {"places": places}

    def combine(records: Sequence[Record]) -> Record:
        places = {int(number): found for record in records for number, found in record["places"].items()}
        _write_rest(reader, plan, places, staging)
        return {}

    decide(agreement, f"writing {staging}", work, combine)
    return sum(sizes)


def _file(number: int) -> str:
    return f"__{number}_0.distcp"


def _write_file(reader: HuggingFaceReader, slices: Sequence[_Slice], path: Path) -> list[list[int]]:
    """Writes slices one after the other. Returns the offset and the length in bytes of each."""
    places = []
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as stream:
        for each in slices:
            start = stream.tell()
            torch.save(_read(reader, each), stream)
            places.append([start, stream.tell() - start])
        stream.flush()
        os.fsync(stream.fileno())
    return places


def _read(reader: HuggingFaceReader, wanted: _Slice) -> torch.Tensor:
    memory = torch.empty(wanted.sizes, dtype=torch_dtype(wanted.dtype))
    plan = plan_reads(wanted.region, reader.parts_of(wanted.name))
    dtypes = {read.stored.dtype for read in plan.reads}
    if plan.missing or plan.outside or dtypes != {wanted.dtype}:
        raise CheckpointCorruptError(
            f"{reader.contents.folder}: tensor {wanted.name}: is incomplete, or its parts have several dtypes "
            f"({', '.join(sorted(dtypes))}): convert from a folder that has the whole tensor in one dtype"
        )
    reader.read_numbers((read, memory.view(-1)) for read in plan.reads)
    return memory


def _write_rest(reader: HuggingFaceReader, plan: _Plan, places: dict[int, list[list[int]]], staging: Path) -> None:
    """Writes the modules' states, `.metadata` and the other small files. Only rank 0 calls it."""
    stored = {
        each.index: _StorageInfo(_file(number), offset, length)
        for number, file in enumerate(plan.files)
        for each, (offset, length) in zip(file, places[number], strict=True)
    }
    stored |= _write_states(plan.states, staging / _file(len(plan.files)))
    # `FileSystemWriter.finish` would store the path of the staging folder, which is about to be renamed.
    metadata = Metadata(plan.described, storage_data=stored, version=CURRENT_DCP_VERSION)
    write_file(staging / _METADATA_FILE, [pickle.dumps(metadata)])
    # `common.pt` must have no entries, because `dist_checkpointing.load` returns its entries together with the tensors.
    # verl gives both to a strict `load_state_dict`, which refuses unknown entries.
    common = io.BytesIO()
    torch.save({}, common)
    write_file(staging / _COMMON_FILE, [common.getvalue()])
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    write_file(staging / TORCH_DIST_CONFIG, [json.dumps(config).encode()])
    folder = staging / file_names.HUGGINGFACE_DIR
    folder.mkdir(FOLDER_MODE)
    for path in (*copy_assets(reader.contents.folder, folder), folder, staging):
        sync_file(path)


def _write_states(keys: Sequence[str], path: Path) -> dict[MetadataIndex, _StorageInfo]:
    """Writes an empty state for each key.

    transformer-engine reads an empty tensor as a state without FP8, and megatron's own layers accept any state.
    """
    saved = io.BytesIO()
    torch.save([torch.empty(0, dtype=torch.uint8)], saved)
    data = saved.getvalue()
    write_file(path, (data for _ in keys))
    return {
        MetadataIndex(key): _StorageInfo(path.name, number * len(data), len(data)) for number, key in enumerate(keys)
    }


def _describe(
    slices: Iterable[_Slice], states: Iterable[str]
) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """Returns the `state_dict_metadata` of `.metadata`: the stored tensors, each with its slices, and the states."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {key: BytesStorageMetadata() for key in states}
    for each in slices:
        entry = found.get(each.key)
        if entry is None:
            properties = TensorProperties(torch_dtype(each.dtype))
            entry = TensorStorageMetadata(properties, torch.Size(each.global_shape), [])
            found[each.key] = entry
        assert isinstance(entry, TensorStorageMetadata)
        if entry.properties.dtype != torch_dtype(each.dtype):
            raise CheckpointMismatchError(
                f"tensor {each.name}: has dtype {each.dtype}, but the same tensor of other layers has "
                f"{dtype_name(entry.properties.dtype)}, and megatron stores all layers as one tensor: cast them to one "
                "dtype, or use --format native"
            )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)))
    return found


def _test(agreement: Agreement, reader: HuggingFaceReader, plan: _Plan, staging: Path) -> None:
    def work() -> Record:
        written = TorchDistFiles(staging, [staging])
        names = tuple(reader.names)

        for number in range(max(map(len, plan.key_rows.values()))):

            def read(name: str, region: Region, number: int = number) -> torch.Tensor:
                places = plan.key_rows[name]
                memory = torch.empty(region.local_shape, dtype=torch_dtype(reader.parts_of(name)[0].dtype))
                for piece in region.pieces:
                    for rows in places[min(number, len(places) - 1)]:
                        _read_back(written, rows, piece, region.global_shape, memory)
                return memory.reshape(-1)

            check_written(reader, names[agreement.rank :: agreement.world_size], read)
        return {}

    decide(agreement, f"testing {staging}", work, lambda _: {})


def _read_back(written: TorchDistFiles, rows: _KeyRows, piece: Piece, shape: Shape, memory: torch.Tensor) -> None:
    """Reads those rows of a key that are in a piece, into the place of the piece in a local tensor."""
    place, (first, *rest) = rows.place, piece.global_offset
    start, stop = max(rows.first, first), min(rows.first + rows.count, first + piece.shape[0])
    if start >= stop:
        return
    local = memory[tuple(slice(at, at + n) for at, n in zip(piece.local_offset, piece.shape, strict=True))]
    local = local[start - first : stop - first]
    offset = (*place.index, start - rows.first, *rest)
    whole = (*place.lengths, rows.count, *shape[1:])
    written.read(WantedPart(place.key, whole, offset, local[(None,) * len(place.index)] if place.index else local))
