"""Reads and writes the state of LR schedulers.

A scheduler is megatron's OptimizerParamScheduler, or any object with state_dict and load_state_dict.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.state.group_fields import Option
from mcore_ckpt.state.param_groups import Schedules
from mcore_ckpt.state.plain import to_plain
from mcore_ckpt.state.typed_values import from_stored, to_stored

logger = logging.getLogger(__name__)


def read_scheduler(scheduler: Any) -> dict[str, Any] | None:
    """Returns the scheduler's state as it is stored, or None if there is no scheduler.

    The state of megatron's scheduler has only numbers and texts, which each version of this package reads.

    Raises UnsupportedError if a field of the state cannot be stored.
    """
    if scheduler is None:
        return None
    store: Callable[[Any, str], Any] = to_plain if _is_megatrons(scheduler) else to_stored
    return store(scheduler.state_dict(), "lr_scheduler.state_dict()")


def saved_scheduler(common: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the state of the LR scheduler in `common.pt`. Raises CheckpointCorruptError if it is malformed."""
    try:
        return from_stored(common["lr_scheduler"])
    except ValueError as error:
        raise CheckpointCorruptError(f"{file_names.COMMON_FILE}: lr_scheduler: {error}") from None


def check_scheduler(scheduler: Any, state: dict[str, Any] | None) -> None:
    """Raises CheckpointMismatchError if a saved state does not fit the scheduler. Changes nothing."""
    if scheduler is not None and state is None:
        raise CheckpointMismatchError(
            "wanted the state of an LR scheduler, found none in the checkpoint: create the manager "
            "without lr_scheduler, or load a checkpoint that has this state"
        )
    if scheduler is None and state is not None:
        logger.warning(
            "the checkpoint has the state of an LR scheduler, but the manager has no lr_scheduler, so this state is "
            "not loaded: pass lr_scheduler to CheckpointManager to load it"
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


def write_scheduler(scheduler: Any, state: dict[str, Any] | None, groups: GroupOrder | None = None) -> None:
    """Sets the scheduler to a saved state. Does nothing if there is no scheduler or no saved state.

    `groups` translates the order of param groups, if that order has changed.
    """
    if scheduler is None or state is None:
        return
    if _is_megatrons(scheduler):
        # Begin with 0, because OptimizerParamScheduler.load_state_dict (0.16.1) adds the saved num_steps to this field.
        scheduler.num_steps = 0
    elif groups is not None and groups.has_changed:
        state = groups.applied(state, scheduler.state_dict())
        logger.warning(
            "the param groups differ from the checkpoint's, or are in another order: in the LR scheduler's state, "
            "%s were taken for lists with one value per param group, and put into this run's order",
            ", ".join(groups.found) or "no values",
        )
    scheduler.load_state_dict(state)


# Lists in the states of torch's schedulers (SequentialLR, ChainedScheduler, OneCycleLR; 2.13) that do not have one
# value per param group.
_NOT_BY_GROUP = ("_milestones", "_schedulers", "_schedule_phases")


class GroupOrder:
    """Puts lists with one value per param group, such as torch's `base_lrs`, into this run's order of groups.

    A list is assumed to have one value per param group under two conditions: the saved list has `saved` values, which
    is the number of saved groups, and the run's list has as many values as the run has groups. `numbers` has, for each
    group of the run, the number of its saved counterpart; None for a group without counterpart. `found` has the names
    of the lists that `applied` has found.
    """

    def __init__(self, numbers: Sequence[int | None], saved: int) -> None:
        self._numbers, self._saved = numbers, saved
        self.found: list[str] = []

    @property
    def has_changed(self) -> bool:
        return list(self._numbers) != list(range(self._saved))

    def applied(self, saved: Any, live: Any, name: str = "") -> Any:
        """Returns a saved value with its lists in the run's order. A group without counterpart keeps the run's entry.

        `live` is the run's value in the same place, or None; `name` is the name of the value.
        """
        if type(saved) in (dict, OrderedDict):
            mine = live if isinstance(live, Mapping) else {}
            return type(saved)((key, self.applied(item, mine.get(key), str(key))) for key, item in saved.items())
        if type(saved) not in (list, tuple):
            return saved
        own = live if isinstance(live, (list, tuple)) else ()
        if name in _NOT_BY_GROUP or (len(saved), len(own)) != (self._saved, len(self._numbers)):
            return type(saved)(self.applied(item, part, name) for item, part in zip_longest(saved, own[: len(saved)]))
        self.found.append(name)
        return type(saved)(part if n is None else saved[n] for n, part in zip(self._numbers, own, strict=True))


# The fields of megatron's scheduler whose values count for a param group that lacks the field (`get_lr`, `get_wd`; 0.16
# to 0.19).
_OF_GROUPS = ("max_lr", "min_lr", "start_wd", "end_wd")


def schedules_of(scheduler: Any, state: Mapping[str, Any] | None) -> Schedules:
    """Returns whose learning rates and weight decay count after a load of `state`: the run's or the checkpoint's."""
    if getattr(scheduler, "override_opt_param_scheduler", False):
        option: Option = "run"
    elif _is_megatrons(scheduler) and not getattr(scheduler, "use_checkpoint_opt_param_scheduler", True):
        option = "equal"
    else:
        option = "checkpoint"
    of_run = {name: getattr(scheduler, name) for name in _OF_GROUPS if hasattr(scheduler, name)}
    return Schedules(option, of_run, {name: state[name] for name in _OF_GROUPS if state and name in state})


def set_rates(scheduler: Any, groups: Sequence[dict[str, Any]]) -> None:
    """Sets the rates of some groups as megatron's scheduler does at its present step. Ignores other schedulers."""
    if groups and _is_megatrons(scheduler):
        of_these = copy.copy(scheduler)
        of_these.optimizer = SimpleNamespace(param_groups=groups)
        of_these.step(0)


def _is_megatrons(scheduler: Any) -> bool:
    return any(cls.__name__ == "OptimizerParamScheduler" for cls in type(scheduler).__mro__)
