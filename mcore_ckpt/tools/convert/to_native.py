"""Converts a HuggingFace folder into a checkpoint of this package: the model at step 0, under any layout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import StageRecord, WrittenFile
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader
from mcore_ckpt.formats.huggingface.side_files import copy_side_files, written_side_files
from mcore_ckpt.io.files import new_folder
from mcore_ckpt.models.stated_facts import facts_of_model
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.steps.new_folder import mode_as
from mcore_ckpt.tools.convert.destinations import RolesOfStep
from mcore_ckpt.tools.convert.from_huggingface import ConversionReport, left_out_of, open_folder, whole_region
from mcore_ckpt.tools.convert.reshard.attention_heads import check_heads
from mcore_ckpt.tools.convert.reshard.planner import Planner
from mcore_ckpt.tools.convert.reshard.role_writer import Identity, RoleWriter
from mcore_ckpt.tools.convert.reshard.saved_tensors import SavedTensor
from mcore_ckpt.tools.convert.reshard.target import SavedLayout, WantedLayout, resolve
from mcore_ckpt.tools.convert.walk import check_together, write_together
from mcore_ckpt.tools.examine.progress import Progress, no_progress

STEP = 0
_CONTENTS = ("model",)


def convert_to_native(
    source: str | Path,
    root: Path,
    wanted: WantedLayout,
    agreement: Agreement,
    role: str = "actor",
    test: bool = False,
    progress: Progress = no_progress,
    ignore: Sequence[str] = (),
    dequantized: torch.dtype | None = None,
    force: bool = False,
) -> ConversionReport:
    """Writes `root/global_steps_0/<role>`, which appears once it is complete. Every process must call this function.

    The processes divide the files among themselves. Each process needs the memory that `write_planned_files` needs, for
    a model of any size.

    Args:
        source: the folder of the HuggingFace model, which every process must see, or the name of a model on the hub.
        root: the folder of all steps. During the conversion, no trainer can save below `root`.
        wanted: the layout of the new checkpoint.
        agreement: connects this process with the other processes that share the work.
        role: the name of the role's folder.
        test: True to read everything back and compare it before the checkpoint appears.
        ignore: regular expressions of HuggingFace tensors to leave out.
        dequantized: the dtype of weights that are quantized in the folder; None takes the dtype in `config.json`.
        force: True to replace a checkpoint of this role at step 0. A pinned step stays.

    Raises:
        InvalidArgumentError: the sizes contradict each other, or `root` has this role at step 0, and this checkpoint
            may not be replaced.
        LockedError: a trainer saves below `root`.
        CheckpointError: the HuggingFace folder is damaged or does not fit the layout, or the checkpoint cannot be
            written. All processes raise it, and `root` is as it was.
    """
    started = time.monotonic()
    destination = RolesOfStep(root.absolute(), STEP, [file_names.check_role(role)], force)
    check_together(agreement, destination)
    reader = open_folder(agreement, source, ignore, dequantized)
    writer = _writer(reader, wanted, destination)
    nbytes = write_together(agreement, [(role, writer)], destination, mode_as(reader.contents.folder), progress, test)
    path, seconds = destination.path, time.monotonic() - started
    return ConversionReport(reader.place, path, reader.model.describe(), nbytes, seconds, left_out_of(reader, path))


def _tensor(reader: HuggingFaceReader, name: str) -> SavedTensor:
    """Describes a tensor of the folder as a tensor that a single rank has saved."""
    seen, file = {0: whole_region(reader, name)}, reader.parts_of(name)[0].file
    return SavedTensor(name, MODEL, (), main=False, aliased=False, seen=seen, pp=0, file=file)


def _writer(reader: HuggingFaceReader, wanted: WantedLayout, destination: RolesOfStep) -> RoleWriter:
    # The tensors of a HuggingFace model are not cut, so the saved layout has a single rank.
    saved = SavedLayout(Topology(), (StageRecord(0, 0, reader.decoder_layers, reader.mtp_layers),))
    try:
        tensors = [_tensor(reader, name) for name in reader.names]
        target = resolve(wanted, saved, any(tensor.expert for tensor in tensors))
        check_heads({}, reader.contents.config, tensors, saved.topology, target.topology)
        planned = Planner(reader, saved, _CONTENTS, tensors, target, wanted).files()
    except CheckpointError as error:
        raise type(error)(f"{reader.place}: {error}") from error
    (role,) = destination.roles
    identity = Identity(role, _CONTENTS, {}, model=facts_of_model(reader.model) or None)
    side_files = partial(_copy_side_files, reader.contents.folder)
    return RoleWriter(reader, reader.read_numbers, planned, target, identity, destination, side_files)


def _copy_side_files(source: Path, role_dir: Path) -> list[tuple[int, WrittenFile]]:
    folder = role_dir / file_names.HUGGINGFACE_DIR
    new_folder(folder)
    return [(0, file) for file in written_side_files(folder, copy_side_files(source, folder))]
