"""What all ranks share of optimizer and scheduler, put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.optimizer import SavedPart
from mcore_ckpt.state.scheduler import keeps_own_rates, write_scheduler


def write_common(
    optimizer: Any, lr_scheduler: Any, saved: Sequence[SavedPart], schedule: dict[str, Any] | None
) -> None:
    """Sets schedule, param groups, steps and gradient scalers. The parameters' state is there: a step goes to each.

    Args:
        optimizer, lr_scheduler: the trainer's.
        saved: for each chained optimizer.
        schedule: the scheduler's state.
    """
    # The scheduler first: loading it sets the groups' rates, from fields it has not all read yet.
    write_scheduler(lr_scheduler, schedule)
    keep_rates = keeps_own_rates(lr_scheduler)
    for part, state in zip(optimizer_state.optimizer_parts(optimizer), saved, strict=True):
        if state.param_groups is not None:
            optimizer_state.write_param_groups(part, state.param_groups, keep_rates)
        optimizer_state.write_step(part, state.step)
        optimizer_state.write_grad_scaler(part, state.grad_scaler)
