"""Checkpoints for training with Megatron-core. See README.md and docs/format.md."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_ckpt.config import CheckpointConfig
    from mcore_ckpt.load.huggingface import HfLoadReport, load_hf
    from mcore_ckpt.load.load import LoadReport, LoadResult
    from mcore_ckpt.manager import CheckpointManager
    from mcore_ckpt.save.background import SaveHandle
    from mcore_ckpt.save.save_report import SaveReport
    from mcore_ckpt.steps.pins import pin, unpin

__all__ = [
    "CheckpointConfig",
    "CheckpointManager",
    "HfLoadReport",
    "LoadReport",
    "LoadResult",
    "SaveHandle",
    "SaveReport",
    "load_hf",
    "pin",
    "unpin",
]

# These names are imported when they are first asked for (PEP 562). They need torch, which takes seconds to import, and
# Python runs this file before any other of the package, so `mcore-ckpt --help` would wait for it.
_MODULES = {
    "CheckpointConfig": "config",
    "CheckpointManager": "manager",
    "HfLoadReport": "load.huggingface",
    "LoadReport": "load.load",
    "LoadResult": "load.load",
    "SaveHandle": "save.background",
    "SaveReport": "save.save_report",
    "load_hf": "load.huggingface",
    "pin": "steps.pins",
    "unpin": "steps.pins",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # the next time it is found without asking here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
