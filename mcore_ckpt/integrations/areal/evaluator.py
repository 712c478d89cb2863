"""Replaces AReaL's Evaluator (1.0.4). A schedule of this package replaces the Evaluator's timer, as in `saver.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from areal.utils import evaluator as areal

from mcore_ckpt.config import TIMEOUT_S
from mcore_ckpt.integrations.areal.frequency import agree_with, ends_epoch, frequency_of
from mcore_ckpt.ranks import rendezvous
from mcore_ckpt.schedule import Schedule

if TYPE_CHECKING:
    from areal.api import FinetuneSpec
    from areal.api.cli_args import EvaluatorConfig


class Evaluator(areal.Evaluator):
    """An Evaluator with AReaL's configuration and methods.

    Every rank makes an Evaluator. The constructor waits for the other ranks.
    """

    def __init__(self, config: EvaluatorConfig, ft_spec: FinetuneSpec, timeout_s: float = TIMEOUT_S) -> None:
        self.config = config
        self.ft_sepc = ft_spec  # sic: AReaL's name
        self._schedule = Schedule(frequency_of(config))
        self._agree = agree_with(rendezvous("areal/evaluator", timeout_s))
        # With `eval_before_train` the first call of `evaluate` evaluates, except in a run that was resumed.
        self._is_first = config.eval_before_train

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters of the schedule as JSON values."""
        return self._schedule.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues counting from saved counters. The current config sets the frequency.

        Raises ValueError if the counters are invalid.
        """
        self._schedule.load_state_dict(state_dict)
        self._is_first = False

    def evaluate(self, evaluate_fn: Callable[[], Any], epoch: int, step: int, global_step: int) -> None:
        """Calls `evaluate_fn` if an evaluation is due."""
        is_due = self._schedule.due(ends_epoch(self.ft_sepc, step), 1, self._agree)
        if is_due or self._is_first:
            self._is_first = False
            evaluate_fn()
