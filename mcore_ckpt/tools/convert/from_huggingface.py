"""Functions that both conversions of a HuggingFace folder share. Neither conversion builds the model.

`to_native.py` writes the format of this package, and `to_torch_dist.py` writes megatron's format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt.formats.huggingface.hub import find_folder_together
from mcore_ckpt.formats.huggingface.reader import FolderContents, HuggingFaceReader, read_contents
from mcore_ckpt.formats.huggingface.side_files import find_side_files, not_read, warn_of_missing_code
from mcore_ckpt.models.accounting import LeftOut, together
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.sharding.cuts import Cut
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.towers import in_tower


@dataclass(frozen=True)
class ConversionReport:
    """Report of a conversion.

    `nbytes` is the size in bytes of all tensors that the processes together have written. `left_out` lists everything
    that the folder has and the checkpoint lacks, by reason.
    """

    source: Path
    path: Path
    model: str
    nbytes: int
    seconds: float
    left_out: tuple[LeftOut, ...] = ()


def left_out_of(reader: HuggingFaceReader, destination: Path) -> tuple[LeftOut, ...]:
    """Returns the tensors, files of weights and assets that a conversion does not take from a folder."""
    beside = find_side_files(reader.place, destination=destination)
    return together(reader.left_out, not_read(reader.place, reader.contents.sizes), beside.left_out)


def open_folder(
    agreement: Agreement, source: str | Path, ignore: Sequence[str] = (), dtype: torch.dtype | None = None
) -> HuggingFaceReader:
    """Opens a HuggingFace folder on all processes and checks that each of them sees the same files.

    A model of the hub is first downloaded into the cache, by one process of each node.

    Args:
        agreement: connects this process with the other processes that share the work.
        source: the folder, or the name of a model on the hub.
        ignore: regular expressions of HuggingFace tensors to leave out.
        dtype: the dtype of weights that are quantized in the folder; None takes the dtype in `config.json`.

    Raises CheckpointError on all processes: the folder is damaged, the hub does not give the model, or the model cannot
    be converted.
    """
    folder = find_folder_together(agreement, source, "all").absolute()
    contents = FolderContents.from_record(
        folder, decide(agreement, f"opening {folder}", dict, lambda _: read_contents(folder).to_record())
    )
    found: list[HuggingFaceReader] = []

    def work() -> Record:
        found.append(HuggingFaceReader(contents, ignore, dtype))
        found[0].check_visible(contents.sizes)
        return {}

    def combine(_: Sequence[Record]) -> Record:
        found[0].check_left_out()
        warn_of_missing_code(folder, found[0].model.config)
        if found[0].model.architecture.rules:
            # Raises an error if megatron cannot build the model, before a trainer tries to load the checkpoint.
            to_mcore_config(found[0].model)
        return {}

    decide(agreement, f"checking {folder}", work, combine)
    return found[0]


def whole_region(reader: HuggingFaceReader, name: str) -> Region:
    """Returns the region of a whole tensor, divided into the pieces in which megatron stores it on a single rank."""
    shape = reader.parts_of(name)[0].region.global_shape
    sections = tuple(section.rows for section in reader.sections_of(name))
    is_gated = reader.model.architecture.table.gated and not in_tower(name)
    # In a gated tower, gate and up are two HuggingFace tensors, so their common mcore tensor has two parts.
    if ".linear_fc1." in name and (is_gated or len(reader.parts_of(name)) > 1):
        # Megatron cuts gate and up separately (`apply_swiglu_sharded_factory`).
        sections = (1, 1)
    return Cut(0, sections).region(shape, 0, 1) if sections else Region.whole(shape)
