"""Checkpoints for NeMo-RL (2026-08) with its Megatron backend. Our start script runs a start script of NeMo-RL:

    uv run python -m mcore_ckpt.integrations.nemo_rl examples/run_grpo.py --config ...

In your own script, you can instead call `register()` and `keep_driver_files()`, and then pass
`worker_extension_cls_fqn="mcore_ckpt.integrations.nemo_rl.PolicyWorker"` to `Policy`. See docs/integrations.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.integrations.nemo_rl.driver import register
from mcore_ckpt.integrations.nemo_rl.driver_files import keep_driver_files
from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.integrations.nemo_rl.worker import CheckpointedWorkerImpl, PolicyWorker

__all__ = ["CheckpointedWorkerImpl", "PolicyWorker", "keep_driver_files", "register"]

# These names are imported on first use, because the driver must not import the workers, which need Megatron-Bridge.
__getattr__ = lazy_names(__name__, {"worker": ("CheckpointedWorkerImpl", "PolicyWorker")})
