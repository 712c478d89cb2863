"""Recognizes torch_dist checkpoints by the small `metadata.json` that `dist_checkpointing.save` writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError
from mcore_ckpt.formats.checkpoint_kind import CheckpointKind
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import names_in, read_small

if TYPE_CHECKING:
    from mcore_ckpt.checkpoint.model_facts import Facts
    from mcore_ckpt.formats.contract import CheckpointReader
    from mcore_ckpt.formats.foreign_state import ForeignState, LiveTraining
    from mcore_ckpt.models.config_fields import HfConfig

TORCH_DIST_CONFIG = "metadata.json"

# Older versions of verl saved everything into one folder. Newer versions (layout 2) write these three folders.
_VERL_TREES = ("model", "optimizer", "extra")


class TorchDist(CheckpointKind):
    """A checkpoint that megatron's trainer or verl writes with `dist_checkpointing.save`."""

    name = "torch_dist"
    what = "a torch_dist checkpoint of Megatron"
    may_permute_adapters = True

    def recognizes(self, folder: Path) -> bool:
        return bool(torch_dist_folders(folder))

    def open(self, folder: Path, config: HfConfig | None = None) -> CheckpointReader:
        from mcore_ckpt.formats.torch_dist.reader import open_torch_dist

        return open_torch_dist(folder)

    def open_state(self, folder: Path, training: LiveTraining) -> ForeignState:
        from mcore_ckpt.formats.torch_dist.state import TorchDistState

        return TorchDistState(folder, training)

    def facts(self, reader: CheckpointReader) -> Facts:
        from mcore_ckpt.formats.torch_dist.arguments import arguments_in, facts_of_arguments
        from mcore_ckpt.formats.torch_dist.files import TorchDistFiles

        path = Path(reader.place)
        try:
            return facts_of_arguments(arguments_in(TorchDistFiles(path, torch_dist_folders(path)).common))
        except CheckpointError:
            return {}  # the weights can be read without facts


def torch_dist_folders(path: Path) -> list[Path]:
    """Returns the folders that `dist_checkpointing.save` wrote: `path` itself, or folders that verl puts below it."""
    candidates = (path, path / "dist_ckpt")
    for candidate in candidates:
        if _has_config(candidate):
            return [candidate]
    return [tree for tree in (path / name / "dist_ckpt" for name in _VERL_TREES) if _has_config(tree)]


def has_torch_dist(path: Path) -> bool:
    """Returns True if a folder, or one of the folders in it, is a torch_dist checkpoint."""
    folders = [path / name for name in names_in(path)]
    return bool(torch_dist_folders(path)) or any(torch_dist_folders(folder) for folder in folders)


def _has_config(folder: Path) -> bool:
    """Returns True if the folder has the `metadata.json` of a torch_dist checkpoint."""
    path = folder / TORCH_DIST_CONFIG
    try:
        config = fields.parse(read_small(path, limits.HF_JSON_BYTES))
    except PermissionError as error:
        # If the folder itself refuses access, this process cannot know whether the file exists, and assumes that the
        # file does not exist.
        if not os.path.lexists(path):
            return False
        raise CheckpointError(f"{path}: cannot be read, so the kind of this folder is not known: {error}") from error
    except (OSError, CheckpointCorruptError, fields.FieldError):
        return False
    return "sharded_backend" in config
