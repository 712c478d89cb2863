"""One rank's part of one life of a training: it loads what the life before has left, trains, saves, and may be killed.

What it does is written down in files that outlive it: digests of the state that each step must have, and which saves
it was told of.
"""

import contextlib
import datetime
import functools
import json
import os
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.io import tuning
from mcore_ckpt.save import root_commit
from mcore_ckpt.steps import commit
from tests.distributed.snapshot import snapshot
from tests.distributed.training import Layout, build, parallel, train
from tests.support.crash_worker import Watch, WatchedStore
from tests.support.lives import connect, digest, note
from tests.support.step_parts import PartsOfStep

WORLD = 2
LAYOUT = Layout(WORLD, precision="bf16")
# Of a busy machine, too: a deadline that passes without a kill makes a life of no use.
TIMEOUT_S = 6.0
# Far above any deadline here: a rank that hangs must fail the run, not the machine.
ALARM_S = 120
KEEP = 2
STEPS = 2


@dataclass(frozen=True)
class Life:
    """`kill_rank` dies by itself, at its `kill_at`-th event of `kill_phase`; None: nobody does. `again`: the step that
    was loaded is saved once more. `exchange`: folders can be swapped in one step. `background`: saves are async.
    `part_megabytes`: the size of the part that is a folder; 0: that of the others.
    """

    number: int
    folder: str
    port: int
    background: bool = False
    exchange: bool = True
    again: bool = False
    kill_rank: int | None = None
    kill_phase: str = ""
    kill_at: int = 0
    part_megabytes: int = 0

    @property
    def root(self) -> Path:
        return Path(self.folder, "root")

    def report(self, rank: int) -> Path:
        return Path(self.folder, f"life{self.number}.rank{rank}.json")


def ledger(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"ledger.{rank}")


class PhaseWatch(Watch):
    """Counts a rank's events by the phase of the thread that they are of, and tells when it is to die."""

    def __init__(self, phase: str, at: int) -> None:
        super().__init__("", 0)
        self._kill_phase, self._kill_at_event = phase, at
        self._threads = threading.local()
        self.counts: Counter[str] = Counter()

    def event(self, name: str) -> bool:
        # What ends a save runs on a thread of its own, which nobody has told its phase.
        phase = getattr(self._threads, "phase", "save")
        self.counts[phase] += 1
        return (phase, self.counts[phase]) != (self._kill_phase, self._kill_at_event)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = getattr(self._threads, "phase", "save")
        self._threads.phase = phase
        try:
            yield
        finally:
            self._threads.phase = before

    def name_phase(self, module: Any, function: str, phase: str) -> None:
        original: Callable[..., Any] = getattr(module, function)

        @functools.wraps(original)
        def named(*args: Any, **kwargs: Any) -> Any:
            with self.during(phase):
                return original(*args, **kwargs)

        setattr(module, function, named)


def run_rank(life: Life, rank: int, ready: int) -> NoReturn:
    """A whole life. Writes to `ready` when it begins to deal with checkpoints."""
    signal.alarm(ALARM_S)
    watch = PhaseWatch(life.kill_phase if rank == life.kill_rank else "", life.kill_at)
    report: dict[str, Any] = {"error": None, "in": "setting up"}
    try:
        if not life.exchange:
            commit.exchange = lambda first, second: False
        _live(life, rank, ready, watch, report)
        report["in"] = ""
    except BaseException as error:
        report["error"] = [type(error).__name__, str(error), traceback.format_exc()]
        report["is_gloo"] = isinstance(error, RuntimeError)
    watch.stop()
    report["events"] = watch.counts
    life.report(rank).write_text(json.dumps(report))
    # Not through torch's farewell, which waits for the dead.
    os._exit(0)


def _live(life: Life, rank: int, ready: int, watch: PhaseWatch, report: dict[str, Any]) -> None:
    tuning.SHARE_BYTES = tuning.WRITE_BYTES = 4096
    timeout = datetime.timedelta(seconds=ALARM_S / 2)
    dist.init_process_group("gloo", store=connect(life.port, life.number), rank=rank, world_size=WORLD, timeout=timeout)
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        dist.barrier()
        os.write(ready, b"x")
        watch.watch_io()
        watch.name_phase(commit, "publish", "commit")
        watch.name_phase(root_commit, "delete_step", "retention")
        report["in"] = "start"
        with watch.during("start"):
            manager = _manager(life, training)
            repeats = life.part_megabytes * 125_000 // len(PartsOfStep.FILES) or None
            parts = PartsOfStep(manager, rank, Path(life.folder), folder_repeats=repeats)
            for seat in (manager._trainer.agreement, manager._context.commits):
                seat._store = WatchedStore(seat._store, watch)
        with ledger(life.folder, rank).open("a", buffering=1) as book:
            step = _load(manager, parts, watch, report, book, training)
            if life.again and step:
                _save(manager, parts, step, report, book, training)
            for _ in range(STEPS):
                report["in"] = "training"
                train(training, step, step + 1)
                step += 1
                _save(manager, parts, step, report, book, training)
            manager.close()
            note(book, "committed", step)


def _manager(life: Life, training: Any) -> CheckpointManager:
    config = CheckpointConfig(timeout_s=TIMEOUT_S, async_save=life.background, max_to_keep=KEEP)
    return CheckpointManager(life.root, training.model, training.optimizer, training.scheduler, config=config)


def _load(
    manager: CheckpointManager, parts: PartsOfStep, watch: PhaseWatch, report: dict[str, Any], book: Any, training: Any
) -> int:
    report["in"] = "load"
    with watch.during("load"):
        if manager.latest_step() is None:
            return 0
        result = manager.load()
    assert result.extra_state == {"step": result.step, "rank": dist.get_rank()}, result.extra_state
    assert not result.report.skipped, result.report.skipped
    parts.check_loaded(result.step)
    note(book, "loaded", result.step, digest(snapshot(training)))
    return result.step


def _save(
    manager: CheckpointManager, parts: PartsOfStep, step: int, report: dict[str, Any], book: Any, training: Any
) -> None:
    report["in"] = "save"
    parts.step = step
    note(book, "saving", step, digest(snapshot(training)))
    handle = manager.save(step, extra_state={"step": step, "rank": dist.get_rank()})
    if handle.done:
        handle.wait()
        note(book, "committed", step)
