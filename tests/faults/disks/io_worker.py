"""Run with shim.c loaded: saves and loads of two ranks under a fault, one for each line of JSON on stdin.

For each, a line of JSON on stdout says what became of it. Nothing but the storage layer, without megatron.
"""

import json
import os
import sys
import threading
import time
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.io import tuning
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.steps import tracker
from tests.support.checkpoints import SMALL_KNOBS, checkpoints, remains, save_together

WORLD = 2


@dataclass(frozen=True)
class Job:
    """`env`: set while step 2 is saved, or, with `reads`, while all is read. `ranks`: how many of them come."""

    root: str
    env: dict[str, str]
    reads: bool = False
    ranks: int = WORLD
    timeout_s: float = 30.0


def save(seats: list[Agreement], root: Path, step: int) -> list[list[str] | None]:
    """What each rank raises."""
    errors: list[list[str] | None] = [None] * len(seats)

    def part(rank: int) -> None:
        try:
            save_together(seats[rank], root, step, step)
        except Exception as error:
            errors[rank] = [type(error).__name__, str(error)]

    threads = [threading.Thread(target=part, args=(rank,), daemon=True) for rank in range(len(seats))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return errors


def read(root: Path) -> list[str] | None:
    try:
        checkpoints(root)
    except CheckpointError as error:
        return [type(error).__name__, str(error)]
    return None


def run(job: Job) -> dict[str, Any]:
    root = Path(job.root)
    store = dist.HashStore()  # type: ignore[attr-defined]
    seats = [Agreement(store, rank, WORLD, "test", job.timeout_s) for rank in range(WORLD)]
    assert save(seats, root, 1) == [None] * WORLD
    shim = CDLL(None)
    shim.fault_hits()
    os.environ.update(job.env)
    started = time.monotonic()
    errors = [read(root)] if job.reads else save(seats[: job.ranks], root, 2)
    seconds = time.monotonic() - started
    for name in job.env:
        del os.environ[name]
    told = {
        "errors": errors,
        "seconds": seconds,
        "hits": shim.fault_hits(),
        "steps": sorted(checkpoints(root).items()),
        "tracker": tracker.read_tracker(root),
        "remains": [name for name in remains(root) if name != "global_steps_2"],
    }
    if job.ranks == WORLD:
        told["next"] = save(seats, root, 3)
        told["last"] = [sorted(checkpoints(root).items()), tracker.read_tracker(root)]
    return told


def main() -> None:
    vars(tuning).update(SMALL_KNOBS)
    for line in sys.stdin:
        told = run(Job(**json.loads(line)))
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


main()
