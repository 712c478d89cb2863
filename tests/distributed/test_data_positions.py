"""Data positions belong to data-parallel ranks: their replicas must have the same, and get the same back."""

from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt import SampleShare, ShardedPosition
from mcore_ckpt.errors import CommitError
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import manager_of
from tests.distributed.layouts import LAYOUTS
from tests.distributed.training import build, parallel


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ["tp2", "pp2-tied-bf16", "cp2"])
def test_replicas_with_different_positions_are_refused(name: str, shared_path: Path) -> None:
    with parallel(LAYOUTS[name]):
        training = build(LAYOUTS[name], seed=1)
        manager = manager_of(training, shared_path)
        wrong = ShardedPosition.of_consumed(10 + dist.get_rank())
        (said, _) = raised_everywhere(
            CommitError, error_of(lambda: manager.save(1, extra_state={"data": wrong}).wait())
        )
        with everywhere():
            assert "extra_state['data']: ranks 0 and 1 are the same data-parallel rank, 0" in said
        share = ShardedPosition.of_share(SampleShare(0, 1).after(3))
        manager.save(2, extra_state={"data": share, "own": dist.get_rank()}).wait()
        extra = manager.load().extra_state
        manager.close()
        with everywhere():
            assert extra is not None
            assert extra["own"] == dist.get_rank()
            assert next(extra["data"].for_rank().samples()) == 3


@pytest.mark.world(2)
def test_a_position_that_only_some_replicas_have(shared_path: Path) -> None:
    """As with Megatron, where only the first tensor-parallel rank reads data."""
    with parallel(LAYOUTS["tp2"]):
        training = build(LAYOUTS["tp2"], seed=1)
        manager = manager_of(training, shared_path)
        own = {"data": ShardedPosition.of_consumed(5)} if dist.get_rank() == 0 else {"none": 1}
        manager.save(1, extra_state=own).wait()
        extra = manager.load().extra_state
        manager.close()
        with everywhere():
            assert extra is not None
            assert extra.keys() == own.keys()
