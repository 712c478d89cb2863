"""A block with a wrong CRC is never applied: all ranks take the next older checkpoint together, or say what is left."""

from pathlib import Path

import pytest
import torch.distributed as dist
from agreement import everywhere, gather, raised_everywhere
from checkpointing import manager_of, position
from layouts import LAYOUTS
from snapshot import assert_same, poison, snapshot
from training import Training, build, parallel, train

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError

DP2 = LAYOUTS["dp2-bf16"]
# Of rank 1 alone: rank 0 reads nothing that is bad.
SHARD = "actor/optim/distrib_optim_pp0_tp0_cp0_dp1.pt"


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 3)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def save_twice(training: Training, root: Path) -> list[dict]:
    states = []
    manager = manager_of(training, root)
    for step in (1, 2):
        train(training, step - 1, step)
        manager.save(step, extra_state=position(step)).wait()
        states.append(snapshot(training))
    manager.close()
    return states


@pytest.mark.world(2)
def test_older_checkpoint_is_taken_by_all_ranks(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        states = save_twice(training, shared_path)
        with everywhere():
            if dist.get_rank() == 0:
                flip_a_bit(shared_path / "global_steps_2" / SHARD)
        poison(training)
        manager = manager_of(training, shared_path)
        result = manager.load()
        manager.close()
        found = snapshot(training)
        with everywhere():
            assert result.step == 1
            assert_same(found, states[0])
            (reason,) = result.report.skipped
            assert SHARD in reason
            assert "rank 1" in reason
            assert "wrong CRC" in reason
        assert gather(result.extra_state["step"]) == [1, 1]


@pytest.mark.world(2)
@pytest.mark.parametrize("how", ["asked-for", "strict", "all-bad"])
def test_nothing_else_to_take(how: str, shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        save_twice(training, shared_path)
        with everywhere():
            if dist.get_rank() == 0:
                for step in (1, 2) if how == "all-bad" else (2,):
                    flip_a_bit(shared_path / f"global_steps_{step}" / SHARD)
        manager = manager_of(training, shared_path, strict=how == "strict")
        error = None
        try:
            manager.load(step=2 if how == "asked-for" else None)
        except CheckpointError as raised:
            error = raised
        manager.close()
        for message in raised_everywhere(CheckpointCorruptError, error):
            assert "wrong CRC" in message
            assert "undefined" in message
            assert "rank 1" in message
