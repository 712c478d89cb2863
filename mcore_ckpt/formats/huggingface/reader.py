"""A HuggingFace folder as a checkpoint of megatron's tensors: what it holds are stored parts of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.dtypes import dtype_name, torch_dtype
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, StageRecord
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.huggingface.safetensors_files import HfStored, read_folder
from mcore_ckpt.formats.native.catalog import Catalog
from mcore_ckpt.formats.native.ranges import read_stored
from mcore_ckpt.formats.shard_reader import same_bytes, source_of_folder
from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.mapping import HfTensor, check_names, hf_tensors, hf_tensors_in
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.table import HF_EMBEDDING, HF_HEAD, Section, ValueChange
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Shape

# Floating, but numbers only together with scales that are other tensors.
_QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class FolderContents:
    """What the headers of a folder say: enough to plan with, on ranks that cannot see it too.

    Attributes:
        folder: where.
        config: the object in `config.json`.
        tensors: all there are, by name.
        sizes: bytes of each file, by name.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, HfStored]
    sizes: Mapping[str, int]

    def to_record(self) -> Record:
        """As plain values that travel between ranks."""
        return {
            # As text: a configuration may hold what strict JSON does not (NaN, Infinity).
            "config": json.dumps(self.config),
            "tensors": [
                [t.name, dtype_name(t.dtype), list(t.shape), t.path.name, t.offset, t.nbytes]
                for t in self.tensors.values()
            ],
            "sizes": dict(self.sizes),
        }

    @staticmethod
    def from_record(folder: Path, record: Record) -> FolderContents:
        tensors = [
            HfStored(name, torch_dtype(dtype), tuple(shape), folder / file, offset, nbytes)
            for name, dtype, shape, file, offset, nbytes in record["tensors"]
        ]
        config = json.loads(record["config"])
        return FolderContents(folder, config, {tensor.name: tensor for tensor in tensors}, record["sizes"])


def read_contents(folder: Path) -> FolderContents:
    """Opens a folder's `config.json` and the header of each of its files.

    Raises:
        CheckpointNotFoundError: it is not the folder of a HuggingFace model, or has no weights.
        CheckpointCorruptError: a file is missing, cut, or no safetensors file.
        UnsupportedError: `config.json` is not one.
    """
    tensors = read_folder(folder)
    files = {tensor.path for tensor in tensors.values()}
    return FolderContents(folder, read_config(folder), tensors, {path.name: path.stat().st_size for path in files})


@dataclass(frozen=True)
class _Changed:
    """What is stored at a place are other values than mcore's, in a tensor of this shape."""

    change: ValueChange
    shape: Shape


class FolderCatalog(Catalog):
    """The tensors of a HuggingFace folder under the names that megatron's local layer specs have for them.

    It stands for a checkpoint that one rank has saved, with parts of a tensor (queries, keys, values; gate and up)
    stored apart, and without CRCs, which these files do not have.

    Args:
        contents: the folder's.
        ignore: regular expressions of HuggingFace names to leave out.
        role: of the checkpoint that it stands for.

    Raises:
        CheckpointMismatchError: names or shapes are not those that the configuration says.
        UnsupportedError: an architecture without a table, or weights that are not floating-point numbers.
    """

    def __init__(self, contents: FolderContents, ignore: Sequence[str] = (), role: str = "actor") -> None:
        self.contents = contents
        self.model = model_from_config(contents.config, tuple(ignore))
        self._shards: dict[str, list[StoredShard]] = {}
        self._sections: dict[str, tuple[Section, ...]] = {}
        self._changed: dict[tuple[str, int], _Changed] = {}
        self._zeros: list[StoredShard] = []
        for tensor in _wanted(self.model, contents):
            self._add(tensor, contents.tensors[tensor.name])
        super().__init__(
            contents.folder, _manifest(self.model, contents, sorted(self._shards, key=natural_order), role)
        )

    def _add(self, tensor: HfTensor, stored: HfStored) -> None:
        _check(self.contents.folder, tensor, stored)
        for slab in tensor.slabs:
            offset = stored.offset + slab.start * stored.dtype.itemsize
            key, dtype = ShardKey(slab.mcore, MODEL), dtype_name(stored.dtype)
            nbytes = slab.numel * stored.dtype.itemsize
            shard = StoredShard(key, slab.region, dtype, stored.path.name, offset, nbytes, crc32=None)
            if not slab.mcore:
                self._zeros.append(shard)
                continue
            self._shards.setdefault(slab.mcore, []).append(shard)
            self._sections[slab.mcore] = slab.sections
            if slab.change is not None:
                shape = tensor.shape if len(tensor.slabs) == 1 else tensor.shape[1:]
                self._changed[shard.file, offset] = _Changed(slab.change, shape)

    def files(self, key: ShardKey) -> list[FileRecord]:
        if key.kind != MODEL:
            return []
        return [self.by_path[path] for path in sorted({shard.file for shard in self._shards.get(key.name, ())})]

    def shards(self, key: ShardKey, files: Iterable[FileRecord]) -> list[StoredShard]:
        paths = {file.path for file in files}
        return [shard for shard in self._shards.get(key.name, ()) if key.kind == MODEL and shard.file in paths]

    def alias(self, key: ShardKey, files: Iterable[FileRecord]) -> ShardKey | None:
        return None

    def kinds(self, name: str, files: Iterable[FileRecord]) -> tuple[str, ...]:
        return ()

    def check_visible(self, files: Iterable[str]) -> None:
        """Raises CheckpointCorruptError unless this process sees files of the sizes that the headers speak of."""
        for name in sorted(set(files)):
            path = self.role_dir / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointCorruptError(
                    f"{path}: cannot be seen from here ({error.strerror}), though rank 0 has opened it: use "
                    'source="rank0" for a folder that not all ranks see'
                ) from None
            if size != self.contents.sizes[name]:
                raise CheckpointCorruptError(f"{path}: has {size} bytes here, {self.contents.sizes[name]} on rank 0")

    def check_left_out(self) -> None:
        """Reads what becomes no tensor of megatron's: what should be zeros, and copies of other tensors.

        Takes CONVERT_BYTES. Raises CheckpointMismatchError if it is anything else: it would be lost without a word.
        """
        self._check_zeros()
        source = source_of_folder(self.role_dir, self.contents.tensors)
        for copy, original in _copies(self.model, self.contents):
            if not same_bytes(source, copy, original):
                hint = ", or set tie_word_embeddings to false in config.json" if copy == HF_HEAD else ""
                raise CheckpointMismatchError(
                    f"{self.contents.tensors[copy].path}: tensor {copy}: {self.model.describe()} has no other than "
                    f"{original} for it, and they differ: say that it is to be left out (ignore){hint}"
                )

    def _check_zeros(self) -> None:
        for shard in self._zeros:
            memory = torch.empty(shard.region.numel, dtype=torch_dtype(shard.dtype))
            read_stored(self.role_dir, [(all_of(shard), memory)])
            if memory.count_nonzero():
                raise CheckpointMismatchError(
                    f"{self.role_dir / shard.file}: the tensor of shape {list(shard.region.local_shape)} at byte "
                    f"{shard.offset} has no counterpart in megatron, and is not zero"
                )

    def read(self, reads: Iterable[tuple[ReadRange, torch.Tensor]]) -> int:
        """Fills tensors with ranges of the folder's, on several threads. Returns how many bytes were read.

        Takes memory for one HuggingFace tensor where values change on the way.

        Args:
            reads: each range, and the contiguous tensor of the stored dtype that is the wanted shard's memory, on the
                CPU or a GPU.

        Raises:
            CheckpointCorruptError: a file cannot be read.
        """
        as_stored: list[tuple[ReadRange, torch.Tensor]] = []
        changed: dict[tuple[str, int], list[tuple[ReadRange, torch.Tensor]]] = {}
        for read in reads:
            place = read[0].stored.file, read[0].stored.offset
            (changed.setdefault(place, []) if place in self._changed else as_stored).append(read)
        nbytes = read_stored(self.role_dir, as_stored) if as_stored else 0
        return nbytes + sum(self._read_changed(self._changed[place], same) for place, same in changed.items())

    def read_numbers(self, reads: Iterable[tuple[ReadRange, torch.Tensor]]) -> int:
        """As `read`. Raises CheckpointCorruptError for what is not a number, too: nothing that learns survives it."""
        wanted = list(reads)
        nbytes = self.read(wanted)
        for read, memory in {id(memory): (read, memory) for read, memory in wanted}.values():
            # The largest of numbers is a number; isnan() would take a mask as long as the memory.
            if memory.numel() and memory.max().isnan():
                raise CheckpointCorruptError(
                    f"{self.role_dir / read.stored.file}: tensor {read.stored.key}: is not all numbers (NaN)"
                )
        return nbytes

    def parts_of(self, name: str) -> list[StoredShard]:
        """Where a tensor is stored, by the name that this catalog has for it."""
        return list(self._shards[name])

    def sections_of(self, name: str) -> tuple[Section, ...]:
        """Which tensors megatron keeps apart in a tensor, by the name that this catalog has for it: as in `Row`."""
        return self._sections[name]

    def _read_changed(self, changed: _Changed, reads: Sequence[tuple[ReadRange, torch.Tensor]]) -> int:
        stored = reads[0][0].stored
        there = torch.empty(changed.shape, dtype=torch_dtype(stored.dtype))
        nbytes = read_stored(self.role_dir, [(all_of(stored), there)])
        values = changed.change.to_mcore(there).contiguous()
        for read, memory in reads:
            rows = read.rows
            _rows_of(memory, rows.destination, rows, rows.destination_stride).copy_(
                _rows_of(values, rows.start, rows, rows.source_stride)
            )
        return nbytes


def all_of(shard: StoredShard) -> ReadRange:
    """The read of a whole stored part."""
    return ReadRange(shard, Rows(0, 0, shard.region.numel))


def _rows_of(memory: torch.Tensor, start: int, rows: Rows, stride: int) -> torch.Tensor:
    return memory.as_strided((rows.rows, rows.row), (stride, 1), memory.storage_offset() + start)


def _wanted(model: HfModel, contents: FolderContents) -> list[HfTensor]:
    tensors = [tensor for tensor in hf_tensors_in(model, contents.tensors) if not model.ignores(tensor.name)]
    copies = {copy for copy, _ in _copies(model, contents)}
    check_names(model, tensors, contents.tensors.keys() - copies, str(contents.folder))
    return tensors


def _copies(model: HfModel, contents: FolderContents) -> list[tuple[str, str]]:
    """What a folder has twice: the copy, and what is read instead."""
    tensors = hf_tensors(model)
    names = {slab.mcore: tensor.name for tensor in tensors if not tensor.is_copy for slab in tensor.slabs}
    pairs = [(tensor.name, names[slab.mcore]) for tensor in tensors if tensor.is_copy for slab in tensor.slabs]
    if model.is_tied:
        # transformers does not write it, but published folders have it (Qwen3-0.6B and 1.7B).
        pairs.append((HF_HEAD, HF_EMBEDDING))
    return [(copy, name) for copy, name in pairs if copy in contents.tensors and not model.ignores(copy)]


def _check(folder: Path, tensor: HfTensor, stored: HfStored) -> None:
    if tensor.shape != stored.shape:
        raise CheckpointMismatchError(
            f"{stored.path}: tensor {tensor.name}: has shape {list(stored.shape)}, by {folder / 'config.json'} it "
            f"should have {list(tensor.shape)}"
        )
    if not stored.dtype.is_floating_point or stored.dtype in _QUANTIZED:
        raise UnsupportedError(
            f"{stored.path}: tensor {tensor.name}: is stored as {dtype_name(stored.dtype)}: quantized weights are not "
            "supported: convert them to bfloat16 first"
        )


def _manifest(model: HfModel, contents: FolderContents, names: Sequence[str], role: str) -> Manifest:
    stage = StageRecord(0, 0, tuple(range(len(model.layers))), tuple(_mtp_layers(names)))
    return Manifest(
        step=0,
        role=role,
        roles=(role,),
        attempt="",
        created="",
        versions={},
        contents=("model",),
        topology=Topology(),
        ranks=(RankCoordinates(),),
        stages=(stage,),
        tensors=tuple(names),
        files=tuple(FileRecord(file, "model", 0, size, 0) for file, size in sorted(contents.sizes.items())),
    )


def _mtp_layers(names: Iterable[str]) -> Iterable[int]:
    return sorted({int(name.split(".")[2]) for name in names if name.startswith("mtp.layers.")})
