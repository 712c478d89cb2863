"""A step that another process deletes while it is loaded: left alone, or an error on all ranks, never torn."""

import errno
import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt import pin, set_metrics
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.load import load as loading
from mcore_ckpt.recover import recover
from mcore_ckpt.steps.listing import complete_steps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from mcore_ckpt.tools.examine.verify import verify
from tests.distributed.agreement import error_of, everywhere, gather, raised_everywhere
from tests.distributed.checkpointing import manager_of, position
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.test_fallback import SHARD, flip_a_bit, save_twice
from tests.distributed.training import build, parallel, train

DP2 = LAYOUTS["dp2-bf16"]


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.world(2)
@pytest.mark.parametrize("locks", ["locks", "no-locks"])
def test_a_step_that_is_deleted_while_it_is_loaded(
    shared_path: Path, locks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if locks == "no-locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    deleted: list[int] = []
    apply = loading.fill_together

    def late(*args: object, **options: object) -> int:
        """All ranks have their plans, none has read a tensor; another process has saved step 2 and keeps one."""
        if dist.get_rank() == 0:
            deleted.extend(delete_old_steps(shared_path, PreservationPolicy(1)))
        dist.barrier()
        return apply(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "fill_together", late)
    with parallel(DP2):
        training = build(DP2, seed=1)
        states = save_twice(training, shared_path)
        poison(training)
        manager = manager_of(training, shared_path)
        error = error_of(lambda: manager.load(step=1))
        found = snapshot(training)
        if locks == "locks":
            with everywhere():
                assert error is None
                assert deleted == []
                assert_same(found, states[0])
            # The training goes on from it, and has not saved since.
            assert gather(dist.get_rank() or delete_old_steps(shared_path, PreservationPolicy(1))) == [[], 1]
            manager.close()
            assert gather(dist.get_rank() or delete_old_steps(shared_path, PreservationPolicy(1))) == [[1], 1]
        else:
            assert gather(deleted) == [[1], []]
            for message in raised_everywhere(CheckpointCorruptError, error):
                assert "missing" in message
                assert "undefined" in message
            monkeypatch.setattr(loading, "fill_together", apply)
            result = manager.load()
            found = snapshot(training)
            with everywhere():
                assert result.step == 2
                assert_same(found, states[1])
        manager.close()


REWARDS = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.2, 5: float("nan")}


@pytest.mark.world(2)
@pytest.mark.parametrize("async_save", [False, True])
def test_the_best_steps_stay_and_lose_their_optimizer(shared_path: Path, async_save: bool) -> None:
    """Step 3 is measured only later, and becomes the best; 4 and 5 are the newest."""
    options = {"max_to_keep": 2, "keep_best": ("reward", 2, "max"), "optimizer_for_last": 1}
    with parallel(DP2):
        training, states = build(DP2, seed=1), {}
        manager = manager_of(training, shared_path, async_save=async_save, **options)
        for step, reward in REWARDS.items():
            train(training, step - 1, step)
            metrics = {"reward": reward, "rank": dist.get_rank()}
            manager.save(step, extra_state=position(step), metrics=metrics).wait()
            manager.wait()
            states[step] = snapshot(training)
            if step == 4 and dist.get_rank() == 0:
                set_metrics(shared_path, 3, {"reward": 2.0})
            dist.barrier()
        manager.close()
        with everywhere():
            there = {status.step: status for status in complete_steps(shared_path)}
            assert sorted(there) == [2, 3, 4, 5]
            assert there[3].metrics == {"reward": 2.0, "rank": 0.0}
            assert there[5].metrics == {"rank": 0.0}
            assert {step: sorted(status.dropped) for step, status in there.items()} == {
                2: ["optimizer"],
                3: ["optimizer"],
                4: ["optimizer"],
                5: [],
            }
            assert [path.parent.parent.name for path in shared_path.glob("*/actor/optim")] == ["global_steps_5"]
            assert not [role for role in verify(shared_path).roles if role.damages]
        manager = manager_of(training, shared_path)
        for message in raised_everywhere(CheckpointMismatchError, error_of(lambda: manager.load(step=2))):
            assert "retention has removed its optimizer" in message
        poison(training)
        result = manager.load()
        found = snapshot(training)
        manager.close()
        with everywhere():
            assert result.step == 5
            assert_same(found, states[5])
        poison(training)
        manager = manager_of(training, shared_path, load_contents=("model", "extra"))
        result = manager.load(step=2)
        found = snapshot(training)
        manager.close()
        with everywhere():
            assert result.extra_state["step"] == 2
            weights = {name: value for name, value in states[2].items() if not name.startswith(("optim", "sched"))}
            assert_same({name: found[name] for name in weights}, weights)


@pytest.mark.world(2)
def test_steps_without_an_optimizer_are_passed_over(shared_path: Path) -> None:
    """Step 4 is damaged, 3 and 2 have lost their optimizer, and 1 is pinned."""

    def recovering() -> object:
        return recover(manager)

    def cannot(call: Callable[[], object], error: type[Exception]) -> list[str]:
        return list(raised_everywhere(error, error_of(call)))

    with parallel(DP2):
        training, states = build(DP2, seed=1), {}
        manager = manager_of(training, shared_path, optimizer_for_last=1)
        for step in range(1, 5):
            train(training, step - 1, step)
            manager.save(step, extra_state=position(step))
            manager.wait()
            states[step] = snapshot(training)
            if step == 1:
                _on_rank_0(lambda: pin(shared_path, 1))
        dropped = {1: [], 2: ["optimizer"], 3: ["optimizer"], 4: []}
        with everywhere():  # rank 0 removes them
            there = complete_steps(shared_path)
            assert dist.get_rank() or {status.step: sorted(status.dropped) for status in there} == dropped
        _on_rank_0(lambda: flip_a_bit(shared_path / "global_steps_4" / SHARD))
        poison(training)
        recovery = recover(manager)
        found = snapshot(training)
        with everywhere():
            assert recovery.step == 1
            assert len(recovery.skipped) == 1
            assert_same(found, states[1])
        for message in cannot(lambda: recover(manager, 2), CheckpointMismatchError):
            assert "retention has removed its optimizer" in message
        poison(training)
        assert manager.load().step == 1
        found = snapshot(training)
        with everywhere():
            assert_same(found, states[1])
        _on_rank_0(lambda: flip_a_bit(shared_path / "global_steps_1" / SHARD))
        for message in cannot(manager.load, CheckpointCorruptError):
            assert f"not tried: {shared_path / 'global_steps_3'}" in message
            assert "older" not in message, "step 3 is newer than step 1, which was tried last"
        _on_rank_0(lambda: shutil.rmtree(shared_path / "global_steps_1"))
        for message in cannot(recovering, CheckpointCorruptError) + cannot(manager.load, CheckpointCorruptError):
            assert "wrong CRC" in message
            assert "global_steps_3: retention has removed its optimizer" in message
            assert "name this step, with load_contents=('model', 'extra')" in message
        _on_rank_0(lambda: (shared_path / "global_steps_4" / SHARD).unlink())
        for message in cannot(recovering, CheckpointMismatchError):
            assert "retention has removed its optimizer" in message
            assert "1 of its 8 files are missing or cut" in message
        for message in cannot(manager.load, CheckpointMismatchError):
            assert "newer, but not loaded either" in message
        _on_rank_0(lambda: shutil.rmtree(shared_path / "global_steps_4"))
        for message in cannot(recovering, CheckpointMismatchError):
            assert "retention has removed its optimizer" in message
        manager.close()
        manager = manager_of(training, shared_path, load_contents=("model", "extra"))
        assert recover(manager).step == 3
        manager.close()


def _on_rank_0(work: Callable[[], object]) -> None:
    with everywhere():
        if dist.get_rank() == 0:
            work()
