"""Saves that end beside the training: what they hold up, and how their failures reach every rank."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointManager, FastTier, SaveHandle
from mcore_ckpt.errors import BusyError, CommitError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.events import Event, Skipped, Started
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.save.guards import changing_methods
from mcore_ckpt.schedule import Frequency, Schedule, alone
from mcore_ckpt.steps import complete_steps
from tests.distributed.agreement import error_of, everywhere, gather, raised_everywhere
from tests.distributed.checkpointing import assert_loads, manager_of
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, chained, snapshot
from tests.distributed.training import Training, build, parallel, train

DP2 = LAYOUTS["dp2-bf16"]

pytestmark = pytest.mark.world(2)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, rank: int) -> Iterator[None]:
    """On one rank, no save gets its bytes to the disk in here."""
    gate = threading.Event()
    finish = FileWriter.finish

    def wait_and_finish(writer: FileWriter) -> Any:
        assert gate.wait(60)
        return finish(writer)

    with monkeypatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(FileWriter, "finish", wait_and_finish)
        try:
            yield
        finally:
            gate.set()


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, rank: int) -> Iterator[None]:
    def fail(writer: FileWriter) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/disk")

    with monkeypatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(FileWriter, "finish", fail)
        yield


def start(training: Training, root: Path, **config: Any) -> CheckpointManager:
    return manager_of(training, root, async_save=True, **config)


def failed_save(training: Training, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> SaveHandle:
    """A save of step 2 that fails on rank 1 while training goes on."""
    with full_disk(monkeypatch, rank=1):
        handle = manager.save(2)
        train(training, 2, 3)
        # Not by waiting for it, which would tell the trainer.
        assert handle._ended.wait(60)
    return handle


def test_training_goes_on_while_a_save_is_under_way(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = start(training, shared_path)
        at_save = snapshot(training)
        with held_up(monkeypatch, rank=1):
            handle = manager.save(1)
            train(training, 1, 3)
            with everywhere():
                assert not handle.done
                assert (handle.committed, handle.exception, handle.report) == (False, None, None)
                with pytest.raises(TimeoutError):
                    handle.wait(0.01)
                assert manager.latest_step() is None
        report = handle.wait()
        with everywhere():
            assert handle.committed
            assert handle.done
            assert handle.report is report
            assert handle.progress[0] == handle.progress[1] > 0
            assert report.nbytes > 0
            assert 0 < report.stall_s < report.seconds
            assert report.copy_gb_per_s > 0
            assert report.disk_gb_per_s > 0
            assert report.commit_s > 0
            assert manager.latest_step() == 1
        assert_loads(manager, training, at_save)
        manager.close()


def test_a_second_save_waits_for_the_first(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = start(training, shared_path)
        handles = []
        for step in range(1, 5):
            train(training, step - 1, step)
            handles.append(manager.save(step))
            with everywhere():
                assert all(handle.committed for handle in handles[:-1])
        manager.close()
        with everywhere():
            assert handles[-1].committed
            assert sorted(path.name for path in shared_path.glob("global_steps_*")) == [
                f"global_steps_{step}" for step in range(1, 5)
            ]


def test_a_second_save_raises_on_every_rank_though_one_is_busy(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = start(training, shared_path, if_busy="raise", shared_writes=False)
        with held_up(monkeypatch, rank=1):
            first = manager.save(1)
            messages = raised_everywhere(BusyError, error_of(lambda: manager.save(2)))
            assert all("step 2" in text and "rank" in text for text in messages)
        first.wait()
        dist.barrier()
        manager.wait()
        manager.save(3).wait()
        manager.close()
        with everywhere():
            assert sorted(path.name for path in shared_path.glob("global_steps_*")) == [
                "global_steps_1",
                "global_steps_3",
            ]


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_save_is_skipped_on_every_rank_though_one_is_busy(
    is_fast: bool, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[Event] = []
    fast = FastTier(shared_path / "node", replicas=0, durable_every=None) if is_fast else None
    root = shared_path / ("node" if is_fast else "root")
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        config = {"if_busy": "skip", "shared_writes": False, "fast": fast, "listeners": [got.append]}
        manager = start(training, shared_path / "root", **config)
        schedule = Schedule(Frequency(steps=1))
        with held_up(monkeypatch, rank=1):
            first = manager.save(1)
            assert schedule.due(agree=manager.agree)
            second = manager.save(2)
            schedule.saved(second)
            report = second.wait()
        reasons = gather(second.skipped)
        with everywhere():
            assert reasons[0] == reasons[1] is not None
            assert "rank" in reasons[0]
            assert (second.committed, second.report, second.exception, second.done) == (False, None, None, True)
            assert (report.step, report.nbytes, second.progress) == (2, 0, (0, 0))
            assert schedule.state_dict()["steps"] == 1
            assert first.skipped is None
            assert first.wait().nbytes
        manager.wait()
        manager.save(3).wait()
        manager.close()
        with everywhere():
            assert sorted(each.step for each in complete_steps(root)) == [1, 3]
            of_second = [event for event in got if event.step == 2]
            assert [type(event) for event in of_second] == [Started, Skipped]
            assert of_second[1].reason == second.skipped


@pytest.mark.parametrize("frequency", [Frequency(steps=1, minutes=5), Frequency(steps=1, continuous=True)], ids=str)
def test_ranks_do_not_each_save_by_their_own_clock(frequency: Frequency) -> None:
    schedule = Schedule(frequency)
    with everywhere():
        with pytest.raises(InvalidArgumentError, match=r"each of the 2 ranks .* due\(agree=manager\.agree\)"):
            schedule.due()
        assert schedule.state_dict()["steps"] == 0
        assert schedule.due(agree=alone)
        assert Schedule(Frequency(steps=1)).due()


@pytest.mark.parametrize("call", ["save", "load", "wait", "close"])
def test_a_failure_is_raised_by_the_next_call_on_every_rank(
    call: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = start(training, shared_path)
        manager.save(1).wait()
        train(training, 1, 2)
        handle = failed_save(training, manager, monkeypatch)
        with everywhere():
            assert not handle.committed
            assert isinstance(handle.exception, CommitError)
        calls = {"save": lambda: manager.save(3), "load": manager.load, "wait": manager.wait, "close": manager.close}
        before = snapshot(training)
        messages = raised_everywhere(CommitError, error_of(calls[call]))
        assert all("earlier save" in text and "rank 1" in text and "/full/disk" in text for text in messages)
        after = snapshot(training)
        with everywhere():
            assert_same(after, before)
            assert [path.name for path in shared_path.glob("global_steps_*")] == ["global_steps_1"]
        if call != "close":
            train(training, 3, 4)
            manager.save(4).wait()  # told once, it is over
            manager.close()
            with everywhere():
                assert (shared_path / "global_steps_4" / "actor" / "manifest.json").exists()


def test_a_failure_that_one_rank_has_seen_is_still_raised_on_all(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that looks at the handle on rank 0 alone must not fall out of step."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 2)
        manager = start(training, shared_path)
        handle = failed_save(training, manager, monkeypatch)
        if dist.get_rank() == 0:
            with pytest.raises(CommitError):
                handle.wait()
        raised_everywhere(CommitError, error_of(lambda: manager.save(3)))
        manager.save(4).wait()
        manager.close()


def test_training_goes_on_after_a_failure_if_the_user_says_so(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 2)
        manager = start(training, shared_path, if_failed="warn")
        failed_save(training, manager, monkeypatch)
        manager.save(3).wait()
        manager.close()
        with everywhere():
            assert (shared_path / "global_steps_3" / "actor" / "manifest.json").exists()
            assert "training continues without this checkpoint" in caplog.text
            assert "rank 1" in caplog.text


def test_what_one_rank_cannot_save_is_refused_before_training_goes_on(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = start(training, shared_path)
        extra = {"bad": object()} if dist.get_rank() == 1 else {"good": 1}
        messages = raised_everywhere(UnsupportedError, error_of(lambda: manager.save(1, extra)))
        assert all("extra_state['bad']" in text for text in messages)
        manager.save(2, {"good": 1}).wait()
        manager.close()


def test_a_load_waits_for_the_save_under_way(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = start(training, shared_path)
        at_save = snapshot(training)
        handle = manager.save(1)
        train(training, 1, 2)
        result = manager.load()
        loaded = snapshot(training)
        with everywhere():
            assert handle.committed
            assert result.step == 1
            assert_same(loaded, at_save)
        manager.close()


def test_a_closed_manager_gives_back_the_methods_that_it_guarded(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU there is nothing to guard, so this says that there is. Nothing is saved."""
    monkeypatch.setattr("mcore_ckpt.manager.methods_to_delay", changing_methods)
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = start(training, shared_path, async_mode="lazy")
        with everywhere():
            assert "step" in vars(training.optimizer)
        manager.close()
        with everywhere():
            assert "step" not in vars(training.optimizer)
            assert all("start_param_sync" not in vars(chunk) for chunk in training.model)


def test_all_replicas_write_a_part_of_each_replicated_file(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[str, int, int]] = []
    begin = FileWriter.start

    def record(writer: FileWriter) -> None:
        ranges.extend((w.plan.request.path, w.plan.start, w.plan.stop) for w in writer._writes)
        begin(writer)

    monkeypatch.setattr(FileWriter, "start", record)
    layout = LAYOUTS["dp2-bf16-replicated"]
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        for shared in (True, False):
            ranges.clear()
            manager = manager_of(training, shared_path / str(shared), shared_writes=shared)
            manager.save(1)
            manager.close()
            by_rank = gather(ranges)
            model = [[r for r in mine if r[0].startswith("model/")] for mine in by_rank]
            optimizer = [[r for r in mine if r[0].endswith("cp0_dp0.pt")] for mine in by_rank]
            for both in (model, optimizer):
                assert [len(mine) for mine in both] == ([1, 1] if shared else [1, 0])
                if shared:
                    (_, start, stop), (_, other_start, other_stop) = both[0][0], both[1][0]
                    # Rank 0 owns the file, so it has the end, where the index goes.
                    assert (other_start, other_stop) == (0, start)
                    assert 0.4 < (stop - start) / stop < 0.6


@pytest.mark.parametrize(
    "name", ["dp2-bf16-replicated", pytest.param("dp2-fp32-replicated", marks=pytest.mark.full), "dp2-bf16"]
)
def test_what_load_state_dict_puts_in_place_is_saved(name: str, shared_path: Path) -> None:
    """The plan of the first save must not outlive the optimizer's state that it was made for."""
    layout = LAYOUTS[name]
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        manager = start(training, shared_path)
        manager.save(1)
        for optimizer in chained(training.optimizer):
            optimizer.optimizer.load_state_dict(optimizer.optimizer.state_dict())
        train(training, 1, 3)
        manager.save(3)
        at_save = snapshot(training)
        assert_loads(manager, training, at_save)
        manager.close()


def test_an_offloaded_model_is_refused_by_name(shared_path: Path) -> None:
    """Its tensors keep their shapes, but their addresses are nobody's."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = start(training, shared_path)
        manager.save(1).wait()
        # As _ParamAndGradBuffer.offload_to_cpu (0.16.1) does, which needs a GPU to copy from.
        data = [buffer.param_data for chunk in training.model for buffer in chunk.buffers]
        kept = [(tensor.clone(), tensor.untyped_storage().nbytes()) for tensor in data]
        for tensor in data:
            tensor.untyped_storage().resize_(0)
        messages = raised_everywhere(UnsupportedError, error_of(lambda: manager.save(2)))
        assert all("has no memory" in text for text in messages)
        for tensor, (copy, nbytes) in zip(data, kept, strict=True):
            tensor.untyped_storage().resize_(nbytes)
            tensor.copy_(copy)
        manager.save(3).wait()
        manager.close()


def offload(training: Training, of: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As verl's `offload_megatron_model_to_cpu` (0.9.1) and megatron's `offload_to_cpu` (0.16.1) do, without a GPU.

    Returns the buffers, and what was in them.
    """
    kept = []
    for buffer in (buffer for chunk in training.model for buffer in chunk.buffers):
        data = buffer.param_data
        kept.append((data, data.clone()))
        if of == "verl":
            data.cpu_data = data.clone()
        else:
            buffer.param_data_cpu = data.clone()
        data.untyped_storage().resize_(0)
    return kept


# In fp32 the main parameters are offloaded with the model's.
@pytest.mark.parametrize(
    ("of", "layout", "async_save"), [("verl", "dp2-bf16", True), ("megatron", "dp2-buckets", False)]
)
def test_an_offloaded_model_is_saved_from_host_memory(
    of: str, layout: str, async_save: bool, shared_path: Path
) -> None:
    with parallel(LAYOUTS[layout]):
        training = build(LAYOUTS[layout], seed=1)
        train(training, 0, 1)
        manager = manager_of(training, shared_path, async_save=async_save)
        manager.save(1)
        train(training, 1, 2)
        at_save = snapshot(training)
        kept = offload(training, of)
        manager.save(2)
        for data, copy in kept:
            with everywhere():
                assert data.untyped_storage().nbytes() == 0
            data.untyped_storage().resize_(copy.nbytes)
            data.copy_(copy)
        # The copies are still there, and old.
        train(training, 2, 3)
        after = snapshot(training)
        manager.save(3)
        for step, wanted in ((2, at_save), (3, after)):
            assert_loads(manager, training, wanted, step=step)
        manager.close()


def test_offloaded_parameters_that_other_ranks_have_not_sent_yet_are_refused(shared_path: Path) -> None:
    layout = LAYOUTS["dp2-overlap"]
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        manager = start(training, shared_path)
        kept = offload(training, "verl")
        messages = raised_everywhere(UnsupportedError, error_of(lambda: manager.save(1)))
        assert all("overlap_param_gather" in text for text in messages)
        for data, copy in kept:
            data.untyped_storage().resize_(copy.nbytes)
            data.copy_(copy)
        manager.save(2).wait()
        manager.close()
