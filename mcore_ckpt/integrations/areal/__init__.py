"""Checkpoints for AReaL (1.0.4): weights and data position of one step belong together. See docs/integrations.md."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_ckpt.integrations.areal.checkpointer import Checkpointer
    from mcore_ckpt.integrations.areal.engine import (
        CheckpointedEngine,
        MegatronDPOEngine,
        MegatronLMEngine,
        MegatronPPOActor,
        MegatronPPOCritic,
        MegatronRWEngine,
    )
    from mcore_ckpt.integrations.areal.evaluator import Evaluator
    from mcore_ckpt.integrations.areal.recover import RecoverHandler
    from mcore_ckpt.integrations.areal.saver import Saver
    from mcore_ckpt.integrations.areal.trainer import CheckpointedTrainer

__all__ = [
    "CheckpointedEngine",
    "CheckpointedTrainer",
    "Checkpointer",
    "Evaluator",
    "MegatronDPOEngine",
    "MegatronLMEngine",
    "MegatronPPOActor",
    "MegatronPPOCritic",
    "MegatronRWEngine",
    "RecoverHandler",
    "Saver",
]

# Each name is imported when it is first used: AReaL's controllers do not need its engines, whose import takes seconds.
_MODULES = {
    "CheckpointedTrainer": "trainer",
    "Checkpointer": "checkpointer",
    "Evaluator": "evaluator",
    "RecoverHandler": "recover",
    "Saver": "saver",
}

if find_spec("areal") is None:
    raise ImportError(
        "mcore_ckpt.integrations.areal needs the package areal, which is not installed: see AReaL's installation guide"
    )


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'engine')}"), name)
    globals()[name] = value
    return value
