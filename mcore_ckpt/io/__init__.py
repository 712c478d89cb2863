"""Moves bytes between memory, disks and remote stores: files, checksums, host memory, streams larger than memory.

Public names, for integrations: `read_small` and `parse_json` read a file of another program and refuse one that is too
large or malformed; `replace_file`, `make_folder` and `sync_dir` change files so that a crash leaves the old or the new.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.io.files import make_folder, read_small, replace_file, sync_dir
    from mcore_ckpt.io.json_fields import parse_json

__all__ = ["make_folder", "parse_json", "read_small", "replace_file", "sync_dir"]

_find = lazy_names(
    __name__,
    {"files": ("make_folder", "read_small", "replace_file", "sync_dir"), "json_fields": ("parse_json",)},
)


def __getattr__(name: str) -> Any:
    """Imports a public name, or the C++ extension. Says how to build the extension where it is missing."""
    if name != "_native":
        return _find(name)
    try:
        return import_module(f"{__name__}._native")
    except ModuleNotFoundError as error:
        raise ImportError(
            "mcore_ckpt's C++ extension (mcore_ckpt.io._native) is not built for this Python: run `pip install .` or, "
            "in a checkout, `bash scripts/install.sh`; both need a C++ compiler and Python's headers"
        ) from error
