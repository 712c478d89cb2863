"""Checkpoints for verl (0.6 to 0.9, and the workers of 0.4 and 0.5). See docs/integrations.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.integrations.verl.manager import MegatronCheckpointManager
from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.integrations.verl.config import McoreCkptConfig
    from mcore_ckpt.integrations.verl.driver_role import DriverRole
    from mcore_ckpt.integrations.verl.engines import LanguageModelEngine, ValueModelEngine

__all__ = ["DriverRole", "LanguageModelEngine", "McoreCkptConfig", "MegatronCheckpointManager", "ValueModelEngine"]

# Import these classes on first use. Unlike the manager, they derive from classes of verl, so they need verl.
__getattr__ = lazy_names(
    __name__,
    {
        "config": ("McoreCkptConfig",),
        "driver_role": ("DriverRole",),
        "engines": ("LanguageModelEngine", "ValueModelEngine"),
    },
)
