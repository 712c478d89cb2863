"""Finds the step folders of this package and of other programs, and the step in a folder's name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mcore_ckpt.formats.torch_dist.kind import torch_dist_folders
from mcore_ckpt.formats.verl_ranks.kind import RANK_DIR
from mcore_ckpt.io.files import names_in

_STEP_DIR = re.compile(r"(?:global_steps?_|iter_|checkpoint-)(\d{1,18})")
# The folder to which megatron writes a converted model, which has no step.
_RELEASE = "release"
_LEGACY_FILE = "model_optim_rng.pt"


def is_legacy(path: Path) -> bool:
    """Returns True if a folder has the files of Megatron's legacy format. This package cannot read that format."""
    return any(
        RANK_DIR.fullmatch(name) and os.path.exists(path / name / _LEGACY_FILE) for name in sorted(names_in(path))
    )


def step_folders(path: Path) -> list[Path]:
    """Returns the step folders in a folder, sorted by step, whichever program named them.

    Megatron's `release` folder comes first, because a training begins with it.
    """
    names = sorted(names_in(path), key=lambda name: (number_of(name) or 0, name))
    release = path / _RELEASE
    has_release = _RELEASE in names and (bool(torch_dist_folders(release)) or is_legacy(release))
    numbered = [path / name for name in names if number_of(name) is not None and not os.path.isfile(path / name)]
    return [release, *numbered] if has_release else numbered


def step_of(path: Path) -> int:
    """Returns the step in the folder's name, or else in the name of the nearest parent that has a step; 0 if none has.

    Example:
        >>> step_of(Path("global_step_12/actor")), step_of(Path("iter_0000012"))
        (12, 12)
    """
    return next((step for folder in (path, *path.parents) if (step := number_of(folder.name)) is not None), 0)


def number_of(name: str) -> int | None:
    """Returns the step in the name of a step's folder, of this package or another program; None for other names."""
    match = _STEP_DIR.fullmatch(name)
    return int(match.group(1)) if match else None
