"""The versions of the packages that a checkpoint is written with."""

from __future__ import annotations

import platform
from importlib import metadata

import torch


def package_versions() -> dict[str, str]:
    """What a checkpoint is written with, for its manifest."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name, package in (("mcore_ckpt", "mcore_ckpt"), ("megatron_core", "megatron-core")):
        try:
            versions[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
