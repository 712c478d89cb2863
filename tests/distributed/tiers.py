"""Which cases run in CI: one for each reason. The others are marked `full` and run with `pytest --full`."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def marks(world: int, in_ci: bool = True) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a case: on how many ranks it runs, and when."""
    return (pytest.mark.world(world), *(() if in_ci else (pytest.mark.full,)))


def pairs(first: Sequence[Any], second: Sequence[Any], also: Collection[tuple[Any, Any]] = ()) -> list[Any]:
    """Every pair. CI runs as few as have each value once (the second ones in turn), and those in `also`."""
    in_turn = {
        (first[number % len(first)], second[number % len(second)]) for number in range(max(len(first), len(second)))
    }
    wanted = in_turn | set(also)
    return [
        pytest.param(one, other, marks=() if (one, other) in wanted else pytest.mark.full)
        for one in first
        for other in second
    ]
