"""Reads the versions of the packages that write a checkpoint."""

from __future__ import annotations

import platform
from importlib import metadata

import torch


def package_versions() -> dict[str, str]:
    """Returns the versions of Python, torch, this package and megatron-core, for the manifest."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name, package in (("mcore_ckpt", "mcore_ckpt"), ("megatron_core", "megatron-core")):
        try:
            versions[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
