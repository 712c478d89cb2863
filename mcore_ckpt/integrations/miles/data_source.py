"""A data source for miles (2026-08) that saves into the steps. `--data-source-path` names it:

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
    """A mixin that makes a data source of miles save into the steps of the actor. The mixin must be the first base."""

    package: ClassVar[str] = "miles"

    def _critic_is_beside(self) -> bool:
        return False  # the critic is saved to another folder, `--critic-save`


class DataSource(MilesRolloutInStep, RolloutDataSourceWithBuffer):
    """miles' data source with a buffer. Its position and its buffer are part of each step."""
