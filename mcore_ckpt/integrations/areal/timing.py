"""AReaL's frequencies (1.0.4, `_Timer` and EpochStepTimeFreqCtl) as schedules."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mcore_ckpt.ranks import Agreement, agree
from mcore_ckpt.schedule import Agree, Frequency

if TYPE_CHECKING:
    from areal.api import FinetuneSpec
    from areal.api.cli_args import EvaluatorConfig, RecoverConfig, SaverConfig


def frequency_of(config: SaverConfig | RecoverConfig | EvaluatorConfig) -> Frequency:
    """Of any of AReaL's configs that has one. Raises ValueError."""
    return Frequency(config.freq_epochs, config.freq_steps, config.freq_secs)


def ends_epoch(ft_spec: FinetuneSpec, epoch_step: int) -> int:
    """How many epochs end with this step."""
    return int(epoch_step == ft_spec.steps_per_epoch - 1)


def agree_with(seat: Agreement) -> Agree:
    """The ranks that run the trainer: all of them, or, in AReaL's single controller, one."""
    return partial(agree, seat)
