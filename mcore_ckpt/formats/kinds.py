"""Detects torch_dist checkpoints of Megatron, and folders with per-rank files of verl.

It looks only at file names, a small JSON file and the directory of a zip file. It never opens a pickle.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.pt_archive import ArchiveError, PtArchive
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import open_regular, read_exact, read_small

ForeignKind = Literal["verl_ranks", "torch_dist"]

TORCH_DIST_CONFIG = "metadata.json"

# Older versions of verl saved everything into one folder. Newer ones (its layout 2) have a folder for each of these.
_VERL_TREES = ("model", "optimizer", "extra")
_MODEL_FILES = ("model.pt", "model_states.pt")
FSDP_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_RANK_DIR = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LEGACY_FILE = "model_optim_rng.pt"
_STEP_DIR = re.compile(r"(?:global_steps?_|iter_|checkpoint-)(\d{1,18})")
# Megatron's folder of a converted model, which has no step.
_RELEASE = "release"


def kind_of(path: Path) -> ForeignKind | None:
    """Returns the kind of a folder that another program wrote; None if this package or an unknown program wrote it.

    Raises CheckpointError: the file that says the kind is there, and may not be read.

    Example:
        >>> kind_of(Path("/nowhere")) is None
        True
    """
    if os.path.exists(path / file_names.MANIFEST_FILE):
        return None
    if torch_dist_folders(path):
        return "torch_dist"
    found = [model_file(path / "model" / name) for name in rank_dirs(path)]
    return "verl_ranks" if found and not any(file and _has_our_index(file) for file in found[:1]) else None


def torch_dist_folders(path: Path) -> list[Path]:
    """Returns the folders that `dist_checkpointing.save` wrote: `path` itself, or the ones that verl puts below it."""
    candidates = (path, path / "dist_ckpt")
    for candidate in candidates:
        if _has_config(candidate):
            return [candidate]
    return [tree for tree in (path / name / "dist_ckpt" for name in _VERL_TREES) if _has_config(tree)]


def is_hf_folder(path: Path) -> bool:
    """Returns True if a folder has the configuration and weights of a HuggingFace model, or of an adapter for one."""
    names = names_in(path)
    has_weights = any(name.startswith("pytorch_model") or ".safetensors" in name for name in names)
    return has_weights and not names.isdisjoint(("config.json", "adapter_config.json"))


def is_legacy(path: Path) -> bool:
    """Returns True if a folder has the files of Megatron's format before torch_dist, which this package cannot read."""
    return any(
        _RANK_DIR.fullmatch(name) and os.path.exists(path / name / _LEGACY_FILE) for name in sorted(names_in(path))
    )


def step_folders(path: Path) -> list[Path]:
    """Returns the folders in a folder that are named after steps, by any program, sorted by their steps.

    A release of Megatron is the first: it is what a training begins with.
    """
    names = sorted(names_in(path), key=lambda name: (number_of(name) or 0, name))
    release = path / _RELEASE
    has_release = _RELEASE in names and (bool(torch_dist_folders(release)) or is_legacy(release))
    numbered = [path / name for name in names if number_of(name) is not None and not os.path.isfile(path / name)]
    return [release, *numbered] if has_release else numbered


def has_torch_dist(path: Path) -> bool:
    """Returns True if a folder, or one of the folders in it, is a torch_dist checkpoint."""
    folders = [path / name for name in names_in(path)]
    return bool(torch_dist_folders(path)) or any(torch_dist_folders(folder) for folder in folders)


def names_in(folder: Path) -> set[str]:
    """Returns the names in a folder; none if it cannot be read."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def rank_dirs(path: Path) -> dict[str, tuple[int, ...]]:
    """Finds the folders `model/mp_rank_*` that hold a model file.

    Returns:
        The name of each folder, mapped to the numbers in the name: `mp_rank_00_001` to (0, 1).
    """
    found = {}
    for name in sorted(names_in(path / "model")):
        match = _RANK_DIR.fullmatch(name)
        if match and model_file(path / "model" / name) is not None:
            found[name] = tuple(int(number) for number in match.groups() if number is not None)
    return found


def model_file(folder: Path) -> Path | None:
    """Returns the model file in one rank's folder, `model.pt` or `model_states.pt`; None if neither is there."""
    return next((folder / name for name in _MODEL_FILES if os.path.isfile(folder / name)), None)


def step_of(path: Path) -> int:
    """Returns the step in the name of the folder, or of its nearest parent with a step in its name; 0 if none has one.

    Example:
        >>> step_of(Path("global_step_12/actor")), step_of(Path("iter_0000012"))
        (12, 12)
    """
    return next((step for folder in (path, *path.parents) if (step := number_of(folder.name)) is not None), 0)


def number_of(name: str) -> int | None:
    """Returns the step in the name of a step's folder, of this package or another program; None for other names."""
    match = _STEP_DIR.fullmatch(name)
    return int(match.group(1)) if match else None


def _has_our_index(file: Path) -> bool:
    """Returns True if this package wrote the file.

    A folder of this package without a manifest is not a checkpoint, and must not be taken for one of verl either.
    """
    try:
        descriptor = open_regular(file)
    except OSError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        archive = PtArchive(lambda at, nbytes: read_exact(descriptor, nbytes, at, file), size)
        return file_names.INDEX_RECORD in archive.names
    except (CheckpointCorruptError, ArchiveError):
        return False
    finally:
        os.close(descriptor)


def _has_config(folder: Path) -> bool:
    """Returns True if the folder has the `metadata.json` of a torch_dist checkpoint."""
    try:
        config = fields.parse(read_small(folder / TORCH_DIST_CONFIG, limits.HF_JSON_BYTES))
    except PermissionError as error:
        # Not from the folder itself, which may be anybody's.
        if not os.path.lexists(folder / TORCH_DIST_CONFIG):
            return False
        path = folder / TORCH_DIST_CONFIG
        raise CheckpointError(f"{path}: cannot be read, so the kind of this folder is not known: {error}") from error
    except (OSError, CheckpointCorruptError, fields.FieldError):
        return False
    return "sharded_backend" in config
