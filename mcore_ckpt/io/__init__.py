"""Moves bytes between memory, disks and remote stores: files, checksums, host memory, streams larger than memory."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Imports the C++ extension when it is first used, and says how to build it if it is missing."""
    if name != "_native":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"{__name__}._native")
    except ModuleNotFoundError as error:
        raise ImportError(
            "mcore_ckpt's C++ extension (mcore_ckpt.io._native) is not built for this Python: run `pip install .` or, "
            "in a checkout, `bash scripts/install.sh`; both need a C++ compiler and Python's headers"
        ) from error
