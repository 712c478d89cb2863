"""Converts a HuggingFace folder for megatron's `dist_checkpointing.load`, without megatron or the built model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader
from mcore_ckpt.formats.huggingface.side_files import copy_side_files
from mcore_ckpt.formats.kinds import is_way_back
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.keys import Keys, Place
from mcore_ckpt.formats.torch_dist.writer import (
    Contents,
    KeyRows,
    Slice,
    file_name,
    saved_object,
    slices_of,
    write_rest,
    write_slices,
)
from mcore_ckpt.io.files import new_folder, sync_folders
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.sharding.assignment import share_of
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.sharding.plan import MODEL, ShardKey, plan_reads
from mcore_ckpt.sharding.regions import Piece, Region, Shape
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.new_folder import Replaceable, mode_as, open_new_folder, publish_folder
from mcore_ckpt.tools.convert.from_huggingface import (
    ConversionReport,
    Progress,
    check_together,
    check_written,
    left_out_of,
    open_folder,
)

# With two threads, one file is read while another is written.
_THREADS = 2


@dataclass(frozen=True, eq=False)
class _Plan:
    """Everything to write.

    Attributes:
        contents: the slices of each file, and the empty states of the modules.
        key_rows: by tensor name, one entry for each place where the tensor is stored: its keys with their rows.
    """

    contents: Contents
    key_rows: Mapping[str, Sequence[Sequence[KeyRows]]]


def convert_to_torch_dist(
    source: str | Path,
    path: Path,
    agreement: Agreement,
    test: bool = False,
    progress: Progress = lambda done, total: None,
    ignore: Sequence[str] = (),
    dequantized: torch.dtype | None = None,
    force: bool = False,
) -> ConversionReport:
    """Writes the folder `path`, which appears only when it is complete. Every process must call it.

    A model of any layout can load the folder, with local or with transformer-engine's layer specs. The vocabulary has
    HuggingFace's size, without padding. Configuration and tokenizer are in `huggingface/` below the folder. The
    conversion needs a few times SCATTER_BYTES of memory.

    Args:
        source: the folder of the HuggingFace model, which every process must see, or the name of a model on the hub.
        path: the folder to write; without `force` it must be empty or not exist.
        agreement: connects this process with the other processes that share the work.
        test: True to read everything back and compare it before the folder appears.
        progress: called with the number of bytes that this process has written and the number that it will write.
        ignore: regular expressions of HuggingFace tensors to leave out.
        dequantized: the dtype of weights that are quantized in the folder; None takes the one in its `config.json`.
        force: True to replace a torch_dist checkpoint that is there.

    Raises:
        InvalidArgumentError: `path` has files and may not be replaced.
        CheckpointError: the HuggingFace folder is damaged, or `path` cannot be written. All processes raise it, and
            `path` is as it was.
    """
    started = time.monotonic()
    path, replaceable = path.absolute(), Replaceable(force, "a torch_dist checkpoint", is_way_back)
    check_together(agreement, path, replaceable)
    reader = open_folder(agreement, source, ignore, dequantized)
    plan = _plan(reader)
    attempt = _open(agreement, path, plan, replaceable, mode_as(reader.contents.folder))
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
            act=lambda: publish_folder(staging, path, attempt, replaceable),
        )
    except BaseException:
        if agreement.is_coordinator:
            commit.discard(staging)
        raise
    seconds = time.monotonic() - started
    return ConversionReport(reader.place, path, reader.model.describe(), nbytes, seconds, left_out_of(reader, path))


# -- plan -------------------------------------------------------------------------------------------------


def are_alike(reader: HuggingFaceReader) -> bool:
    """Returns True if megatron gives all decoder layers the same keys (`TransformerBlock.sharded_state_dict`, 0.16.1).

    Megatron does so unless the layers differ, or the config selects the layers that have experts or linear attention. A
    HybridModel has a key for each layer (`HybridStack.sharded_state_dict`, 0.18).
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
    # transformer-engine reads an empty tensor as a state without FP8, and megatron's own layers accept any state.
    empty = saved_object(torch.empty(0, dtype=torch.uint8))
    states = dict.fromkeys((place.object_key for name in names for place in keys.states(name)), empty)
    # `common.pt` must have no entries, because `dist_checkpointing.load` returns its entries together with the tensors.
    # verl gives both to a strict `load_state_dict`, which refuses unknown entries.
    contents = Contents.of(slices, states)
    contents.describe()  # which raises if it cannot be done
    return _Plan(contents, key_rows)


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


def _slices(reader: HuggingFaceReader, name: str, rows: KeyRows) -> Iterator[Slice]:
    first = reader.parts_of(name)[0]
    return slices_of(ShardKey(name, MODEL), rows, first.region.global_shape, first.dtype)


def _open(agreement: Agreement, path: Path, plan: _Plan, replaceable: Replaceable, mode: int) -> str:
    def combine(_: Sequence[Record]) -> Record:
        sizes = (sum(each.nbytes for each in file) for file in plan.contents.files)
        return {"attempt": open_new_folder(path, sizes, replaceable, mode)}

    return str(decide(agreement, f"opening {path}", dict, combine)["attempt"])


# -- write ------------------------------------------------------------------------------------------------


def _write(agreement: Agreement, reader: HuggingFaceReader, plan: _Plan, staging: Path, progress: Progress) -> int:
    files = plan.contents.files
    sizes = [sum(each.nbytes for each in file) for file in files]
    mine = share_of(sizes, agreement.rank, agreement.world_size)
    total = sum(sizes[number] for number in mine)

    def work() -> Record:
        done = 0
        places: dict[str, list[list[int]]] = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="torch-dist") as pool:
            written = pool.map(
                lambda number: write_slices(files[number], staging / file_name(number), lambda one: _read(reader, one)),
                mine,
            )
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


def _write_rest(reader: HuggingFaceReader, plan: _Plan, places: dict[int, list[list[int]]], staging: Path) -> None:
    """Writes everything but the tensors. Only rank 0 calls it."""
    write_rest(plan.contents, places, staging)
    folder = staging / file_names.HUGGINGFACE_DIR
    new_folder(folder)
    copy_side_files(reader.contents.folder, folder)
    sync_folders(staging)


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


def _read_back(written: TorchDistFiles, rows: KeyRows, piece: Piece, shape: Shape, memory: torch.Tensor) -> None:
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
