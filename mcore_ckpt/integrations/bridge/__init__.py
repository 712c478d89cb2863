"""Checkpoints for Megatron-Bridge (0.6; tested by hand with 0.5.1 and 0.4.2). Two lines switch a start script over:

    import mcore_ckpt.integrations.bridge

    config.checkpoint.custom_manager_class = "mcore_ckpt.integrations.bridge.McoreCheckpointManager"

The import registers this module, because Bridge takes only classes whose module is registered. If you do not want to
change the script, start it with `python -m mcore_ckpt.integrations.bridge SCRIPT ...`, which imports this module first.

See docs/integrations.md.
"""

from __future__ import annotations

from mcore_ckpt.integrations.bridge.manager import McoreCheckpointManager
from mcore_ckpt.integrations.bridge.options import configure

try:
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
except ImportError as error:
    raise ImportError("mcore_ckpt.integrations.bridge needs Megatron-Bridge: pip install megatron-bridge") from error

__all__ = ["McoreCheckpointManager", "configure"]

register_allowed_target_prefix(f"{__name__}.")
