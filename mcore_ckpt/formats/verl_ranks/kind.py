"""Recognizes the per-rank folders that verl up to 0.4 wrote, by their names and by the records of a model file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.pt_archive import ArchiveError, PtArchive
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.formats.checkpoint_kind import CheckpointKind
from mcore_ckpt.io.files import names_in, opened, read_exact

if TYPE_CHECKING:
    from mcore_ckpt.formats.contract import CheckpointReader
    from mcore_ckpt.formats.foreign_state import ForeignState, LiveTraining
    from mcore_ckpt.models.config_fields import HfConfig

RANK_DIR = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL_FILES = ("model.pt", "model_states.pt")


class VerlRanks(CheckpointKind):
    """A role's folder with a model file for each rank, as verl up to 0.4 saved it."""

    name = "verl_ranks"
    what = "a checkpoint of verl up to 0.4 with a file for each rank"
    needs_writers = True

    def recognizes(self, folder: Path) -> bool:
        first = next(iter(rank_dirs(folder)), None)
        file = None if first is None else model_file(folder / "model" / first)
        return file is not None and not _has_our_index(file)

    def open(self, folder: Path, config: HfConfig | None = None) -> CheckpointReader:
        from mcore_ckpt.formats.verl_ranks.reader import open_verl_ranks
        from mcore_ckpt.models.mapping import hf_tensors
        from mcore_ckpt.models.reconcile import with_mtp_of
        from mcore_ckpt.models.registry import model_from_config

        if config is None:
            raise CheckpointNotFoundError(
                f"{folder}: has no config.json, but only this file states the model's shapes: copy the model's "
                "config.json there"
            )
        # The names in the checkpoint are not known yet, so assume that the model has multi-token prediction. For a
        # model without it, the additional expected tensors do no harm here.
        model = with_mtp_of(model_from_config(config), ["mtp.layers.0."])
        slabs = [slab for tensor in hf_tensors(model) for slab in tensor.slabs if slab.mcore]
        return open_verl_ranks(
            folder,
            {slab.mcore: slab.region.global_shape for slab in slabs},
            {slab.mcore: tuple(section.rows for section in slab.sections) for slab in slabs if slab.sections},
        )

    def open_state(self, folder: Path, training: LiveTraining) -> ForeignState:
        from mcore_ckpt.formats.verl_ranks.state import VerlRanksState

        return VerlRanksState(folder, training)


def rank_dirs(path: Path) -> dict[str, tuple[int, ...]]:
    """Finds the folders `model/mp_rank_*` that hold a model file. Maps the folders' names to the numbers in the names.

    `mp_rank_00_001` is mapped to (0, 1).
    """
    found = {}
    for name in sorted(names_in(path / "model")):
        match = RANK_DIR.fullmatch(name)
        if match and model_file(path / "model" / name) is not None:
            found[name] = tuple(int(number) for number in match.groups() if number is not None)
    return found


def bare_name(name: str) -> str:
    """Removes the prefix that older versions of DDP and Float16Module added to the names of a wrapped module."""
    return re.sub(r"^(?:module\.)+", "", name)


def model_file(folder: Path) -> Path | None:
    """Returns the model file in one rank's folder (`model.pt` or `model_states.pt`), or None if there is none."""
    return next((folder / name for name in _MODEL_FILES if os.path.isfile(folder / name)), None)


def _has_our_index(file: Path) -> bool:
    """Returns True if this package wrote the file.

    In this case the folder is a native checkpoint that lacks its manifest.
    """
    try:
        with opened(file) as (descriptor, size):
            archive = PtArchive(lambda at, nbytes: read_exact(descriptor, nbytes, at, file), size)
            return file_names.INDEX_RECORD in archive.names
    except (OSError, CheckpointCorruptError, ArchiveError):
        return False
