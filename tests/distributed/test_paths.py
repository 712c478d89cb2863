"""Saving to a folder that the trainer names, as verl, ROLL and AReaL do."""

from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CommitError
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.tiers import pairs
from tests.distributed.training import build, parallel, train

TRACKER = "latest_checkpointed_iteration.txt"
LAYOUT = LAYOUTS["dp2-bf16"]


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("name", "async_save"), pairs(("global_step_{}/actor", "global_step_{}", "checkpoint-{}/actor"), (False, True))
)
def test_a_step_by_another_name(name: str, async_save: bool, shared_path: Path) -> None:
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, shared_path, async_save=async_save)
        for step in (1, 2, 3):
            train(training, step, step + 1)
            wanted = snapshot(training)
            handle = manager.save(step, {"step": step}, path=shared_path / name.format(step), max_to_keep=2)
            handle.wait()
            manager.wait()
            dist.barrier()
            with everywhere():
                assert (shared_path / TRACKER).read_text() == str(step)
                assert handle.report.path == shared_path / name.format(step)
        with everywhere():
            kept = {path.parent.relative_to(shared_path) for path in shared_path.rglob("manifest.json")}
            assert kept == {Path(name.format(step)) for step in (2, 3)}
            assert manager.latest_step() == 3
        for asked in ({}, {"step": 3}, {"path": shared_path / name.format(3)}):
            poison(training)
            result = manager.load(**asked)  # type: ignore[arg-type]
            found = snapshot(training)
            with everywhere():
                assert (result.step, result.extra_state) == (3, {"step": 3})
                assert_same(found, wanted)
        manager.close()


@pytest.mark.world(2)
def test_a_folder_that_is_no_step_is_written_and_that_is_all(shared_path: Path) -> None:
    root, folder = shared_path / "steps", shared_path / "recover_checkpoint"
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, root, max_to_keep=1)
        manager.save(5).wait()
        for step in (1, 2):  # the second in the place of the first
            train(training, step, step + 1)
            wanted = snapshot(training)
            manager.save(step, path=folder).wait()
            dist.barrier()
        manager.wait()
        with everywhere():
            assert (root / TRACKER).read_text() == "5"
            assert not (shared_path / TRACKER).exists()
            assert {path.name for path in shared_path.iterdir()} == {"steps", "recover_checkpoint"}
        poison(training)
        result = manager.load(path=folder)
        found = snapshot(training)
        manager.close()
        with everywhere():
            assert result.step == 2
            assert_same(found, wanted)


@pytest.mark.world(2)
def test_paths_that_cannot_be_meant(shared_path: Path) -> None:
    root = shared_path / "steps"
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, root)
        for path, text in (
            (root, "is the folder of all steps, or above it"),
            (shared_path, "is the folder of all steps, or above it"),
            (root / "global_step_7" / "actor", "is a folder of step 7, not of step 8"),
            (root / "global_step_8" / "actor_best", "would be taken for a role: use actor"),
        ):
            with everywhere(), pytest.raises(ValueError, match=text):
                manager.save(8, path=path)
        with everywhere(), pytest.raises(ValueError, match="max_to_keep is 0"):
            manager.save(8, max_to_keep=0)
        manager.save(8, path=root / "global_step_8").wait()
        with everywhere(), pytest.raises(CommitError, match=r"step 8 is there already, as .*global_step_8"):
            manager.save(8)
        manager.save(8, path=root / "global_step_8").wait()
        manager.close()
        with everywhere():
            assert (root / TRACKER).read_text() == "8"
