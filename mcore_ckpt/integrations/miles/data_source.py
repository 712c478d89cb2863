"""miles' data source (2026-08), which here saves into the steps: `--data-source-path`.

    --data-source-path mcore_ckpt.integrations.miles.data_source.DataSource

See docs/integrations.md.
"""

from __future__ import annotations

from typing import ClassVar

try:
    from miles.rollout.data_source import RolloutDataSourceWithBuffer
except ImportError as error:
    raise ImportError(f"mcore_ckpt.integrations.miles.data_source needs miles: {error}") from error

from mcore_ckpt.integrations.slime.rollout_role import RolloutInStep

__all__ = ["DataSource", "MilesRolloutInStep"]


class MilesRolloutInStep(RolloutInStep):
    """Makes a data source of miles save into the steps of the actor. Put it first among the bases."""

    package: ClassVar[str] = "miles"

    def _critic_is_beside(self) -> bool:
        return False  # `--critic-save` is another folder


class DataSource(MilesRolloutInStep, RolloutDataSourceWithBuffer):
    """miles' data source with a buffer. Its position and its buffer are part of each step."""
