"""Reads the versions of the packages that write a checkpoint."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from mcore_ckpt.version import __version__


def package_versions() -> dict[str, str]:
    """Returns the versions of Python, torch, this package and megatron-core, for the manifest."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "mcore_ckpt": __version__}
    try:
        return {**versions, "megatron_core": metadata.version("megatron-core")}
    except metadata.PackageNotFoundError:
        return {**versions, "megatron_core": "unknown"}
