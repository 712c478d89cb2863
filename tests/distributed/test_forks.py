"""A training that goes on in a fork does so bit for bit, whatever happens to the folder that the step came from."""

from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.steps.listing import list_steps
from mcore_ckpt.steps.retention import delete_step
from mcore_ckpt.tools.examine.verify import verify
from mcore_ckpt.tools.maintain.branch import branch
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, position, save
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.training import build, parallel, train


@pytest.mark.world(2)
def test_a_fork_goes_on_bit_for_bit_without_the_old_step(shared_path: Path) -> None:
    """Each run overwrites and deletes its own steps, and the other one can be loaded and verified."""
    layout, old, new = LAYOUTS["dp2-bf16"], shared_path / "old", shared_path / "new"
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, 2)
        save(first, old, 2)
        at_save = snapshot(first)
        if dist.get_rank() == 0:
            branch(old, 2, new)
        dist.barrier()
        reference = train(first, 2, 4)
        save(first, old, 4, max_to_keep=1)  # deletes step 2 while or after it is loaded from the fork
        if dist.get_rank() == 0:
            for status in list_steps(old, 2):
                assert delete_step(status) is None
        dist.barrier()

        second = build(layout, seed=2)
        poison(second)
        manager = manager_of(second, new, max_to_keep=1)
        result = manager.load()
        loaded = snapshot(second)
        resumed = train(second, 2, 4)
        manager.save(3, extra_state=position(3)).wait()
        manager.save(4, extra_state=position(4)).wait()
        manager.close()
        dist.barrier()  # rank 0 deletes the old step, and only its `close` waits for that
        with everywhere():
            assert result.step == 2
            assert repr(result.extra_state) == repr(position(2))
            assert_same(loaded, at_save)
            assert resumed == reference
            assert [status.step for status in list_steps(new)] == [4]
            assert [status.step for status in list_steps(old)] == [4]
            assert verify(old).is_sound
            assert verify(new).is_sound
