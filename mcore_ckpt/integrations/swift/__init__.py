"""Checkpoints for the Megatron trainers of ms-swift (4.6).

    python -m mcore_ckpt.integrations.swift sft --model Qwen/Qwen3-8B --output_dir out ...

This command takes the place of `megatron sft`. With `pt` or `rlhf`, the command takes the place of `megatron pt` or
`megatron rlhf`. The options are ms-swift's own, and `--mcore_ckpt`. Your own pipeline can use a trainer class from this
module, or put `CheckpointTrainer` first among the bases of its trainer. See docs/integrations.md.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

if find_spec("swift") is None or find_spec("mcore_bridge") is None:
    raise ImportError("mcore_ckpt.integrations.swift needs ms-swift and mcore-bridge: pip install 'ms-swift[megatron]'")

__all__ = ["TRAINERS"]

# A class is made when it is first used, because making it imports a part of ms-swift that other classes do not need.
TRAINERS = (
    "MegatronTrainer",
    "MegatronEmbeddingTrainer",
    "MegatronRerankerTrainer",
    "MegatronDPOTrainer",
    "MegatronKTOTrainer",
    "MegatronRewardTrainer",
    "MegatronGRPOTrainer",
    "MegatronGKDTrainer",
)
"""The trainers of ms-swift that have a class by the same name in this module."""


def __getattr__(name: str) -> Any:
    if name not in ("CheckpointTrainer", *TRAINERS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Importing the trainer takes seconds, and `__main__` does not need the trainer.
    found: Any = import_module(f"{__name__}.trainer").CheckpointTrainer
    if name in TRAINERS:
        base = getattr(import_module("swift.megatron.trainers"), name)
        found = type(name, (found, base), {"__module__": __name__, "__qualname__": name})
    globals()[name] = found
    return found
