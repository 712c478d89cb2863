"""Converts a HuggingFace folder for megatron's `dist_checkpointing.load`, without megatron or the built model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.contract import FileReport
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader
from mcore_ckpt.formats.huggingface.side_files import copy_side_files
from mcore_ckpt.formats.torch_dist.contents import Contents, KeyRows, Slice, saved_object, slices_of
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.keys import Keys, Place
from mcore_ckpt.formats.torch_dist.kind import has_torch_dist
from mcore_ckpt.formats.torch_dist.writer import TorchDistWriter
from mcore_ckpt.io.files import new_folder
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.sharding.plan import MODEL, ShardKey, plan_reads
from mcore_ckpt.sharding.regions import Piece, Region, Shape
from mcore_ckpt.steps.new_folder import Replaceable, mode_as
from mcore_ckpt.tools.convert.destinations import NewFolder
from mcore_ckpt.tools.convert.from_huggingface import ConversionReport, left_out_of, open_folder
from mcore_ckpt.tools.convert.read_back import check_written
from mcore_ckpt.tools.convert.walk import check_together, write_together
from mcore_ckpt.tools.examine.progress import Progress, no_progress


def convert_to_torch_dist(
    source: str | Path,
    path: Path,
    agreement: Agreement,
    test: bool = False,
    progress: Progress = no_progress,
    ignore: Sequence[str] = (),
    dequantized: torch.dtype | None = None,
    force: bool = False,
) -> ConversionReport:
    """Writes the folder `path`, which appears only when it is complete. Every process must call this function.

    A model of any layout can load the folder, with local or with transformer-engine's layer specs. The vocabulary has
    HuggingFace's size, without padding. Configuration and tokenizer are in `huggingface/` below the folder. The
    conversion needs a few times SCATTER_BYTES of memory. See `convert_to_native` for the other arguments.

    Args:
        path: the folder to write; without `force` it must be empty or not exist.
        force: True to replace a torch_dist checkpoint in `path`.

    Raises:
        InvalidArgumentError: `path` has files and may not be replaced.
        CheckpointError: the HuggingFace folder is damaged, or `path` cannot be written. All processes raise it, and
            `path` is as it was.
    """
    started = time.monotonic()
    destination = NewFolder(path.absolute(), Replaceable(force, "a torch_dist checkpoint", has_torch_dist))
    check_together(agreement, destination)
    reader = open_folder(agreement, source, ignore, dequantized)
    nbytes = write_together(
        agreement, [(".", _writer(reader))], destination, mode_as(reader.contents.folder), progress, test
    )
    path, seconds = destination.path, time.monotonic() - started
    return ConversionReport(reader.place, path, reader.model.describe(), nbytes, seconds, left_out_of(reader, path))


def are_alike(reader: HuggingFaceReader) -> bool:
    """Returns True if megatron gives all decoder layers the same keys (`TransformerBlock.sharded_state_dict`, 0.16.1).

    Megatron gives layers different keys if the layers differ, or if the config selects which layers have experts or
    linear attention. In a HybridModel, each layer has separate keys (`HybridStack.sharded_state_dict`, 0.18).
    """
    if reader.model.architecture.table.is_hybrid:
        return False
    lists = ("moe_layer_freq", "linear_attention_freq")
    values: dict[str, Any] = {}
    if reader.model.architecture.rules:
        values = to_mcore_config(reader.model).transformer
    return len(set(reader.model.layers)) <= 1 and not any(
        isinstance(values.get(name), list) or (values.get(name) or 1) != 1 for name in lists
    )


def _writer(reader: HuggingFaceReader) -> _Writer:
    names = tuple(reader.names)
    experts = 1 + max((expert[1] for name in names if (expert := expert_of(name))), default=0)
    keys = Keys(reader.names, len(reader.model.layers), experts, are_alike(reader))
    key_rows = {name: [_key_rows(reader, name, place) for place in keys.places(name)] for name in names}
    slices: list[Slice] = []
    for name in names:
        first = reader.parts_of(name)[0]
        for rows in chain.from_iterable(key_rows[name]):
            slices += slices_of(ShardKey(name, MODEL), rows, first.region.global_shape, first.dtype)
    # An empty tensor serves as the state under both layer specs: transformer-engine reads an empty tensor as a state
    # without FP8, and megatron's own layers accept any state.
    empty = saved_object(torch.empty(0, dtype=torch.uint8))
    states = dict.fromkeys((place.object_key for name in names for place in keys.states(name)), empty)
    # `common.pt` must have no entries. `dist_checkpointing.load` returns the entries of this file in the same dict as
    # the tensors, and verl passes this dict to a strict `load_state_dict`, which refuses unknown entries.
    contents = Contents.of(slices, states)
    contents.describe()  # raises an error if the contents cannot be described
    return _Writer(contents, partial(_read, reader), reader.place, reader, key_rows)


def _key_rows(reader: HuggingFaceReader, name: str, place: Place) -> list[KeyRows]:
    """Divides a tensor into the rows of its keys.

    Megatron gives each section its own key (`_split_tensor_factory` of GatedDeltaNet, megatron-core 0.16.1).
    """
    sections = reader.sections_of(name)
    if not sections:
        return [KeyRows(place, 0, reader.parts_of(name)[0].region.global_shape[0])]
    starts = accumulate((section.rows for section in sections), initial=0)
    return [
        KeyRows(replace(place, key=f"{place.key}.{section.name}"), start, section.rows)
        for start, section in zip(starts, sections, strict=False)
    ]


@dataclass(frozen=True, eq=False)
class _Writer(TorchDistWriter):
    """Writes a folder's tensors and assets. `check` compares the written tensors with the source, not with the plan.

    `key_rows` lists the places where a tensor is stored, by the tensor's name; each place is a list of keys with their
    rows.
    """

    reader: HuggingFaceReader
    key_rows: Mapping[str, Sequence[Sequence[KeyRows]]]

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        super().finish(reports, folder)
        side_files = folder / file_names.HUGGINGFACE_DIR
        new_folder(side_files)
        copy_side_files(self.reader.contents.folder, side_files)

    def check(self, folder: Path, part: int, parts: int) -> None:
        written = TorchDistFiles(folder, [folder])
        names = tuple(self.reader.names)[part::parts]
        for number in range(max(map(len, self.key_rows.values()))):
            check_written(self.reader, names, partial(self._read_back, written, number))

    def _read_back(self, written: TorchDistFiles, number: int, name: str, region: Region) -> torch.Tensor:
        places = self.key_rows[name]
        memory = torch.empty(region.local_shape, dtype=torch_dtype(self.reader.parts_of(name)[0].dtype))
        for piece in region.pieces:
            for rows in places[min(number, len(places) - 1)]:
                _read_piece(written, rows, piece, region.global_shape, memory)
        return memory.reshape(-1)


def _read(reader: HuggingFaceReader, wanted: Slice) -> torch.Tensor:
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


def _read_piece(written: TorchDistFiles, rows: KeyRows, piece: Piece, shape: Shape, memory: torch.Tensor) -> None:
    """Reads the rows that a key and a piece have in common. Writes them to the piece's place in `memory`."""
    place, (first, *rest) = rows.place, piece.global_offset
    start, stop = max(rows.first, first), min(rows.first + rows.count, first + piece.shape[0])
    if start >= stop:
        return
    local = memory[tuple(slice(at, at + n) for at, n in zip(piece.local_offset, piece.shape, strict=True))]
    local = local[start - first : stop - first]
    offset = (*place.index, start - rows.first, *rest)
    whole = (*place.lengths, rows.count, *shape[1:])
    written.read(WantedPart(place.key, whole, offset, local[(None,) * len(place.index)] if place.index else local))
