"""A test's work in a process of its own, forked from one that has imported everything and begun nothing."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # makes the backend known

from tests.distributed.training import Layout, parallel

# Far above what any of them takes: one that hangs must fail its test, not the machine.
ALARM_S = 400


@contextmanager
def one_rank(layout: Layout | None = None) -> Iterator[None]:
    """Megatron's process groups, of one rank. No thread is behind them, so children of this process may use them."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    with parallel(layout or Layout(1)):
        yield
    dist.destroy_process_group()


def in_child(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `work` returns, in a child with megatron set up. Raises AssertionError with its traceback."""

    def with_groups() -> Any:
        with one_rank():
            return work(*args, **kwargs)

    status, result = fork(with_groups)
    assert status == 0, result or f"the child has ended with {status}"
    return result


def fork(work: Callable[[], Any]) -> tuple[int, Any]:
    """The exit status of a child, minus the signal if one killed it, and what `work` returned, or its traceback."""
    descriptor, name = tempfile.mkstemp()
    os.close(descriptor)
    path = Path(name)
    sys.stdout.flush()
    sys.stderr.flush()
    generator = random.getstate()
    pid = os.fork()
    if pid == 0:
        random.setstate(generator)  # Python seeds it anew in every child
        _be_child(path, work)
    _, status = os.waitpid(pid, 0)
    result = torch.load(path, weights_only=False) if path.stat().st_size else None
    path.unlink()
    return os.waitstatus_to_exitcode(status), result


def _be_child(path: Path, work: Callable[[], Any]) -> None:
    signal.alarm(ALARM_S)
    code, result = 0, None
    try:
        result = work()
    except BaseException:
        code, result = 1, traceback.format_exc()
    torch.save(result, path)
    os._exit(code)
