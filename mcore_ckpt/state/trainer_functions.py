"""Calls functions that the trainer has passed, such as the functions of a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.interrupts import is_interrupt
from mcore_ckpt.io.disk_watch import in_function_of_trainer

Result = TypeVar("Result")


def call_of_trainer(function: Callable[[], Result], failure: str, error_type: type[CheckpointError]) -> Result:
    """Calls a function of the trainer, and returns its result.

    If the function raises an error, the other ranks raise an error of this package. So this rank raises an error of
    this package, too: a training loop that catches this package's errors then continues on all ranks. Interrupts
    (`is_interrupt`) are raised unchanged.

    Args:
        function: the function to call.
        failure: begins the message, such as "extra_state could not be read".
        error_type: the type of the error that is raised in place of an error of another package.
    """
    try:
        with in_function_of_trainer():
            return function()
    except CheckpointError:
        raise
    except Exception as error:
        if is_interrupt(error):
            raise
        raise error_type(f"{failure}: {type(error).__name__}: {error}") from error
