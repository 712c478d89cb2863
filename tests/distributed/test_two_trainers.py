"""Two trainings that save to one place: the second is refused on all its ranks, and goes on."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import LockedError
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.steps.trainer_lock import TrainerLock
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import manager_of
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.training import build, parallel, train

DP2 = LAYOUTS["dp2-bf16"]
LOCK = ".actor.trainer.json"

pytestmark = pytest.mark.world(2)


@pytest.fixture
def another(shared_path: Path) -> Iterator[int]:
    """The pid of another trainer on this host, which has the lock of actors."""
    pids = [0]
    if dist.get_rank() == 0:
        told, tell = os.pipe()
        over, end = os.pipe()
        pids[0] = os.fork()
        if pids[0] == 0:
            os.close(end)
            TrainerLock(shared_path, "actor").take(0)
            os.write(tell, b"x")
            os.read(over, 1)
            os._exit(0)
        os.read(told, 1)
        os.close(over)
    dist.broadcast_object_list(pids, src=0)
    yield pids[0]
    if dist.get_rank() == 0:
        os.close(end)
        os.waitpid(pids[0], 0)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_the_second_trainer_is_refused_and_goes_on(how: str, shared_path: Path, another: int) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = manager_of(training, shared_path, async_save=how == "async")
        before = snapshot(training)
        for message in raised_everywhere(LockedError, error_of(lambda: manager.save(1).wait())):
            assert f"process {another} on" in message
            assert str(shared_path / LOCK) in message
        after = snapshot(training)
        with everywhere():
            assert_same(after, before)
            assert manager.latest_step() is None
            # Of another role nobody is in the way.
            assert [path.name for path in shared_path.iterdir()] == [LOCK]
        train(training, 1, 2)
        if dist.get_rank() == 0:
            os.kill(another, 9)
            os.waitid(os.P_PID, another, os.WEXITED | os.WNOWAIT)
        manager.save(2).wait()
        at_save = snapshot(training)
        poison(training)
        manager.load()
        found = snapshot(training)
        with everywhere():
            assert_same(found, at_save)
            assert json.loads((shared_path / LOCK).read_text())["pid"] != another
        dist.barrier()
        manager.close()
        dist.barrier()
        with everywhere():
            assert not (shared_path / LOCK).exists()


def test_a_reader_needs_no_place(shared_path: Path, another: int) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path, role="critic")
        manager.save(1).wait()
        reader = manager_of(training, shared_path, role="critic")
        result = reader.load()
        with everywhere():
            assert result.step == 1
            assert json.loads((shared_path / LOCK).read_text())["pid"] == another
        manager.close()
        reader.close()


def test_whose_place_was_taken_puts_nothing_in_place(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that was stopped for long, and another one elsewhere has come since: between its opening and its
    commit."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = manager_of(training, shared_path)
        manager.save(1).wait()
        finish = FileWriter.finish

        def finish_late(self: FileWriter) -> object:
            record = json.loads((shared_path / LOCK).read_text())
            (shared_path / LOCK).write_text(json.dumps(record | {"host": "node7 boot pid:[1]", "claim": "0"}))
            return finish(self)

        with monkeypatch.context() as patch:
            if dist.get_rank() == 0:
                patch.setattr(FileWriter, "finish", finish_late)
            messages = raised_everywhere(LockedError, error_of(lambda: manager.save(2).wait()))
        with everywhere():
            assert all("on node7 saves actor here" in message for message in messages)
            assert manager.latest_step() == 1
        dist.barrier()
        if dist.get_rank() == 0:
            (shared_path / LOCK).unlink()
        manager.save(3).wait()
        manager.close()
        with everywhere():
            assert manager.latest_step() == 3
