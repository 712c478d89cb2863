"""Finds the folder that a save writes, and tells whether it belongs to a step."""

from __future__ import annotations

import os
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.urls import local_path


def find_destination(root: Path, role: str, step: int, path: str | Path | None) -> tuple[Path, bool]:
    """Returns the checkpoint's folder, and whether it is part of a step below the root.

    Args:
        root: the folder of all steps.
        role, step: what is saved.
        path: the folder that the caller asks for; None for the usual one.

    Raises InvalidArgumentError if the folder cannot be used.
    """
    role_dir = (
        file_names.step_dir(root, step) / role if path is None else Path(os.path.abspath(local_path(path, "path")))
    )
    if role_dir.resolve() in (root.resolve(), *root.resolve().parents):
        raise InvalidArgumentError(
            f"path {role_dir} is the folder of all steps, or above it: pass the checkpoint's own folder"
        )
    of = file_names.step_root(role_dir, role, step)
    if of is not None and of.resolve() == root.resolve():
        return role_dir, True
    if file_names.parse_step(role_dir.parent.name) is not None and role_dir.parent.parent.resolve() == root.resolve():
        raise InvalidArgumentError(
            f"path {role_dir} is in a step's folder, so its name would be taken for a role: use {role}"
        )
    return role_dir, False
