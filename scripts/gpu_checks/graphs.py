"""Captures CUDA graphs beside saves.

Megatron captures in Global mode: until the capture ends, any call on any thread of the process that CUDA calls unsafe
(pinning memory, asking or waiting for an event, allocating) fails, and makes the capture invalid.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gpu_checks.needs import need_gpus, need_module
from gpu_checks.outcome import Failed
from gpu_checks.ranks import on_ranks, process_group

# How long one process may take, most of which goes into building the model.
LIMIT_S = 300.0
# Each capture is open for some milliseconds, so that calls of other threads fall into it.
OPERATIONS = 2000
LEAST_CAPTURES = 30
# How long the host memory of the state below is prepared, with a margin for a slow machine.
PREPARATION_S = 15.0
GIGABYTES = 1.0


def captures() -> str:
    """Captures graphs while host memory is prepared, and beside a lazy and a snapshot save."""
    need_gpus()
    need_module("megatron.core", "megatron-core")
    found, failed = [], []
    for case in ("prepare", "lazy", "snapshot"):
        try:
            (number,) = on_ranks("gpu_checks.graphs:capturing", case, limit_s=LIMIT_S)
            found.append(f"{case} {number}")
        except Failed as failure:
            failed.append(f"{case}: {failure}")
    if failed:
        raise Failed("; ".join(failed))
    return f"captures: {', '.join(found)}"


def capturing(case: str) -> int:
    """Captures graphs on the rank's main thread during one case. Returns how many."""
    from gpu_checks import trainer

    with process_group():
        state = trainer.build(trainer.shape(trainer.fitting(GIGABYTES)))
        root = trainer.shared_folder()
        mode = "snapshot" if case == "prepare" else case
        with trainer.saved_by(root, state, async_mode=mode) as manager:
            if case == "prepare":
                end = time.monotonic() + PREPARATION_S
                number = _capture_until(lambda: time.monotonic() >= end)
                manager.save(1).wait()
                return number
            manager.save(1).wait()  # host memory is ready after it
            handle = manager.save(2)
            number = _capture_until(lambda: handle.done)
            handle.wait()
            # The save is over, so there is nothing to hold, and this is no call that a capture forbids.
            _capture(manager.before_step)
            trainer.train_step(state)
            return number


def _capture_until(is_over: Callable[[], bool]) -> int:
    number = 0
    while number < LEAST_CAPTURES or not is_over():
        _capture(lambda: None)
        number += 1
    return number


def _capture(inside: Callable[[], None]) -> None:
    """Captures and replays a graph, and checks that it has done its work."""
    import torch

    values = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            inside()
            for _ in range(OPERATIONS):
                values.add_(1)
    except RuntimeError as error:
        raise Failed(f"the capture has failed: {error}") from error
    graph.replay()
    if not bool((values == OPERATIONS).all()):
        raise Failed("the captured graph has not computed what it was made of")
