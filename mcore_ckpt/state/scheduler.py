"""Reads and writes LR schedulers: OptimizerParamScheduler, or any object with state_dict and load_state_dict."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.state.group_fields import Option
from mcore_ckpt.state.param_groups import Schedules
from mcore_ckpt.state.plain import to_plain

logger = logging.getLogger(__name__)


def read_scheduler(scheduler: Any) -> dict[str, Any] | None:
    """Returns the scheduler's state as plain values, or None if there is no scheduler.

    Raises UnsupportedError if a field of the state has no plain value.
    """
    return None if scheduler is None else to_plain(scheduler.state_dict(), "lr_scheduler.state_dict()")


def check_scheduler(scheduler: Any, state: dict[str, Any] | None) -> None:
    """Raises CheckpointMismatchError if a saved state does not fit the scheduler. Changes nothing."""
    if scheduler is not None and state is None:
        raise CheckpointMismatchError(
            "wanted the state of an LR scheduler, found none in the checkpoint: create the manager "
            "without lr_scheduler, or load a checkpoint that has this state"
        )
    if scheduler is None and state is not None:
        logger.warning(
            "the checkpoint has the state of an LR scheduler, but the manager has no lr_scheduler for it, so it is not "
            "loaded: pass one to CheckpointManager"
        )
    if scheduler is None or state is None or not _is_megatrons(scheduler):
        return
    # OptimizerParamScheduler.load_state_dict (0.16.1) checks each field just before it assigns the field. The state is
    # therefore loaded into a copy first, so that a failure changes nothing.
    trial = copy.copy(scheduler)
    trial.optimizer = SimpleNamespace(param_groups=[])
    try:
        trial.load_state_dict(copy.deepcopy(state))
    except (AssertionError, KeyError) as error:
        raise CheckpointMismatchError(
            f"the LR scheduler does not accept the saved state: {error}. Use the same schedule, or set "
            "use_checkpoint_opt_param_scheduler or override_opt_param_scheduler"
        ) from None


def write_scheduler(scheduler: Any, state: dict[str, Any] | None) -> None:
    """Sets the scheduler to a saved state. Does nothing if there is no scheduler or no saved state."""
    if scheduler is None or state is None:
        return
    if _is_megatrons(scheduler):
        # OptimizerParamScheduler.load_state_dict (0.16.1) adds the saved num_steps to the present number.
        scheduler.num_steps = 0
    scheduler.load_state_dict(state)


# What a param group without a value of its own takes from megatron's scheduler (`get_lr`, `get_wd`; 0.16 to 0.19).
_OF_GROUPS = ("max_lr", "min_lr", "start_wd", "end_wd")


def schedules_of(scheduler: Any, state: Mapping[str, Any] | None) -> Schedules:
    """Returns whose learning rates and weight decay count after a load of `state`: the run's or the saved ones."""
    if getattr(scheduler, "override_opt_param_scheduler", False):
        option: Option = "run"
    elif _is_megatrons(scheduler) and not getattr(scheduler, "use_checkpoint_opt_param_scheduler", True):
        option = "equal"
    else:
        option = "checkpoint"
    of_run = {name: getattr(scheduler, name) for name in _OF_GROUPS if hasattr(scheduler, name)}
    return Schedules(option, of_run, {name: state[name] for name in _OF_GROUPS if state and name in state})


def set_rates(scheduler: Any, groups: Sequence[dict[str, Any]]) -> None:
    """Sets the rates of some groups as megatron's scheduler does at its present step. Leaves other schedulers alone."""
    if groups and _is_megatrons(scheduler):
        of_these = copy.copy(scheduler)
        of_these.optimizer = SimpleNamespace(param_groups=groups)
        of_these.step(0)


def _is_megatrons(scheduler: Any) -> bool:
    return any(cls.__name__ == "OptimizerParamScheduler" for cls in type(scheduler).__mro__)
