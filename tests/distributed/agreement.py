"""Checks that all ranks pass, or fail together."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CheckpointError


def gather(value: Any) -> list[Any]:
    """What each rank has, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """A check of this rank's own state, without collectives: where one rank fails, all raise.

    >>> with everywhere():
    ...     assert result.step == 3
    """
    failure = None
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:  # the second, which `pytest.raises` raises, is no Exception
        failure = "".join(traceback.format_exception(error))
    failures = {rank: text for rank, text in enumerate(gather(failure)) if text is not None}
    if failures:
        rank, text = next(iter(failures.items()))
        raise AssertionError(f"ranks {sorted(failures)} failed, rank {rank}:\n{text}")


def error_of(call: Callable[[], object]) -> CheckpointError | None:
    """What a call raises on this rank. Whether all have raised it is `raised_everywhere`'s to say."""
    try:
        call()
    except CheckpointError as error:
        return error
    return None


def raised_everywhere(expected: type[Exception], error: BaseException | None) -> list[str]:
    """Each rank's message, if all ranks raised exactly this type."""
    found = gather(None if error is None else (type(error).__name__, str(error)))
    wrong = {rank: seen for rank, seen in enumerate(found) if seen is None or seen[0] != expected.__name__}
    assert not wrong, f"expected {expected.__name__} on all ranks, found {wrong}"
    return [message for _, message in found]
