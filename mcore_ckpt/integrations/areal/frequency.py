"""Translates AReaL's frequencies (1.0.4, `_Timer` and EpochStepTimeFreqCtl) into the frequencies of our schedules."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mcore_ckpt.ranks import Agreement, agree
from mcore_ckpt.schedule import Agree, Frequency

if TYPE_CHECKING:
    from areal.api import FinetuneSpec
    from areal.api.cli_args import EvaluatorConfig, RecoverConfig, SaverConfig


def frequency_of(config: SaverConfig | RecoverConfig | EvaluatorConfig) -> Frequency:
    """Returns the frequency in one of AReaL's configs. Raises ValueError if a number is not above 0."""
    return Frequency(config.freq_epochs, config.freq_steps, config.freq_secs)


def ends_epoch(ft_spec: FinetuneSpec, epoch_step: int) -> int:
    """Returns how many epochs end with this step: 0 or 1."""
    return int(epoch_step == ft_spec.steps_per_epoch - 1)


def agree_with(agreement: Agreement) -> Agree:
    """Returns the function with which the processes that run the trainer agree whether something is due.

    With AReaL's single controller there is only one such process. Otherwise all ranks run the trainer.
    """
    return partial(agree, agreement)
