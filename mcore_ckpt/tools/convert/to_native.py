"""Converts a HuggingFace folder into a checkpoint of this package. It holds the model at step 0, under any layout."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import IndexPlace, StageRecord, WrittenFile
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.contract import RegionRead
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader
from mcore_ckpt.formats.huggingface.side_files import copy_side_files, written_side_files
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.io.files import new_folder, sync_folders_below
from mcore_ckpt.models.stated_facts import facts_of_model
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.sharding.assignment import share_of
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.new_folder import mode_as
from mcore_ckpt.steps.new_step import NewStep, check_may_write
from mcore_ckpt.tools.convert.from_huggingface import (
    ConversionReport,
    Progress,
    check_written,
    left_out_of,
    open_folder,
    whole_region,
)
from mcore_ckpt.tools.convert.reshard.attention_heads import check_heads
from mcore_ckpt.tools.convert.reshard.new_manifest import Identity, build_manifest
from mcore_ckpt.tools.convert.reshard.planner import PlannedFile, Planner
from mcore_ckpt.tools.convert.reshard.saved_tensors import SavedTensor
from mcore_ckpt.tools.convert.reshard.streaming import FileNames, write_planned_files
from mcore_ckpt.tools.convert.reshard.target import SavedLayout, Target, WantedLayout, resolve

STEP = 0
_CONTENTS = ("model",)


@dataclass(frozen=True)
class _NewCheckpoint:
    """The checkpoint to write: its folder, its staging folder, its layout; on the coordinator also the new step."""

    role_dir: Path
    staging: Path
    target: Target
    opened: list[NewStep]


def convert_to_native(
    source: str | Path,
    root: Path,
    wanted: WantedLayout,
    agreement: Agreement,
    role: str = "actor",
    test: bool = False,
    progress: Progress = lambda done, total: None,
    ignore: Sequence[str] = (),
    dequantized: torch.dtype | None = None,
    force: bool = False,
) -> ConversionReport:
    """Writes `root/global_steps_0/<role>`, which appears only when it is complete. Every process must call it.

    The processes divide the files among themselves. Each needs the memory that `write_planned_files` needs, whatever
    the size of the model.

    Args:
        source: the folder of the HuggingFace model, which every process must see, or the name of a model on the hub.
        root: the folder of all steps. Meanwhile no trainer can save below it.
        wanted: the layout of the new checkpoint.
        agreement: connects this process with the other processes that share the work.
        role: the name of the role's folder.
        test: True to read everything back and compare it before the checkpoint appears.
        progress: called with the number of bytes that this process has written, and the number that it will write.
        ignore: regular expressions of HuggingFace tensors to leave out.
        dequantized: the dtype of weights that are quantized in the folder; None takes the one in its `config.json`.
        force: True to replace a checkpoint of this role at step 0. A pinned step stays.

    Raises:
        InvalidArgumentError: the sizes contradict each other, or `root` has this role at step 0.
        LockedError: a trainer saves below `root`.
        CheckpointError: the HuggingFace folder is damaged or does not fit the layout, or the checkpoint cannot be
            written. All processes raise it, and `root` is as it was.
    """
    started = time.monotonic()
    role_dir = file_names.step_dir(root.absolute(), STEP) / file_names.check_role(role)
    _check_free(agreement, role_dir, force)
    reader = open_folder(agreement, source, ignore, dequantized)
    target, files = _plan(reader, wanted)
    mode = mode_as(reader.contents.folder)
    with ExitStack() as stack:  # on the coordinator it holds the new step
        attempt, new = _open(agreement, stack, role_dir, [file.nbytes for file in files], force, mode)
        staging = file_names.staging_dir(role_dir, attempt)
        nbytes = _write(agreement, reader, files, _NewCheckpoint(role_dir, staging, target, new), progress)
        if test:
            _test(agreement, reader, staging)
        decide(agreement, f"putting {role_dir} in place", dict, lambda _: {}, act=lambda: new[0].publish())
    seconds = time.monotonic() - started
    return ConversionReport(
        reader.place, role_dir, reader.model.describe(), nbytes, seconds, left_out_of(reader, role_dir)
    )


def folder_tensors(reader: HuggingFaceReader) -> Iterator[SavedTensor]:
    """Describes the folder's tensors as if one rank had saved them."""
    for name in reader.names:
        file = reader.parts_of(name)[0].file
        yield SavedTensor(
            name, MODEL, (), main=False, aliased=False, seen={0: whole_region(reader, name)}, pp=0, file=file
        )


def _plan(reader: HuggingFaceReader, wanted: WantedLayout) -> tuple[Target, list[PlannedFile]]:
    # The tensors of a HuggingFace model are not cut, so its layout is that of a checkpoint that one rank has saved.
    saved = SavedLayout(Topology(), (StageRecord(0, 0, reader.decoder_layers, reader.mtp_layers),))
    try:
        tensors = list(folder_tensors(reader))
        target = resolve(wanted, saved, any(tensor.expert for tensor in tensors))
        check_heads({}, reader.contents.config, tensors, saved.topology, target.topology)
        return target, Planner(reader, saved, _CONTENTS, tensors, target, wanted).files()
    except CheckpointError as error:
        raise type(error)(f"{reader.place}: {error}") from error


def _check_free(agreement: Agreement, role_dir: Path, force: bool) -> None:
    """Checks that the checkpoint may be written, before a model is downloaded or read."""

    def combine(_: Sequence[Record]) -> Record:
        check_may_write(role_dir.parent.parent, STEP, [role_dir.name], force)
        return {}

    decide(agreement, f"looking at {role_dir}", dict, combine)


def _open(
    agreement: Agreement, stack: ExitStack, role_dir: Path, sizes: Sequence[int], force: bool, mode: int
) -> tuple[str, list[NewStep]]:
    """Opens the new step on the coordinator. Returns the id of the attempt, and, on the coordinator alone, the step."""
    opened: list[NewStep] = []

    def combine(_: Sequence[Record]) -> Record:
        new = stack.enter_context(NewStep(role_dir.parent.parent, STEP, [role_dir.name], force, mode=mode))
        new.check_space(sizes)
        new.open(role_dir.name)
        opened.append(new)
        return {"attempt": new.attempt}

    return str(decide(agreement, f"opening {role_dir}", dict, combine)["attempt"]), opened


def _write(
    agreement: Agreement,
    reader: HuggingFaceReader,
    files: Sequence[PlannedFile],
    new: _NewCheckpoint,
    progress: Progress,
) -> int:
    sizes = [file.nbytes for file in files]
    mine = share_of(sizes, agreement.rank, agreement.world_size)
    total, done = sum(sizes[number] for number in mine), [0]

    def wrote(nbytes: int) -> None:
        done[0] = min(total, done[0] + nbytes)
        progress(done[0], total)

    def work() -> Record:
        written = write_planned_files(reader.read_numbers, [files[number] for number in mine], new.staging, wrote)
        return {"files": [_as_record(names) for names in written]}

    def combine(records: Sequence[Record]) -> Record:
        indexed = [_from_record(file) for record in records for file in record["files"]]
        commit.check_files(new.staging, [(rank, names.file) for rank, names in enumerate(indexed)])
        folder = new.staging / file_names.HUGGINGFACE_DIR
        new_folder(folder)
        assets = [(0, file) for file in written_side_files(folder, copy_side_files(reader.contents.folder, folder))]
        role = new.role_dir.name
        (step,) = new.opened
        facts = facts_of_model(reader.model) or None
        identity = Identity(STEP, role, (role,), step.attempt, _CONTENTS, {}, model=facts)
        sync_folders_below(new.staging)
        step.write_manifest(build_manifest(identity, new.target, indexed, assets))
        return {}

    decide(agreement, f"writing {new.staging}", work, combine)
    return sum(sizes)


def _as_record(names: FileNames) -> Record:
    return {"file": asdict(names.file), "rank": names.rank, "names": list(names.names)}


def _from_record(record: Record) -> FileNames:
    fields: dict[str, Any] = record["file"]
    index = IndexPlace(**fields["index"]) if fields["index"] else None
    return FileNames(WrittenFile(**{**fields, "index": index}), record["rank"], tuple(record["names"]))


def _test(agreement: Agreement, folder: HuggingFaceReader, staging: Path) -> None:
    def work() -> Record:
        written = NativeReader.open(staging)

        def read(name: str, region: Region) -> torch.Tensor:
            info = written.info(ShardKey(name, MODEL))
            assert info is not None, "the manifest names it"
            memory = torch.empty(region.numel, dtype=info.dtype)
            read_regions(written, [RegionRead(name, region, memory)])
            return memory

        names = tuple(folder.names)
        check_written(folder, names[agreement.rank :: agreement.world_size], read)
        return {}

    decide(agreement, f"testing {staging}", work, lambda _: {})
