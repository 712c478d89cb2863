"""Checkpoints for ROLL. Set `checkpoint_config.type`, and use the worker classes and, preferably, the pipelines below.

    checkpoint_config:
      type: mcore_ckpt
      output_dir: /shared/models/${exp_name}
    actor_train:
      worker_cls: mcore_ckpt.integrations.roll.RLVRActorWorker

The driver and each worker import this module, which registers the type. See docs/integrations.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

try:
    from roll.utils.upload_utils import uploader_registry
except ImportError as error:
    raise ImportError(
        "mcore_ckpt.integrations.roll needs ROLL: install it from https://github.com/alibaba/ROLL"
    ) from error

from mcore_ckpt.integrations.roll.pipeline import TYPE, CheckpointPipeline, CheckpointUploader
from mcore_ckpt.integrations.roll.strategy import CheckpointStrategy, CheckpointWorker, ResumingWorker

__all__ = [
    "TYPE",
    "CheckpointPipeline",
    "CheckpointStrategy",
    "CheckpointUploader",
    "CheckpointWorker",
    "ResumingWorker",
]

uploader_registry[TYPE] = CheckpointUploader

# The classes of this module by name. Each class has two bases: a class of ours, then a class of ROLL. A class is made
# when it is first used, because making it imports a part of ROLL that the other classes do not need.
#
# The names of ROLL's classes are as in ROLL's commit 8eb27cc of 2026-08 (tests/integrations/facts/roll.json). The tests
# run only RLVRActorWorker, CriticWorker, SFTWorker and RLVRPipeline, on a stand-in for ROLL.
_CLASSES = {
    "ActorWorker": (CheckpointWorker, "roll.pipeline.base_worker", "ActorWorker"),
    "CriticWorker": (CheckpointWorker, "roll.pipeline.base_worker", "CriticWorker"),
    "RLVRActorWorker": (CheckpointWorker, "roll.pipeline.rlvr.actor_worker", "ActorWorker"),
    "RLVRActorPGWorker": (CheckpointWorker, "roll.pipeline.rlvr.actor_pg_worker", "ActorPGWorker"),
    "AgenticActorWorker": (CheckpointWorker, "roll.pipeline.agentic.agentic_actor_worker", "ActorWorker"),
    "AgenticActorPGWorker": (CheckpointWorker, "roll.pipeline.agentic.agentic_actor_pg_worker", "ActorWorker"),
    "DPOActorWorker": (CheckpointWorker, "roll.pipeline.dpo.actor_worker", "ActorWorker"),
    "SFTWorker": (ResumingWorker, "roll.pipeline.sft.sft_worker", "SFTWorker"),
    "StudentWorker": (CheckpointWorker, "roll.pipeline.distill.distill_worker", "StudentWorker"),
    "RLVRPipeline": (CheckpointPipeline, "roll.pipeline.rlvr.rlvr_pipeline", "RLVRPipeline"),
    "RLVRVLMPipeline": (CheckpointPipeline, "roll.pipeline.rlvr.rlvr_vlm_pipeline", "RLVRVLMPipeline"),
    "AgenticPipeline": (CheckpointPipeline, "roll.pipeline.agentic.agentic_pipeline", "AgenticPipeline"),
    "SFTPipeline": (CheckpointPipeline, "roll.pipeline.sft.sft_pipeline", "SFTPipeline"),
    "DPOPipeline": (CheckpointPipeline, "roll.pipeline.dpo.dpo_pipeline", "DPOPipeline"),
    "DistillPipeline": (CheckpointPipeline, "roll.pipeline.distill.distill_pipeline", "DistillPipeline"),
    "DistillVLMPipeline": (CheckpointPipeline, "roll.pipeline.distill.distill_vlm_pipeline", "DistillVLMPipeline"),
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    first, module, base = _CLASSES[name]
    made = type(name, (first, getattr(import_module(module), base)), {"__module__": __name__, "__qualname__": name})
    globals()[name] = made  # ray sends a class to another process by module and name
    return made
