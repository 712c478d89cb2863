"""Checkpoints for AReaL (1.0.4): weights and data position of a step are saved together. See docs/integrations.md."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

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

if find_spec("areal") is None:
    raise ImportError(
        "mcore_ckpt.integrations.areal needs the package areal, which is not installed: see AReaL's installation guide"
    )


# The names are imported on first use: the import of the engines takes seconds, and controllers do not need them.
__getattr__ = lazy_names(
    __name__,
    {
        "checkpointer": ("Checkpointer",),
        "engine": (
            "CheckpointedEngine",
            "MegatronDPOEngine",
            "MegatronLMEngine",
            "MegatronPPOActor",
            "MegatronPPOCritic",
            "MegatronRWEngine",
        ),
        "evaluator": ("Evaluator",),
        "recover": ("RecoverHandler",),
        "saver": ("Saver",),
        "trainer": ("CheckpointedTrainer",),
    },
)
