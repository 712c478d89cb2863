"""Decides what a data loader's state means for a training with another data-parallel size than the save had."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mcore_ckpt import ShardedPosition
from mcore_ckpt.errors import CheckpointMismatchError, InvalidArgumentError
from mcore_ckpt.integrations import energon

logger = logging.getLogger(__name__)

# The values of `configure(other_data_size=...)`.
_REFUSE, _AS_SAVED, _BEGIN_ANEW = "refuse", "as_saved", "begin_anew"


def check_rule(rule: str) -> None:
    """Raises InvalidArgumentError for a value that `configure(other_data_size=...)` does not accept."""
    rules = (_REFUSE, _AS_SAVED, _BEGIN_ANEW)
    if rule not in rules:
        raise InvalidArgumentError(f"other_data_size is {rule!r}: use one of {', '.join(map(repr, rules))}")


@dataclass(frozen=True, eq=False)
class LoadedData:
    """The data loader's state of a checkpoint, and the data-parallel sizes of the save and of the load.

    `saved` is None if the checkpoint does not say the data-parallel size of the save. `rule` is the value of
    `other_data_size` in `configure`.
    """

    state: Any = None
    saved: int | None = None
    now: int = 1
    rule: str = _REFUSE

    @staticmethod
    def of(loop_state: Mapping[str, Any], now: int, rule: str) -> LoadedData:
        """Finds the data loader's state in the state that `save_checkpoint` hands to LoopCheckpoints."""
        return LoadedData(loop_state.get("dataloader_state_dict"), loop_state.get("layout", {}).get("dp"), now, rule)

    def check(self) -> None:
        """Raises CheckpointMismatchError if the state does not fit this data-parallel size, and the rule refuses it."""
        if self.rule == _REFUSE or (self.rule == _AS_SAVED and self._is_energon):
            self._check_size()

    def kept(self) -> LoadedData:
        """Returns the state to keep after the load.

        If the data loader has to begin anew, logs a warning and returns a LoadedData without a state.
        """
        if self.rule == _BEGIN_ANEW:
            try:
                self._check_size()
            except CheckpointMismatchError as error:
                if not dist.is_initialized() or dist.get_rank() == 0:
                    logger.warning("%s. The data loader begins anew", error)
                return LoadedData()
        return self

    def for_rank(self) -> Any:
        """See `loaded_dataloader_state`."""
        return energon.state_of(self.state) if self._is_energon else self.state

    @property
    def _is_energon(self) -> bool:
        return isinstance(self.state, ShardedPosition) and self.state.kind == "energon"

    def _check_size(self) -> None:
        if self.state is None or self.saved in (None, self.now):
            return
        if not isinstance(self.state, ShardedPosition):
            raise CheckpointMismatchError(
                f"the checkpoint has the data loader's state of {self.saved} data-parallel ranks, and this training "
                f"has {self.now}, which would skip some samples and repeat others: resume with {self.saved}, or call "
                "configure(other_data_size='begin_anew') to begin the data anew, or 'as_saved' to get the state as it "
                "is. Other sizes work if save_state returns Energon's state or an mcore_ckpt.ShardedPosition"
            )
        try:
            self.state.for_rank()
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"{error}. To begin the data anew, call configure(other_data_size='begin_anew')"
            ) from None
