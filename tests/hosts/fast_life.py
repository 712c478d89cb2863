"""One rank's part of one life of a training in the fast tier (fast_chaos.py): it recovers, trains, saves, and may die.

A rank that is told so stops itself, with all its threads, at its n-th event of a phase. Then fast_chaos.py kills what
is to be killed. What a rank has seen is in its ledger, in a folder that all hosts share.
"""

import functools
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.fast import transaction as node_transaction
from mcore_ckpt.recover import recover
from mcore_ckpt.save.background import SaveHandle
from mcore_ckpt.steps import commit, trainer_lock
from tests.distributed.checkpointing import position
from tests.distributed.training import Layout, Training, build, parallel, train
from tests.hosts.fast_ranks import digest
from tests.support.lives import note

SIZES: dict[str, Any] = {"padded_vocab": 144, "global_batch": None, "dropout": 0.0}
# Of a busy machine, too.
TIMEOUT_S = 6.0
# What the audit hooks of Python tell of, and what changes files or connections.
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.link", "socket.connect"}


def main(arguments: dict[str, Any]) -> None:
    # Rank 0 may be on another host than in the life before. It would wait two minutes for the lock on the root.
    trainer_lock.TRAINER_BEAT_S, trainer_lock.TRAINER_LEASE_S = 0.1, 0.5
    warnings.simplefilter("ignore")  # megatron's would be most of a log
    rank = dist.get_rank()
    with Path(arguments["ledger"], f"{arguments['life']}.{rank}").open("a", buffering=1) as book:
        watch = Watch(book, arguments["stop_phase"] if rank == arguments["stop_rank"] else "", arguments["stop_at"])
        try:
            _live(arguments, book, watch)
        except Exception as error:
            note(book, "raised", watch.phase, type(error).__name__, str(error)[:400])
        note(book, "events", watch.counts)
        if watch.stops:
            watch.stop()
    # Not through the farewell of torch, which waits for the dead.
    sys.stdout.flush()
    os._exit(0)


class Watch:
    """Counts a rank's events by phase, and stops its process at one of them.

    The phase of an event is that of its thread: of the trainer's thread what it has been told last, of others their
    name. A commit, on whatever thread, is a phase of its own.
    """

    def __init__(self, book: Any, stop_phase: str, stop_at: int) -> None:
        self._book = book
        self._stop_phase, self._stop_at = stop_phase, stop_at
        self._trainer = threading.get_ident()
        self.phase = "set up"
        self.counts: Counter[str] = Counter()
        self._committing = threading.local()
        self._name_commit(commit, "publish")
        self._name_commit(node_transaction, "_place_manifest")
        sys.addaudithook(self._see)

    @property
    def stops(self) -> bool:
        return bool(self._stop_phase)

    def stop(self) -> None:
        """Stops this process. It is killed in this state."""
        note(self._book, "stopped", self._stop_phase, self._stop_at)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _name_commit(self, module: Any, function: str) -> None:
        original = getattr(module, function)

        @functools.wraps(original)
        def committing(*args: Any, **kwargs: Any) -> Any:
            self._committing.now = True
            try:
                return original(*args, **kwargs)
            finally:
                self._committing.now = False

        setattr(module, function, committing)

    def _see(self, event: str, _: Any) -> None:
        if event not in EVENTS:
            return
        if getattr(self._committing, "now", False):
            phase = "commit"
        elif threading.get_ident() == self._trainer:
            phase = self.phase
        else:
            phase = threading.current_thread().name.removeprefix("mcore_ckpt ")
        self.counts[phase] += 1
        if (phase, self.counts[phase]) == (self._stop_phase, self._stop_at):
            self.stop()


def _live(arguments: dict[str, Any], book: Any, watch: Watch) -> None:
    layout = Layout(dist.get_world_size(), **arguments["layout"], **SIZES)
    with parallel(layout):
        # Of a seed of its own: what a load left out would be seen.
        training = build(layout, seed=arguments["life"])
        note(book, "ready")
        manager = _manager(training, arguments)
        watch.phase = "recover"
        try:
            recovery = recover(manager)
        except CheckpointNotFoundError:
            if arguments["wanted"]:
                raise
            recovery = recover(manager, "off")  # all that there was had no copies yet, which the trainer has to confirm
        step = recovery.step or 0
        for result in recovery.results.values():
            assert result.extra_state["step"] == step, result.extra_state
        note(book, "loaded", step, digest(training), list(recovery.skipped))
        with _told(book) as tell:
            for _ in range(arguments["steps"]):
                watch.phase = "train"
                train(training, step, step + 1)
                step += 1
                note(book, "saving", step, digest(training))
                watch.phase = "save"
                tell(manager.save(step, extra_state=position(step)))
        if arguments["stop_phase"] == "":
            manager.close()
        note(book, "over")


def _manager(training: Training, arguments: dict[str, Any]) -> CheckpointManager:
    fast = FastTier(f"{arguments['folder']}/run", **arguments["fast"])
    config = CheckpointConfig(timeout_s=TIMEOUT_S, async_save=True, max_to_keep=2, fast=fast)
    return CheckpointManager(arguments["root"], training.model, training.optimizer, training.scheduler, config=config)


@contextmanager
def _told(book: Any) -> Iterator[Any]:
    """Yields a function that takes a handle, and notes what it tells when it tells it. Waits for all in the end."""
    threads: list[threading.Thread] = []

    def watch(handle: SaveHandle) -> None:
        threads.append(threading.Thread(target=_note_all, args=(book, handle), daemon=True))
        threads[-1].start()

    try:
        yield watch
    finally:
        for thread in threads:
            thread.join()


def _note_all(book: Any, handle: SaveHandle) -> None:
    try:
        handle.wait()
    except Exception as error:
        note(book, "failed", handle.step, type(error).__name__, str(error)[:400])
        return
    note(book, "committed", handle.step)
    assert handle.copies is not None
    problem = handle.copies.wait()
    note(book, "copied" if problem is None else "not copied", handle.step, problem)
    if handle.drain is None:
        return
    try:
        handle.drain.wait()
    except Exception as error:
        note(book, "not durable", handle.step, str(error)[:400])
    else:
        note(book, "durable", handle.step)
