"""Checkpoints for training with Megatron-core. See README.md and docs/format.md."""

from mcore_ckpt.background import SaveHandle
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.loading import LoadReport, LoadResult
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.saving import SaveReport

__all__ = ["CheckpointConfig", "CheckpointManager", "LoadReport", "LoadResult", "SaveHandle", "SaveReport"]
