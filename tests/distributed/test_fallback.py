"""A block with a wrong CRC is never applied: all ranks take the next older checkpoint together, or say what is left."""

import random
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CheckpointCorruptError
from tests.distributed.agreement import error_of, everywhere, gather, raised_everywhere
from tests.distributed.checkpointing import manager_of, position, save
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.training import Training, build, parallel, train

DP2 = LAYOUTS["dp2-bf16"]
# Of rank 1 alone: rank 0 reads nothing that is bad.
SHARD = "actor/optim/distrib_optim_pp0_tp0_cp0_dp1.pt"


def flip_a_bit(path: Path) -> None:
    flip(path, 8 * (path.stat().st_size // 3))


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ (1 << bit % 8)]))


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
        error = error_of(lambda: manager.load(step=2 if how == "asked-for" else None))
        manager.close()
        for message in raised_everywhere(CheckpointCorruptError, error):
            assert "wrong CRC" in message
            assert "undefined" in message
            assert "rank 1" in message


@pytest.mark.world(2)
def test_damage_is_told_even_if_the_older_step_does_not_fit(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        for step, contents in ((1, ("model", "extra")), (2, ("model", "optimizer", "extra"))):
            save(training, shared_path, step, save_contents=contents)
        with everywhere():
            if dist.get_rank() == 0:
                flip_a_bit(shared_path / "global_steps_2" / "actor/optim/common.pt")
        manager = manager_of(training, shared_path)
        error = error_of(manager.load)
        manager.close()
        for message in raised_everywhere(CheckpointCorruptError, error):
            assert "Nothing has been changed" in message
            assert "newer, but not loaded either" in message
            assert "common.pt" in message


@pytest.mark.world(2)
def test_all_is_read_before_anything_changes(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        states = save_twice(training, shared_path)
        with everywhere():
            if dist.get_rank() == 0:
                flip_a_bit(shared_path / "global_steps_2" / SHARD)
        manager = manager_of(training, shared_path)
        train(training, 2, 3)
        before = snapshot(training)
        error = error_of(lambda: manager.load(step=2, verify="full"))
        found = snapshot(training)
        for message in raised_everywhere(CheckpointCorruptError, error):
            assert SHARD in message
            assert "tensor" in message
            assert "Nothing has been changed" in message
        with everywhere():
            assert_same(found, before)
        poison(training)
        result = manager.load(verify="full")
        manager.close()
        found = snapshot(training)
        with everywhere():
            assert (result.step, len(result.report.skipped)) == (1, 1)
            assert_same(found, states[0])


@pytest.mark.world(2)
def test_what_is_not_to_be_checked_is_not(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        save_twice(training, shared_path)
        with everywhere():
            if dist.get_rank() == 0:
                flip_a_bit(shared_path / "global_steps_2" / SHARD)
        poison(training)
        manager = manager_of(training, shared_path)
        result = manager.load(verify="off")
        manager.close()
        with everywhere():
            assert (result.step, result.report.skipped) == (2, ())


@pytest.mark.world(2)
def test_no_flipped_bit_is_applied(shared_path: Path) -> None:
    """Its file is named, or it is in bytes that loading does not look at; what is loaded is right in both cases."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        states = save_twice(training, shared_path)
        files = sorted(path for path in (shared_path / "global_steps_2").rglob("*") if path.is_file())
        generator = random.Random(6)
        manager = manager_of(training, shared_path)
        found = []
        for _ in range(40):
            path = generator.choice(files)
            bit = generator.randrange(8 * path.stat().st_size)
            dist.barrier()
            with everywhere():
                if dist.get_rank() == 0:
                    flip(path, bit)
            poison(training)
            result = manager.load()
            loaded = snapshot(training)
            with everywhere():
                assert_same(loaded, states[result.step - 1])
                assert all(path.name in reason for reason in result.report.skipped)
                assert len(result.report.skipped) == 2 - result.step
                if dist.get_rank() == 0:
                    flip(path, bit)
            found.append(result.step == 1)
        manager.close()
        assert sum(found) > 20, "most bits are of tensors"
