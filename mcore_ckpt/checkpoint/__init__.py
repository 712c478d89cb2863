"""Reads and describes one checkpoint on disk (file names, manifest, index, `.pt` files), and locates damage in it.

Public names, for integrations and commands:

- names on disk: `MANIFEST_FILE`, `TRACKER_FILE`, `PINNED_FILE`, `HUGGINGFACE_DIR`, `step_dir`, `step_dirs`,
  `step_root`, `megatron_dir`, `is_role`, `parse_step`, `parse_tracker`;
- the contents of a role's checkpoint: `Manifest`, its head `ManifestSummary`, `read_manifest`;
- whether a role's checkpoint is intact: `Damage`, `find_damage`;
- reading another program's pickle as plain values, without executing code from it: `Unpickler`, `PickleError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.checkpoint.damage import Damage, find_damage
    from mcore_ckpt.checkpoint.file_names import (
        HUGGINGFACE_DIR,
        MANIFEST_FILE,
        PINNED_FILE,
        TRACKER_FILE,
        is_role,
        megatron_dir,
        parse_step,
        parse_tracker,
        step_dir,
        step_dirs,
        step_root,
    )
    from mcore_ckpt.checkpoint.manifest import Manifest, ManifestSummary
    from mcore_ckpt.checkpoint.reading import read_manifest
    from mcore_ckpt.checkpoint.unpickling import PickleError, Unpickler

__all__ = [
    "HUGGINGFACE_DIR",
    "MANIFEST_FILE",
    "PINNED_FILE",
    "TRACKER_FILE",
    "Damage",
    "Manifest",
    "ManifestSummary",
    "PickleError",
    "Unpickler",
    "find_damage",
    "is_role",
    "megatron_dir",
    "parse_step",
    "parse_tracker",
    "read_manifest",
    "step_dir",
    "step_dirs",
    "step_root",
]

__getattr__ = lazy_names(
    __name__,
    {
        "damage": ("Damage", "find_damage"),
        "file_names": (
            "HUGGINGFACE_DIR",
            "MANIFEST_FILE",
            "PINNED_FILE",
            "TRACKER_FILE",
            "is_role",
            "megatron_dir",
            "parse_step",
            "parse_tracker",
            "step_dir",
            "step_dirs",
            "step_root",
        ),
        "manifest": ("Manifest", "ManifestSummary"),
        "reading": ("read_manifest",),
        "unpickling": ("PickleError", "Unpickler"),
    },
)
