"""Restores the state of optimizer and scheduler that is the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.param_groups import SavedPart, write_param_groups
from mcore_ckpt.state.scheduler import GroupOrder, schedules_of, set_rates, write_scheduler


def write_common(
    optimizer: Any, lr_scheduler: Any, saved: Sequence[SavedPart], schedule: dict[str, Any] | None, groups: int = 0
) -> None:
    """Restores the LR scheduler, and the param groups, steps and gradient scalers of the optimizer.

    The moments must exist already, because the step is set for each parameter that has state.

    Args:
        optimizer, lr_scheduler: the trainer's objects.
        saved: the saved state of each chained optimizer.
        schedule: the saved state of the LR scheduler, or None.
        groups: how many param groups the checkpoint has; 0 if their order is not known.
    """
    parts = list(zip(optimizer_parts(optimizer), saved, strict=True))
    numbers = [number for part, state in parts for number in state.numbers or [None] * len(part.param_groups)]
    # Load the scheduler first. A scheduler that loads its state sets the groups' rates before it has read all fields of
    # the state, so `set_rates` must correct the rates afterwards.
    write_scheduler(lr_scheduler, schedule, GroupOrder(numbers, groups) if groups else None)
    option = schedules_of(lr_scheduler, schedule).option
    for part, state in parts:
        without_rates = part.param_groups
        if state.param_groups is not None:
            without_rates = write_param_groups(part, state.param_groups, option)
        if state.of_moments:
            write_param_groups(part, state.of_moments, "run")
        set_rates(lr_scheduler, without_rates)
        part.write_step(state.step)
        optimizer_state.write_grad_scaler(part, state.grad_scaler)
