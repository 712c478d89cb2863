"""Checkpoints for verl (0.9.1, and the workers of 0.4 and 0.5). See docs/integrations.md."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore_ckpt.integrations.verl.manager import MegatronCheckpointManager

if TYPE_CHECKING:
    from mcore_ckpt.integrations.verl.config import McoreCkptConfig
    from mcore_ckpt.integrations.verl.engines import LanguageModelEngine, ValueModelEngine

__all__ = ["LanguageModelEngine", "McoreCkptConfig", "MegatronCheckpointManager", "ValueModelEngine"]

# They have base classes of verl's: the manager does without the package.
_NEED_VERL = {"McoreCkptConfig": "config", "LanguageModelEngine": "engines", "ValueModelEngine": "engines"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_VERL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_VERL[name]}"), name)
