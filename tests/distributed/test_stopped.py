"""SIGSTOP of a rank past the deadline: all ranks raise the same error, the others by the deadline, and training goes
on when it is back."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import AgreementError, CheckpointError, CommitError
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.load import load as loading
from mcore_ckpt.ranks import one_round
from tests.distributed.agreement import error_of, everywhere, gather, raised_everywhere
from tests.distributed.checkpointing import assert_loads
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, snapshot
from tests.distributed.training import Training, build, parallel, train

DP2 = LAYOUTS["dp2-bf16"]
FULL = pytest.mark.full
TIMEOUT_S = 3.0
# How much later than the deadline those that are not stopped may know.
LATE_S = 2.0

pytestmark = pytest.mark.world(2)


def manager_of(training: Training, root: Path, **config: Any) -> CheckpointManager:
    choices = CheckpointConfig(timeout_s=TIMEOUT_S, **config)
    return CheckpointManager(root, training.model, training.optimizer, training.scheduler, config=choices)


class Stop:
    """In place of a function on one rank: stops the process there, once, and goes on when it is woken up."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type) -> Any:
        return lambda *args: self(instance, *args)


@dataclass(frozen=True)
class Took:
    """Seconds until a call has raised.

    Attributes:
        call: since it began.
        wait: since this rank began the wait that ran out, its own work being done: that is when its deadline begins.
            None if it did not wait in vain.
    """

    call: float
    wait: float | None


def result_of(call: Callable[[], Any], victim: int) -> tuple[CheckpointError | None, Took]:
    """What a call raises, and after how long; the rank that is not stopped then wakes the other one up."""
    pids = gather(os.getpid())
    ran_out: list[float] = []
    poll = one_round.poll

    def poll_and_note(*args: Any) -> bool:
        began = time.monotonic()
        if poll(*args):
            return True
        ran_out.append(began)
        return False

    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(one_round, "poll", poll_and_note)
        error = error_of(call)
    ended = time.monotonic()
    took = Took(ended - started, ended - ran_out[0] if ran_out else None)
    if dist.get_rank() != victim:
        _wait_until_stopped(pids[victim])
        os.kill(pids[victim], signal.SIGCONT)
    return error, took


def _wait_until_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


def assert_in_time(took: Took, victim: int) -> None:
    with everywhere():
        if dist.get_rank() == victim:
            assert took.call > TIMEOUT_S
        else:
            assert took.call >= TIMEOUT_S
            assert took.wait is not None
            assert took.wait < TIMEOUT_S + LATE_S


@pytest.mark.parametrize(
    ("how", "victim"),
    [("sync", 0), *(pytest.param(how, rank, marks=FULL) for how, rank in (("sync", 1), ("async", 0), ("async", 1)))],
)
def test_a_rank_is_stopped_while_saving(
    victim: int, how: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = how == "sync"
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = manager_of(training, shared_path, async_save=how == "async", shared_writes=shared)
        manager.save(1).wait()
        at_save = snapshot(training)
        train(training, 1, 2)
        before = snapshot(training)
        with monkeypatch.context() as patch:
            if dist.get_rank() == victim:
                patch.setattr(FileWriter, "finish", Stop(FileWriter.finish))
            error, took = result_of(lambda: manager.save(2).wait(), victim)
        for message in raised_everywhere(CommitError, error):
            assert f"rank {victim}" in message
        assert_in_time(took, victim)
        after = snapshot(training)
        with everywhere():
            assert_same(after, before)
            assert manager.latest_step() == 1
        manager.load()
        loaded = snapshot(training)
        with everywhere():
            assert_same(loaded, at_save)
        train(training, 1, 3)
        manager.save(3).wait()
        manager.close()
        dist.barrier()  # rank 0 gives up the trainer's lock in its own time
        with everywhere():
            assert manager.latest_step() == 3
            assert [path.name for path in shared_path.rglob(".*") if path.name != file_names.RUN_FILE] == []


@pytest.mark.parametrize(
    ("stage", "victim"),
    [
        ("while", 1),
        *(pytest.param(stage, rank, marks=FULL) for stage, rank in (("while", 0), ("before", 0), ("before", 1))),
    ],
)
def test_a_rank_is_stopped_while_loading(
    victim: int, stage: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or dead, which to the others is the same."""
    function = {"before": "plan_load", "while": "fill_tensors"}[stage]
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = manager_of(training, shared_path)
        manager.save(1).wait()
        at_save = snapshot(training)
        train(training, 1, 2)
        before = snapshot(training)
        with monkeypatch.context() as patch:
            if dist.get_rank() == victim:
                patch.setattr(loading, function, Stop(getattr(loading, function)))
            error, took = result_of(manager.load, victim)
        for message in raised_everywhere(AgreementError, error):
            assert f"rank {victim}" in message
            assert ("are now undefined" in message) == (stage == "while")
        assert_in_time(took, victim)
        after = snapshot(training)
        with everywhere():
            if stage == "before":
                assert_same(after, before)
        assert_loads(manager, training, at_save)
        manager.close()
