"""Checkpoints for SkyRL (0.3, and its sources of 2026-08) with `trainer.strategy=megatron`.

    python -m mcore_ckpt.integrations.skyrl trainer.strategy=megatron ...

This command starts a training as `python -m skyrl.train.entrypoints.main_base` does. Your own experiment must give its
trainer to `checkpointed`:

    class MyExp(BasePPOExp):
        def get_trainer(self, *args, **kwargs):
            return checkpointed(super().get_trainer(*args, **kwargs))

See docs/integrations.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.integrations.skyrl.trainer import checkpointed
from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.integrations.skyrl.worker import PolicyWorkerBase

__all__ = ["PolicyWorkerBase", "checkpointed"]

# The driver must not import the workers, which need Megatron-Bridge, before it makes the workers.
__getattr__ = lazy_names(__name__, {"worker": ("PolicyWorkerBase",)})
