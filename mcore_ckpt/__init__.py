"""Checkpoints for training with Megatron-core. See README.md and docs/format.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names
from mcore_ckpt.version import __version__ as __version__

if TYPE_CHECKING:
    from mcore_ckpt.config import CheckpointConfig, FastTier
    from mcore_ckpt.events import Event
    from mcore_ckpt.load.huggingface import HfLoadReport, load_hf
    from mcore_ckpt.load.report import LoadReport, LoadResult
    from mcore_ckpt.manager import CheckpointManager
    from mcore_ckpt.save.background import SaveHandle
    from mcore_ckpt.save.save_times import SaveReport
    from mcore_ckpt.sharding.data_position import ShardedPosition
    from mcore_ckpt.sharding.sample_share import SampleShare
    from mcore_ckpt.state.attached_parts import HandOver, SavedPart
    from mcore_ckpt.steps.later_metrics import set_metrics
    from mcore_ckpt.steps.pins import pin, unpin

__all__ = [
    "CheckpointConfig",
    "CheckpointManager",
    "Event",
    "FastTier",
    "HandOver",
    "HfLoadReport",
    "LoadReport",
    "LoadResult",
    "SampleShare",
    "SaveHandle",
    "SaveReport",
    "SavedPart",
    "ShardedPosition",
    "load_hf",
    "pin",
    "set_metrics",
    "unpin",
]

# These names are imported on first use. They need torch, which takes seconds to import, and `mcore-ckpt --help` must
# not wait for this import.
__getattr__ = lazy_names(
    __name__,
    {
        "config": ("CheckpointConfig", "FastTier"),
        "events": ("Event",),
        "load.huggingface": ("HfLoadReport", "load_hf"),
        "load.report": ("LoadReport", "LoadResult"),
        "manager": ("CheckpointManager",),
        "save.background": ("SaveHandle",),
        "save.save_times": ("SaveReport",),
        "sharding.data_position": ("ShardedPosition",),
        "sharding.sample_share": ("SampleShare",),
        "state.attached_parts": ("HandOver", "SavedPart"),
        "steps.later_metrics": ("set_metrics",),
        "steps.pins": ("pin", "unpin"),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
