"""Reads a HuggingFace folder as Megatron's tensors, which consist of whole HuggingFace tensors or slices of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from mcore_ckpt import json_bounds
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import ReadTarget, ReadTargets, TensorInfo
from mcore_ckpt.formats.huggingface.safetensors_files import DTYPES, NAMES, HfStored, read_folder
from mcore_ckpt.formats.huggingface.stored_weights import DequantizingReader, StoredWeights
from mcore_ckpt.formats.locate import same_bytes
from mcore_ckpt.formats.shard_reader import ShardReader
from mcore_ckpt.models.accounting import ZEROS, LeftOut, together
from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.mapping import HfTensor, check_names, hf_tensors, hf_tensors_in
from mcore_ckpt.models.reconcile import HF_VALUE, with_mtp_of, with_tower_of
from mcore_ckpt.models.registry import known_architectures, model_from_config
from mcore_ckpt.models.table import Section, ValueChange
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Shape

_Tensor = TypeVar("_Tensor")


@dataclass(frozen=True)
class FolderContents:
    """The contents of `config.json` and of the files' headers.

    Ranks that cannot see the folder use these contents to plan.

    Attributes:
        config: the parsed `config.json`; if the folder has an adapter, the `config.json` of the base model.
        tensors: all tensors by name.
        sizes: the size of each file in bytes, by name.
        adapter: the parsed `adapter_config.json` if the folder has an adapter in PEFT's form; None for a model.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, HfStored]
    sizes: Mapping[str, int]
    adapter: Mapping[str, Any] | None = None

    def to_record(self) -> Record:
        """Returns the contents as plain values that can be sent to other ranks."""
        return {
            # The configuration is sent as text, because it can have NaN or Infinity, which strict JSON does not allow.
            "config": json.dumps(self.config),
            "tensors": [
                [name, NAMES[t.dtype], list(t.shape), t.path.name, t.offset, t.nbytes]
                for name, t in self.tensors.items()
            ],
            "sizes": dict(self.sizes),
            "adapter": json.dumps(self.adapter),
        }

    @staticmethod
    def from_record(folder: Path, record: Record) -> FolderContents:
        """Restores the contents from the result of `to_record`."""
        tensors = [
            HfStored(name, DTYPES[dtype], tuple(shape), folder / file, offset, nbytes)
            for name, dtype, shape, file, offset, nbytes in record["tensors"]
        ]
        config, adapter = json_bounds.loads(record["config"]), json_bounds.loads(record["adapter"])
        return FolderContents(folder, config, {tensor.name: tensor for tensor in tensors}, record["sizes"], adapter)


def read_contents(folder: Path) -> FolderContents:
    """Reads a folder's `config.json` and the header of each of its files.

    Raises:
        CheckpointNotFoundError: `folder` is not the folder of a HuggingFace model, or has no weights.
        CheckpointCorruptError: a file is missing, truncated, or not a safetensors file.
        UnsupportedError: `config.json` is not a model's configuration.
    """
    config = read_config(folder)
    tensors = {name: replace(t, name=name) for name, t in spelled_by_table(config, read_folder(folder)).items()}
    files = {tensor.path for tensor in tensors.values()}
    return FolderContents(folder, config, tensors, {path.name: path.stat().st_size for path in files})


def spelled_by_table(config: HfConfig, tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """Returns tensors by the names that their architecture's table uses. Unknown names stay unchanged.

    Versions of transformers spell the names of some architectures in different ways (`Table.spellings`).
    """
    known = known_architectures().get(str(config.get("model_type")))
    if known is None:
        return dict(tensors)
    return {spelled: tensors[name] for spelled, name in without_doubles(known.table.spelled, tensors).items()}


def without_doubles(spelled: Callable[[str], str], names: Iterable[str]) -> dict[str, str]:
    """Maps the table's spelling of each name to the name.

    Raises CheckpointMismatchError: the table spells two of the names in the same way.
    """
    found: dict[str, str] = {}
    for name in names:
        if (other := found.setdefault(spelled(name), name)) != name:
            raise CheckpointMismatchError(
                f"tensors {other} and {name} are two spellings of one tensor, so one of the two would be lost: remove "
                "the tensor that is not the model's"
            )
    return found


@dataclass(frozen=True)
class _Changed:
    """The shape of a stored tensor, and the change that converts its values to Megatron's."""

    change: ValueChange
    shape: Shape


class HuggingFaceReader(ShardReader):
    """Reads a HuggingFace folder under the names of Megatron's local layer specs.

    A Megatron tensor can have several stored parts (queries, keys and values; gate and up). Quantized tensors are
    dequantized while they are read.

    Args:
        ignore: regular expressions of HuggingFace names to leave out.
        dtype: the dtype of the values of quantized tensors; None takes the dtype in `config.json`.
        tower_of: the names of the live model's tensors, which show the modules of its vision tower. If there are no
            names, the reader assumes the modules that Megatron-Bridge gives this architecture.

    Raises:
        CheckpointMismatchError: names or shapes differ from the configuration.
        UnsupportedError: the architecture is not supported, weights are quantized in an unknown form, or weights are
            not floating-point numbers.
    """

    def __init__(
        self,
        contents: FolderContents,
        ignore: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        tower_of: Iterable[str] = (),
    ) -> None:
        self.contents = contents
        self._weights = StoredWeights(contents.folder, contents.config, contents.tensors, dtype)
        shapes = {name: stored.shape for name, stored in self._weights.tensors.items()}
        described = model_from_config(contents.config, tuple(ignore), shapes)
        self.model = with_mtp_of(with_tower_of(described, tower_of), (n for n in shapes if not described.ignores(n)))
        self._held: dict[str, list[StoredShard]] = {}
        self._sections: dict[str, tuple[Section, ...]] = {}
        self._changed: dict[tuple[str, int], _Changed] = {}
        self._left_out: tuple[LeftOut, ...] = ()
        self._zeros: list[StoredShard] = []
        self._of_zeros: list[str] = []
        for tensor in self._list_tensors():
            self._add(tensor, self._weights.tensors[tensor.name])
        firsts = {name: self._held[name][0] for name in sorted(self._held, key=natural_order)}
        infos = {name: TensorInfo(torch_dtype(s.dtype), s.region.global_shape) for name, s in firsts.items()}
        super().__init__(contents.folder, infos, self._held.__getitem__)

    def _list_tensors(self) -> list[HfTensor]:
        """Lists the tensors to read, with their places in Megatron's tensors.

        Puts all other tensors into `left_out`.
        """
        there, model = self._weights.tensors, self.model
        tensors = [tensor for tensor in hf_tensors_in(model, there) if not model.ignores(tensor.name)]
        copies = {copy for copy, _ in _copies(model, self.contents)}
        self._left_out = check_names(model, tensors, there, str(self.contents.folder), copies)
        return tensors

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The tensors of the folder that are not read, by reason."""
        zeros = [LeftOut(ZEROS, tuple(self._of_zeros))] if self._of_zeros else []
        return together(self._left_out, zeros, self._weights.left_out)

    def _add(self, tensor: HfTensor, stored: HfStored) -> None:
        _check(self.contents.folder, tensor, stored)
        for slab in tensor.slabs:
            shard = self._weights.shard(ShardKey(slab.mcore, MODEL), slab.region, stored, slab.start)
            if not slab.mcore:
                self._zeros.append(shard)
                self._of_zeros.append(tensor.name)
                continue
            self._held.setdefault(slab.mcore, []).append(shard)
            self._sections[slab.mcore] = slab.sections
            if slab.change is not None:
                shape = tensor.shape if len(tensor.slabs) == 1 else tensor.shape[1:]
                self._changed[shard.file, shard.offset] = _Changed(slab.change, shape)

    def read(self, ranges: ReadTargets, check: bool = True) -> int:
        """See `ShardReader.read`. Converting values needs memory for one HuggingFace tensor at a time."""
        as_stored: list[ReadTarget] = []
        changed: dict[tuple[str, int], list[ReadTarget]] = {}
        for read in ranges:
            place = read[0].stored.file, read[0].stored.offset
            (changed.setdefault(place, []) if place in self._changed else as_stored).append(read)
        nbytes = self._weights.read(as_stored) if as_stored else 0
        return nbytes + sum(self._read_changed(self._changed[place], same) for place, same in changed.items())

    def read_numbers(self, ranges: ReadTargets, check: bool = True) -> int:
        """Does the same as `read`, but raises CheckpointCorruptError for NaN, because NaN would ruin the training."""
        wanted = list(ranges)
        nbytes = self.read(wanted)
        for read, memory in {id(memory): (read, memory) for read, memory in wanted}.values():
            # The max() of a tensor with NaN is NaN. isnan() would allocate a mask of the tensor's size.
            if memory.numel() and memory.max().isnan():
                raise CheckpointCorruptError(
                    f"{self.place / read.stored.file}: tensor {read.stored.key}: contains NaN: take the weights from "
                    "another copy"
                )
        return nbytes

    @property
    def decoder_layers(self) -> tuple[int, ...]:
        """The numbers of the decoder layers, counted from 0."""
        return tuple(range(len(self.model.layers)))

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """The numbers, counted from 0, of the multi-token-prediction layers that have weights in the folder."""
        first = self.model.architecture.table.mcore + "mtp.layers."
        return tuple(sorted({int(name[len(first) :].split(".")[0]) for name in self.names if name.startswith(first)}))

    def parts_of(self, name: str) -> list[StoredShard]:
        """Returns all stored parts of a tensor."""
        return list(self._held[name])

    def sections_of(self, name: str) -> tuple[Section, ...]:
        """Returns the sections of a tensor (see `models.table.Row`). Tensor parallelism cuts each section by itself."""
        return self._sections[name]

    def check_visible(self, files: Iterable[str]) -> None:
        """Raises CheckpointCorruptError unless this rank sees the files with the same sizes as rank 0."""
        for name in sorted({*files, *self._weights.scale_files}):
            path = self.place / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointCorruptError(
                    f"{path}: cannot be opened on this rank ({error.strerror}), but rank 0 has opened this file: use "
                    'source="rank0" for a folder that not all ranks see'
                ) from None
            if size != self.contents.sizes[name]:
                raise CheckpointCorruptError(
                    f"{path}: has {size} bytes here, but {self.contents.sizes[name]} on rank 0"
                )

    def check_left_out(self) -> None:
        """Checks the tensors that have no place in Megatron: they must be zero, or copies of other tensors.

        Raises CheckpointMismatchError: such a tensor has other values, which the load would drop silently.
        """
        self._check_zeros()
        stored = DequantizingReader(self.place, self.contents.config, self.contents.tensors)
        for copy, original in _copies(self.model, self.contents):
            if not same_bytes(stored, copy, original):
                architecture = self.model.architecture
                is_head = copy == architecture.table.hf_head
                hint = f", or set {architecture.tied_field} to false in config.json" if is_head else ""
                raise CheckpointMismatchError(
                    f"{self.contents.tensors[copy].path}: tensor {copy}: {self.model.describe()} uses {original} in "
                    f"place of this tensor, but the two differ: name {copy} in `ignore` to leave it out{hint}"
                )

    def _check_zeros(self) -> None:
        for shard in self._zeros:
            memory = torch.empty(shard.region.numel, dtype=torch_dtype(shard.dtype))
            self._weights.read([(ReadRange.whole(shard), memory)])
            if memory.count_nonzero():
                raise CheckpointMismatchError(
                    f"{self.place / shard.file}: the tensor of shape {list(shard.region.local_shape)} at byte "
                    f"{shard.offset} has no counterpart in megatron and should be zero, but is not: use the original "
                    "folder of the model"
                )

    def _read_changed(self, changed: _Changed, reads: Sequence[ReadTarget]) -> int:
        stored = reads[0][0].stored
        there = torch.empty(changed.shape, dtype=torch_dtype(stored.dtype))
        nbytes = self._weights.read([(ReadRange.whole(stored), there)])
        values = changed.change.to_mcore(there).contiguous()
        for read, memory in reads:
            rows = read.rows
            _rows_of(memory, rows.destination, rows, rows.destination_stride).copy_(
                _rows_of(values, rows.start, rows, rows.source_stride)
            )
        return nbytes


def _rows_of(memory: torch.Tensor, start: int, rows: Rows, stride: int) -> torch.Tensor:
    return memory.as_strided((rows.rows, rows.row), (stride, 1), memory.storage_offset() + start)


def _copies(model: HfModel, contents: FolderContents) -> list[tuple[str, str]]:
    """Returns the tensors that a folder has twice, as pairs of the copy and the tensor that is read instead."""
    tensors = hf_tensors(model)
    names = {slab.mcore: tensor.name for tensor in tensors if not tensor.is_copy for slab in tensor.slabs}
    pairs = [(tensor.name, names[slab.mcore]) for tensor in tensors if tensor.is_copy for slab in tensor.slabs]
    if model.is_tied:
        # transformers writes no head for a tied model, but some published folders have one (Qwen3-0.6B and 1.7B).
        table = model.architecture.table
        pairs.append((table.hf_head, table.hf_embedding))
    return [(copy, name) for copy, name in pairs if copy in contents.tensors and not model.ignores(copy)]


def _check(folder: Path, tensor: HfTensor, stored: HfStored) -> None:
    if tensor.name == HF_VALUE and stored.shape[:1] > (1,):
        raise CheckpointMismatchError(
            f"{stored.path}: tensor {tensor.name}: gives {stored.shape[0]} values (labels), but megatron's value head "
            "gives one value: use a model with one label"
        )
    if tensor.shape != stored.shape:
        raise CheckpointMismatchError(
            f"{stored.path}: tensor {tensor.name}: has shape {list(stored.shape)}, but {folder / 'config.json'} "
            f"requires {list(tensor.shape)}"
        )
    if not stored.dtype.is_floating_point or stored.dtype.itemsize == 1:
        raise UnsupportedError(
            f"{stored.path}: tensor {tensor.name}: is stored as {NAMES[stored.dtype]}, but quantization_config in "
            "config.json does not say how this tensor is quantized: restore that field, or convert the weights to "
            "bfloat16 first"
        )
