"""A step that another process deletes while it is loaded: left alone, or an error on all ranks, never torn."""

import errno
import fcntl
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.load import load as loading
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from tests.distributed.agreement import error_of, everywhere, gather, raised_everywhere
from tests.distributed.checkpointing import manager_of
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.test_fallback import save_twice
from tests.distributed.training import build, parallel

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
