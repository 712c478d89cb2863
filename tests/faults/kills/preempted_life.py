"""One rank's part of one life of a training that is preempted: it goes on from what is there, and saves before its end.

What it does is written down in files that outlive it: digests of the state after each step, and how it was stopped.
"""

import datetime
import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.io import tuning
from mcore_ckpt.preemption import PreemptionGuard, requests
from tests.distributed.snapshot import snapshot
from tests.distributed.training import Layout, build, parallel, train
from tests.support.lives import connect, digest, note

# Far above any deadline here: a rank that hangs must fail the run, not the machine.
ALARM_S = 240
TIMEOUT_S = 100.0
STOPPED = 75
# Nobody trains so long.
LAST_STEP = 10_000


@dataclass(frozen=True)
class Preemption:
    """`saves_every` steps, beside the training if `background`. `slow_s`: what rank 0 takes a save to last, in seconds,
    so that none fits into the deadline; None: as long as it does last. `fast`: saves go to the nodes first.
    """

    number: int
    folder: str
    port: int
    world: int
    deadline_s: float
    background: bool = False
    saves_every: int | None = None
    slow_s: float | None = None
    fast: bool = False

    @property
    def root(self) -> Path:
        return Path(self.folder, "root")

    @property
    def node(self) -> Path:
        return Path(self.folder, "node")

    @property
    def trigger(self) -> Path:
        return Path(self.folder, "stop")

    def report(self, rank: int) -> Path:
        return Path(self.folder, f"life{self.number}.rank{rank}.json")


def ledger(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"ledger.{rank}")


def run_rank(life: Preemption, rank: int, ready: int) -> NoReturn:
    """A whole life. Writes to `ready` when its guard hears signals."""
    signal.alarm(ALARM_S)
    report: dict[str, Any] = {"error": None, "in": "setting up", "step": None, "saved": None}
    status = 1
    try:
        status = _live(life, rank, ready, report)
    except BaseException as error:
        report["error"] = [type(error).__name__, str(error), traceback.format_exc()]
        report["is_gloo"] = isinstance(error, RuntimeError)
    report["ended"] = time.time()
    life.report(rank).write_text(json.dumps(report))
    # Not through torch's farewell, which waits for the other ranks.
    os._exit(status)


def _live(life: Preemption, rank: int, ready: int, report: dict[str, Any]) -> int:
    tuning.SHARE_BYTES = tuning.WRITE_BYTES = 4096
    requests.LOOK_S = 0.05
    timeout = datetime.timedelta(seconds=ALARM_S / 2)
    store = connect(life.port, life.number)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=life.world, timeout=timeout)
    layout = Layout(life.world, precision="bf16")
    with parallel(layout):
        training = build(layout, seed=1)
        manager = _manager(life, training)
        with ledger(life.folder, rank).open("a", buffering=1) as book:
            step = 0
            if manager.latest_step() is not None or life.fast:
                step = _recovered(manager)
                note(book, "state", step, digest(snapshot(training)))
            if life.slow_s is not None:
                manager._background._took.append(life.slow_s)
            guard = PreemptionGuard(
                manager,
                deadline_s=life.deadline_s,
                trigger_file=life.trigger,
                extra_state={"rank": rank},
                exit_status=STOPPED,
            )
            with guard:
                dist.barrier()
                os.write(ready, b"x")
                step = _train(life, manager, guard, training, step, book, report)
            assert guard.stopped is not None
            report |= {"step": step, "saved": guard.stopped.saved, "reason": guard.stopped.reason}
        manager.close()
    return guard.exit_status


def _manager(life: Preemption, training: Any) -> CheckpointManager:
    fast = FastTier(life.node, replicas=0, durable_every=3) if life.fast else None
    config = CheckpointConfig(timeout_s=TIMEOUT_S, async_save=life.background, max_to_keep=2, fast=fast)
    return CheckpointManager(life.root, training.model, training.optimizer, training.scheduler, config=config)


def _recovered(manager: CheckpointManager) -> int:
    from mcore_ckpt.recover import recover

    return recover(manager).step or 0


def _train(
    life: Preemption,
    manager: CheckpointManager,
    guard: PreemptionGuard,
    training: Any,
    step: int,
    book: Any,
    report: dict[str, Any],
) -> int:
    while step < LAST_STEP:
        report["in"] = "training"
        train(training, step, step + 1)
        report["in"] = "saving"
        step += 1
        note(book, "state", step, digest(snapshot(training)))
        if life.saves_every is not None and step % life.saves_every == 0:
            manager.save(step, extra_state={"rank": dist.get_rank()})
        if guard.should_stop(step):
            return step
    raise AssertionError("nothing has stopped the training")
