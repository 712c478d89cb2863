"""Run on two ranks (test_kill_training.py): a training that saves, of which one rank may kill itself during a save.

`train_and_save.py first ROOT RESULTS VICTIM EVENT COUNT HOW` trains, saves, trains on and saves again; the victim dies
at its COUNT-th EVENT of the second save; with "async" as HOW, saves go on beside the training.
`train_and_save.py resume ROOT RESULTS` loads what is there, trains on from it as far, and saves.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.io import tuning
from tests.distributed.training import Layout, Training, build, parallel, train
from tests.support.crash_worker import Watch
from tests.support.step_parts import PartsOfStep

TIMEOUT_S = 4.0
FIRST, SECOND = 2, 4


def manager_of(training: Training, root: str, how: str = "sync") -> CheckpointManager:
    config = CheckpointConfig(timeout_s=TIMEOUT_S, async_save=how == "async")
    return CheckpointManager(root, training.model, training.optimizer, training.scheduler, config=config)


def write(results: str, name: str, value: Any) -> None:
    Path(results, f"{name}.{dist.get_rank()}.json").write_text(json.dumps(value))


def train_on(training: Training, results: str, name: str) -> None:
    write(results, name, [asdict(step) for step in train(training, FIRST, SECOND)])


def first(root: str, results: str, victim: str, event: str, count: str, how: str) -> None:
    training = build(Layout(2, precision="bf16"), seed=1)
    manager = manager_of(training, root, how)
    parts = PartsOfStep(manager, dist.get_rank(), Path(results))
    train(training, 0, FIRST)
    parts.step = FIRST
    manager.save(FIRST, extra_state={"rank": dist.get_rank()})
    # A save that is under way must not have what the training does next.
    train_on(training, results, "reference")
    manager.wait()
    # torchrun ends the others when one has died: they must be heard first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch = Watch(f"save:{event}" if dist.get_rank() == int(victim) else "", int(count))
    watch.phase = "save"
    watch.watch_io()
    error = None
    parts.step = SECOND
    try:
        manager.save(SECOND, extra_state={"rank": dist.get_rank()}).wait()
    except CheckpointError as raised:
        error = [type(raised).__name__, str(raised)]
    watch.stop()
    write(results, "survivor", error)
    # Not through torch's farewell, which waits for the dead.
    os._exit(0)


def resume(root: str, results: str) -> None:
    training = build(Layout(2, precision="bf16"), seed=2)
    manager = manager_of(training, root)
    parts = PartsOfStep(manager, dist.get_rank(), Path(results))
    loaded = manager.load()
    parts.check_loaded(loaded.step)
    parts.step = SECOND
    write(results, "loaded", {"step": loaded.step, "extra_state": loaded.extra_state})
    train_on(training, results, "resumed")
    manager.save(SECOND, extra_state={"rank": dist.get_rank()})
    manager.close()


def main() -> None:
    # The model's file is shared by both ranks, in several pieces.
    tuning.SHARE_BYTES = tuning.WRITE_BYTES = 4096
    dist.init_process_group("gloo")
    part, *arguments = sys.argv[1:]
    with parallel(Layout(2, precision="bf16")):
        {"first": first, "resume": resume}[part](*arguments)
    dist.destroy_process_group()


main()
