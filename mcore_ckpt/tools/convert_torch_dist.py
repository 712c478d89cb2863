"""A HuggingFace folder as a checkpoint for megatron's `dist_checkpointing.load`, without megatron and without a model.

The bytes are written here, in the form of torch's `FileSystemWriter` (one `torch.save` after the other, found through
`.metadata`): that itself keeps the last tensor of every name until its file is done (`_write_files_from_queue`, torch
2.13), which is the whole model.
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
# One file is read while another is written.
_THREADS = 2


@dataclass(frozen=True)
class _Part:
    """What megatron keeps under one key of a tensor: all of it, or rows `[first, first + rows)` (a section)."""

    place: Place
    first: int
    rows: int


@dataclass(frozen=True)
class _Chunk:
    """Rows `[start, stop)` of a tensor, all of one part of it."""

    name: str
    part: _Part
    shape: Shape
    start: int
    stop: int
    dtype: str

    @property
    def key(self) -> str:
        return self.part.place.key

    @property
    def sizes(self) -> Shape:
        return (*(1 for _ in self.part.place.index), self.stop - self.start, *self.shape[1:])

    @property
    def offsets(self) -> Shape:
        return (*self.part.place.index, self.start - self.part.first, *(0 for _ in self.shape[1:]))

    @property
    def global_shape(self) -> Shape:
        return (*self.part.place.lengths, self.part.rows, *self.shape[1:])

    @property
    def region(self) -> Region:
        local = (self.stop - self.start, *self.shape[1:])
        zeros = (0,) * (len(self.shape) - 1)
        return Region(self.shape, local, (Piece((0, *zeros), local, (self.start, *zeros)),), (0, prod(local)))

    @property
    def nbytes(self) -> int:
        return self.region.numel * torch_dtype(self.dtype).itemsize

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, self.offsets)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Everything to write, by file. `parts`: each tensor's, once for each place that it goes to."""

    files: tuple[tuple[_Chunk, ...], ...]
    states: tuple[str, ...]
    parts: Mapping[str, Sequence[Sequence[_Part]]]
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata]


def convert_to_torch_dist(
    source: Path,
    path: Path,
    agreement: Agreement,
    test: bool = False,
    progress: Progress = lambda done, total: None,
    ignore: Sequence[str] = (),
) -> ConversionReport:
    """Writes the folder `path`, which is there when all of it is. Every process calls it.

    Any layout loads it, of local and of transformer-engine's layer specs; the vocabulary is HuggingFace's, without
    padding. Configuration and tokenizer are in `huggingface/` below it. Takes a few times SCATTER_BYTES of memory.

    Args:
        source: the folder of the HuggingFace model; every process sees it.
        path: the folder to write: not there yet, or empty.
        agreement: this process's seat.
        test: read all back and compare, before it is put in place.
        progress: told of bytes written.
        ignore: regular expressions of HuggingFace tensors to leave out.

    Raises:
        CheckpointError: the folder is damaged, or cannot be written; nothing has come.
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
    """Whether megatron gives all decoder layers one key (`TransformerBlock.sharded_state_dict`, 0.16.1).

    It does unless a config lists which layers are of experts or of linear attention.
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
    parts = {name: [_parts(reader, name, place) for place in keys.places(name)] for name in names}
    chunks = [
        chunk
        for name in names
        for in_place in parts[name]
        for part in in_place
        for chunk in _chunks(reader, name, part)
    ]
    states = dict.fromkeys(place.object_key for name in names for place in keys.states(name))
    return _Plan(tuple(_in_files(chunks)), tuple(states), parts, _describe(chunks, states))


def _parts(reader: HuggingFaceReader, name: str, place: Place) -> list[_Part]:
    """Sections have keys of their own (`_split_tensor_factory` of GatedDeltaNet, megatron-core 0.16.1)."""
    sections = reader.sections_of(name)
    if not sections:
        return [_Part(place, 0, reader.parts_of(name)[0].region.global_shape[0])]
    starts = accumulate((section.rows for section in sections), initial=0)
    return [
        _Part(replace(place, key=f"{place.key}.{section.name}"), start, section.rows)
        for start, section in zip(starts, sections, strict=False)
    ]


def _chunks(reader: HuggingFaceReader, name: str, part: _Part) -> Iterator[_Chunk]:
    first = reader.parts_of(name)[0]
    shape = first.region.global_shape
    row = max(1, prod(shape[1:]) * torch_dtype(first.dtype).itemsize)
    step = max(1, tuning.SCATTER_BYTES // row)
    stop = part.first + part.rows
    for start in range(part.first, stop, step):
        yield _Chunk(name, part, shape, start, min(stop, start + step), first.dtype)


def _in_files(chunks: Iterable[_Chunk]) -> Iterator[tuple[_Chunk, ...]]:
    file: list[_Chunk] = []
    nbytes = 0
    for chunk in chunks:
        if file and nbytes + chunk.nbytes > tuning.HF_LEAST_FILE_BYTES:
            yield tuple(file)
            file, nbytes = [], 0
        file.append(chunk)
        nbytes += chunk.nbytes
    if file:
        yield tuple(file)


def _open(agreement: Agreement, path: Path) -> str:
    def combine(_: Sequence[Record]) -> Record:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointMismatchError(f"{path}: is there already, and not empty: remove it, or name another folder")
        leftovers.remove_leftovers_beside(path)
        attempt = commit.new_attempt()
        commit.open_staging(path, attempt)
        return {"attempt": attempt}

    return str(decide(agreement, f"opening {path}", dict, combine)["attempt"])


# -- write ------------------------------------------------------------------------------------------------


def _write(agreement: Agreement, reader: HuggingFaceReader, plan: _Plan, staging: Path, progress: Progress) -> int:
    sizes = [sum(chunk.nbytes for chunk in file) for file in plan.files]
    mine = share_of(sizes, agreement.rank, agreement.world_size)
    total = sum(sizes[number] for number in mine)

    def work() -> Record:
        done = 0
        places: dict[str, list[list[int]]] = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="torch-dist") as pool:
            written = pool.map(lambda number: _write_file(reader, plan.files[number], staging / _file(number)), mine)
            for number, of_file in zip(mine, written, strict=True):
                places[str(number)] = of_file
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


def _write_file(reader: HuggingFaceReader, chunks: Sequence[_Chunk], path: Path) -> list[list[int]]:
    """Writes the chunks one behind the other; where each is: offset and length."""
    places = []
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as stream:
        for chunk in chunks:
            start = stream.tell()
            torch.save(_read(reader, chunk), stream)
            places.append([start, stream.tell() - start])
        stream.flush()
        os.fsync(stream.fileno())
    return places


def _read(reader: HuggingFaceReader, chunk: _Chunk) -> torch.Tensor:
    memory = torch.empty(chunk.sizes, dtype=torch_dtype(chunk.dtype))
    parts = plan_reads(chunk.region, reader.parts_of(chunk.name))
    dtypes = {part.stored.dtype for part in parts.reads}
    if parts.missing or parts.outside or dtypes != {chunk.dtype}:
        raise CheckpointCorruptError(
            f"{reader.contents.folder}: tensor {chunk.name}: not all of it is there, or in several dtypes: "
            f"{', '.join(sorted(dtypes))}"
        )
    reader.read_numbers((part, memory.view(-1)) for part in parts.reads)
    return memory


def _write_rest(reader: HuggingFaceReader, plan: _Plan, places: dict[int, list[list[int]]], staging: Path) -> None:
    """Rank 0: the states of modules, what says where all is, and what lies beside."""
    stored = {
        chunk.index: _StorageInfo(_file(number), offset, length)
        for number, file in enumerate(plan.files)
        for chunk, (offset, length) in zip(file, places[number], strict=True)
    }
    stored |= _write_states(plan.states, staging / _file(len(plan.files)))
    # Not by `FileSystemWriter.finish`, which writes down where it is: that is about to change.
    metadata = Metadata(plan.described, storage_data=stored, version=CURRENT_DCP_VERSION)
    write_file(staging / _METADATA_FILE, [pickle.dumps(metadata)])
    # Empty: whatever is in it comes out of `dist_checkpointing.load` among the tensors, and a strict `load_state_dict`
    # of these, as verl calls it, refuses it.
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
    """transformer-engine takes an empty tensor for a state without FP8, and megatron's own layers take anything."""
    saved = io.BytesIO()
    torch.save([torch.empty(0, dtype=torch.uint8)], saved)
    data = saved.getvalue()
    write_file(path, (data for _ in keys))
    return {
        MetadataIndex(key): _StorageInfo(path.name, number * len(data), len(data)) for number, key in enumerate(keys)
    }


def _describe(
    chunks: Iterable[_Chunk], states: Iterable[str]
) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {key: BytesStorageMetadata() for key in states}
    for chunk in chunks:
        entry = found.get(chunk.key)
        if entry is None:
            properties = TensorProperties(torch_dtype(chunk.dtype))
            entry = TensorStorageMetadata(properties, torch.Size(chunk.global_shape), [])
            found[chunk.key] = entry
        assert isinstance(entry, TensorStorageMetadata)
        if entry.properties.dtype != torch_dtype(chunk.dtype):
            raise CheckpointMismatchError(
                f"tensor {chunk.name}: is {chunk.dtype}, those of other layers are "
                f"{dtype_name(entry.properties.dtype)}: megatron has them as one tensor"
            )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
    return found


def _test(agreement: Agreement, reader: HuggingFaceReader, plan: _Plan, staging: Path) -> None:
    def work() -> Record:
        written = TorchDistFiles(staging, [staging])
        names = tuple(reader.names)

        for number in range(max(map(len, plan.parts.values()))):

            def read(name: str, region: Region, number: int = number) -> torch.Tensor:
                in_places = plan.parts[name]
                memory = torch.empty(region.local_shape, dtype=torch_dtype(reader.parts_of(name)[0].dtype))
                for piece in region.pieces:
                    for part in in_places[min(number, len(in_places) - 1)]:
                        _read_back(written, part, piece, region.global_shape, memory)
                return memory.reshape(-1)

            check_written(reader, names[agreement.rank :: agreement.world_size], read)
        return {}

    decide(agreement, f"testing {staging}", work, lambda _: {})


def _read_back(written: TorchDistFiles, part: _Part, piece: Piece, shape: Shape, memory: torch.Tensor) -> None:
    """What a part has of a piece, into its place in a local tensor."""
    place, (first, *rest) = part.place, piece.global_offset
    start, stop = max(part.first, first), min(part.first + part.rows, first + piece.shape[0])
    if start >= stop:
        return
    local = memory[tuple(slice(at, at + n) for at, n in zip(piece.local_offset, piece.shape, strict=True))]
    local = local[start - first : stop - first]
    offset = (*place.index, start - part.first, *rest)
    whole = (*place.lengths, part.rows, *shape[1:])
    written.read(WantedPart(place.key, whole, offset, local[(None,) * len(place.index)] if place.index else local))
