"""A data source for slime (2026-08) that saves into the steps. `--data-source-path` names it:

    --data-source-path mcore_ckpt.integrations.slime.data_source.DataSource

See docs/integrations.md.
"""

from __future__ import annotations

try:
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
except ImportError as error:
    raise ImportError(f"mcore_ckpt.integrations.slime.data_source needs slime: {error}") from error

from mcore_ckpt.integrations.slime.rollout_role import RolloutInStep

__all__ = ["DataSource"]


class DataSource(RolloutInStep, RolloutDataSourceWithBuffer):
    """slime's data source with a buffer. Its position and its buffer are part of each step."""
