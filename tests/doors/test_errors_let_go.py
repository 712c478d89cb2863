"""An error that was raised keeps nothing of its callers alive, such as the tensors of a training on a full GPU."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.io.disk_watch import DiskWatch
from mcore_ckpt.ranks.rounds import Agreement, decide, done_before
from mcore_ckpt.save.rank_files import RankFiles
from tests.doors.test_runs import Training
from tests.support.unsharded_model import Model
from tests.support.waiting import LONG_S


class Held:
    """What a caller has."""


def fails(call: Callable[[], object]) -> "weakref.ref[Held]":
    held = Held()
    with pytest.raises(CheckpointError):
        call()
    return weakref.ref(held)


def test_work_on_another_thread_keeps_no_error() -> None:
    """Nor may it take a collection of garbage: the next try needs the GPU's memory now."""
    agreement = Agreement(dist.HashStore(), 0, 1, "test", 10.0)  # type: ignore[attr-defined]
    agreement.runner = DiskWatch(10.0)

    def fail() -> None:
        raise CheckpointError("damaged")

    def decided() -> None:
        decide(agreement, "loading", done_before(agreement, fail).record, lambda _: {})

    gc.disable()
    try:
        for call in (lambda: agreement.runner.run(fail), decided):
            assert fails(call)() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handle_keeps_neither_the_manager_nor_the_state(is_async: bool, tmp_path: Path) -> None:
    training = Training(tmp_path / "run", async_save=is_async)
    handle = training.manager.save(1)
    handle.wait()
    context = weakref.ref(training.manager._context)
    training.close()
    del training
    gc.collect()
    assert context() is None
    assert handle.committed


def test_a_save_under_way_keeps_no_extra_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = RankFiles.write
    monkeypatch.setattr(RankFiles, "write", lambda *args, **kwargs: may_write.wait(LONG_S) and write(*args, **kwargs))
    config = CheckpointConfig(save_contents=("model", "extra"), async_save=True)
    manager = CheckpointManager(tmp_path, Model(), config=config)

    seen = torch.zeros(3)
    handle = manager.save(1, extra_state={"seen": seen})
    kept = weakref.ref(seen)
    del seen
    gc.collect()
    assert kept() is None
    may_write.set()
    handle.wait(LONG_S)
    manager.close()


@pytest.mark.parametrize("name", ["load", "save", "async save"])
def test_a_manager_forgets_what_has_failed(name: str, tmp_path: Path) -> None:
    training = Training(tmp_path / "run", async_save=name == "async save").save(1)
    (tmp_path / "run" / "global_steps_2").write_text("a file where a folder has to be")
    calls = {
        "load": lambda: training.manager.load(step=9),
        "save": lambda: training.manager.save(2),
        "async save": lambda: training.manager.save(2).wait(),
    }
    held = fails(calls[name])
    gc.collect()
    assert held() is None
    training.close()
