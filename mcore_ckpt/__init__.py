"""Checkpoints for training with Megatron-core. See README.md and docs/format.md."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_ckpt.background import SaveHandle
    from mcore_ckpt.config import CheckpointConfig
    from mcore_ckpt.loading import LoadReport, LoadResult
    from mcore_ckpt.manager import CheckpointManager
    from mcore_ckpt.saving import SaveReport
    from mcore_ckpt.storage.retention import pin, unpin

__all__ = [
    "CheckpointConfig",
    "CheckpointManager",
    "LoadReport",
    "LoadResult",
    "SaveHandle",
    "SaveReport",
    "pin",
    "unpin",
]

# Imported when they are asked for (PEP 562): they need torch, which takes seconds, and Python imports this file before
# any other of the package, so that `mcore-ckpt --help` would wait for it.
_MODULES = {
    "CheckpointConfig": "config",
    "CheckpointManager": "manager",
    "LoadReport": "loading",
    "LoadResult": "loading",
    "SaveHandle": "background",
    "SaveReport": "saving",
    "pin": "storage.retention",
    "unpin": "storage.retention",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # the next time it is found without asking here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
