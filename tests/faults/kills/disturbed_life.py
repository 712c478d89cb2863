"""One rank's part of one life of a training that is disturbed, but not killed: it goes on until saves work again.

What it does is written down in a file that outlives it, beside what `life.py` notes: how long each call took.
"""

import datetime
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.io import tuning
from tests.distributed.snapshot import snapshot
from tests.distributed.training import build, parallel, train
from tests.faults.kills.life import ALARM_S, KEEP, LAYOUT, STEPS, WORLD, Life, ledger
from tests.support.lives import connect, digest, note

TIMEOUT_S = 4.0
# A hung call that has returned, and the sweep of what it has left, take a few calls.
TRIES = 12


@dataclass(frozen=True)
class DisturbedLife(Life):
    @property
    def disk(self) -> Path:
        """Where the file system is that may freeze. What the test writes down is elsewhere."""
        return Path(self.folder, "disk")

    @property
    def root(self) -> Path:
        return self.disk / "run"

    @property
    def is_over(self) -> Path:
        """The file that is there when nothing disturbs the life any more."""
        return Path(self.folder, f"life{self.number}.over")


def run_rank(life: DisturbedLife, rank: int, ready: int) -> NoReturn:
    """A whole life. Writes to `ready` when it begins to deal with checkpoints."""
    signal.alarm(ALARM_S)
    report: dict[str, Any] = {"error": None, "in": "setting up", "is_gloo": False, "calls": []}
    try:
        _live(life, rank, ready, report)
    except BaseException as error:
        report["error"] = [type(error).__name__, str(error), traceback.format_exc()]
        # A connection of the training's own, which was slowed or cut, too, may have been given up by the system.
        in_package = any(
            frame.f_globals["__name__"].startswith("mcore_ckpt.") for frame, _ in traceback.walk_tb(error.__traceback__)
        )
        report["is_gloo"] = "gloo/transport" in str(error) and not in_package
    life.report(rank).write_text(json.dumps(report))
    os._exit(0)


def _live(life: DisturbedLife, rank: int, ready: int, report: dict[str, Any]) -> None:
    tuning.SHARE_BYTES = tuning.WRITE_BYTES = 4096
    timeout = datetime.timedelta(seconds=ALARM_S)
    dist.init_process_group("gloo", store=connect(life.port, life.number), rank=rank, world_size=WORLD, timeout=timeout)
    with parallel(LAYOUT), ledger(life.folder, rank).open("a", buffering=1) as book:
        training = build(LAYOUT, seed=1)
        dist.barrier()
        os.write(ready, b"x")
        config = CheckpointConfig(timeout_s=TIMEOUT_S, async_save=life.background, max_to_keep=KEEP)

        def open_manager() -> CheckpointManager:
            return CheckpointManager(life.root, training.model, training.optimizer, training.scheduler, config=config)

        def load() -> int:
            return 0 if manager.latest_step() is None else manager.load().step

        def save() -> None:
            manager.save(step, extra_state={"step": step, "rank": rank}).wait()

        manager = _until_it_works("open", open_manager, report)
        step = _until_it_works("load", load, report)
        if step:
            note(book, "loaded", step, digest(snapshot(training)))
        done = 0
        while done < STEPS or not _alike(life.is_over.exists()):
            train(training, step, step + 1)
            step, done = step + 1, done + 1
            note(book, "saving", step, digest(snapshot(training)))
            if _works("save", save, report):
                note(book, "committed", step)
        _until_it_works("save", save, report)
        note(book, "committed", step)
        _works("close", manager.close, report)


def _until_it_works(name: str, call: Callable[[], Any], report: dict[str, Any]) -> Any:
    found: list[Any] = []
    for _ in range(TRIES):
        if _works(name, lambda: found.append(call()), report):
            return found[-1]
        time.sleep(0.5)
    raise AssertionError(f"{name} has failed {TRIES} times: {report['calls'][-1]}")


def _works(name: str, call: Callable[[], Any], report: dict[str, Any]) -> bool:
    """Makes a call on all ranks, and returns whether it has worked on all of them."""
    report["in"] = name
    started, error = time.monotonic(), ""
    try:
        call()
    except CheckpointError as raised:
        error = f"{type(raised).__name__}: {raised}"
    report["calls"].append([name, time.monotonic() - started, error])
    return _alike(not error)


def _alike(value: bool) -> bool:
    values: list[Any] = [None] * WORLD
    dist.all_gather_object(values, value)
    return all(values)
