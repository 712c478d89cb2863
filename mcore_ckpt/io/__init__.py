"""Moves bytes between memory, disks and remote stores, and computes their checksums.

Public names, for integrations:

- `read_small` and `parse_json` read a file of another program, and refuse a file that is too large or malformed;
- `copy_durably` copies a file or a folder, and waits until the copy is on the disk;
- `replace_file` replaces a file such that even after a crash either the old or the new file is there;
- `make_folder` makes a folder and its parents, `top_mode` returns the mode for them, `sync_dir` makes the names in a
  folder durable;
- `DiskWatch` gives up work if one of its calls to the file system does not return; `in_function_of_trainer` marks calls
  of another program's functions, because these functions may also wait for something other than a disk;
- `for_each` calls a function on several threads, which `DiskWatch` sees, too;
- `Worker` does work on a thread that exists only while there is work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.io.access import top_mode
    from mcore_ckpt.io.disk_watch import DiskWatch, in_function_of_trainer
    from mcore_ckpt.io.file_copies import copy_durably
    from mcore_ckpt.io.files import make_folder, read_small, replace_file, sync_dir
    from mcore_ckpt.io.json_fields import parse_json
    from mcore_ckpt.io.threads import for_each
    from mcore_ckpt.io.worker import Worker

__all__ = [
    "DiskWatch",
    "Worker",
    "copy_durably",
    "for_each",
    "in_function_of_trainer",
    "make_folder",
    "parse_json",
    "read_small",
    "replace_file",
    "sync_dir",
    "top_mode",
]

_find = lazy_names(
    __name__,
    {
        "access": ("top_mode",),
        "disk_watch": ("DiskWatch", "in_function_of_trainer"),
        "file_copies": ("copy_durably",),
        "files": ("make_folder", "read_small", "replace_file", "sync_dir"),
        "json_fields": ("parse_json",),
        "threads": ("for_each",),
        "worker": ("Worker",),
    },
)


def __getattr__(name: str) -> Any:
    """Imports a public name, or the C++ extension. If the extension is missing, the error says how to build it."""
    if name != "_native":
        return _find(name)
    try:
        return import_module(f"{__name__}._native")
    except ModuleNotFoundError as error:
        raise ImportError(
            "mcore_ckpt's C++ extension (mcore_ckpt.io._native) is not built for this Python: run `pip install .` or, "
            "in a checkout, `bash scripts/install.sh`; both need a C++ compiler and Python's headers"
        ) from error
