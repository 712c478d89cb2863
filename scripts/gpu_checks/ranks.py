"""Runs one function on several ranks, each a process with a GPU of its own, in one process group over NCCL."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_checks.outcome import Failed, NotPossible
from gpu_checks.runner import Call, call_all

HOST = "127.0.0.1"


def on_ranks(
    function: str, *arguments: str, world: int = 1, limit_s: float, more: Mapping[str, str] | None = None
) -> list[Any]:
    """Calls a function on all ranks, and returns what each has returned.

    Args:
        function: its name, as "gpu_checks.graphs:capturing". It calls `process_group`, `join` or `connect` first.
        arguments: texts, the same on all ranks.
        world: the number of ranks.
        limit_s: the time limit for all of them together, their exits included.
        more: variables added to the environment.

    Raises:
        Failed: a rank has failed. The message has the reason of the first that has one of its own.
        NotPossible: a rank has found that this machine cannot run it.
    """
    import torch.distributed as dist

    # The store is here and takes a port itself: a port that was only looked for can be gone before a rank listens.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "4"}
    calls = [
        Call(function, arguments, {**where, "RANK": str(rank), "LOCAL_RANK": str(rank), **(more or {})})
        for rank in range(world)
    ]
    outcomes = call_all(calls, limit_s, Path(tempfile.mkdtemp(prefix="ranks-")))
    failed = [(rank, each.found) for rank, each in enumerate(outcomes) if each.status == "failed"]
    if failed:
        rank, why = next((each for each in failed if "as another failed" not in each[1]), failed[0])
        raise Failed(f"rank {rank} of {world}: {why}" if world > 1 else why)
    if missing := [each.found for each in outcomes if each.status != "passed"]:
        raise NotPossible(missing[0])
    return [each.found for each in outcomes]


def connect(backend: str) -> None:
    """Joins the job's process group, whose store is in the process that has called `on_ranks`."""
    import torch.distributed as dist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def join() -> int:
    """Joins the job's process group with the GPU of this rank, and returns the rank."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    connect("nccl")
    # The default group's communicator is made here, and not in what is measured.
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    return dist.get_rank()


@contextmanager
def process_group() -> Iterator[int]:
    """The job's process group, which is destroyed at the end, but not after an error. Gives the rank."""
    import torch.distributed as dist

    yield join()
    dist.destroy_process_group()


def same_everywhere(value: Any) -> Any:
    """Returns rank 0's value on every rank."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
