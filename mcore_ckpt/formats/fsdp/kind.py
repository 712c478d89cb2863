"""Recognizes FSDP shards by the names of their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.formats.checkpoint_kind import CheckpointKind
from mcore_ckpt.io.files import names_in

if TYPE_CHECKING:
    from mcore_ckpt.formats.contract import CheckpointReader
    from mcore_ckpt.models.config_fields import HfConfig

FSDP_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


class Fsdp(CheckpointKind):
    """A folder with a file of DTensors for each rank, as verl saves a model under FSDP."""

    name = "fsdp"
    what = "a folder of FSDP shards"
    backend = "fsdp"
    has_hf_names = True

    def recognizes(self, folder: Path) -> bool:
        return any(map(FSDP_FILE.fullmatch, names_in(folder)))

    def open(self, folder: Path, config: HfConfig | None = None) -> CheckpointReader:
        from mcore_ckpt.formats.fsdp.reader import open_fsdp

        return open_fsdp(folder)
