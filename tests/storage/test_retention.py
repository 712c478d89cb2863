"""Which steps may go, and that nothing else goes with them."""

import os
import shutil
from pathlib import Path

import pytest
from checkpoints import ROLE, Crash, checkpoints, crash, dead_owner, make, own, read_version, remains, stage

from mcore_ckpt import layout
from mcore_ckpt.storage import commit
from mcore_ckpt.storage.retention import Policy, delete_old_steps


def test_retention_counts_what_is_on_disk(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, Policy(2)) == [1, 2]
    assert checkpoints(tmp_path) == {3: 3, 10: 10}
    assert delete_old_steps(tmp_path, Policy(2)) == []
    assert sorted(os.listdir(tmp_path)) == ["global_steps_10", "global_steps_3"]


def test_retention_keeps_what_is_not_of_ours(tmp_path: Path) -> None:
    foreign = tmp_path / "global_step_7" / "actor"
    foreign.mkdir(parents=True)
    (foreign / "model_world_size_8_rank_0.pt").write_bytes(b"of verl")
    (tmp_path / "global_steps_8").mkdir()
    (tmp_path / "iter_0000001").mkdir()
    for step in (9, 10, 11):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, Policy(1)) == [9, 10]
    assert (foreign / "model_world_size_8_rank_0.pt").read_bytes() == b"of verl"
    assert sorted(os.listdir(tmp_path)) == ["global_step_7", "global_steps_11", "global_steps_8", "iter_0000001"]


def test_retention_does_not_count_incomplete_steps(tmp_path: Path) -> None:
    """Else the last one to come back to might go."""
    make(layout.step_dir(tmp_path, 1) / ROLE, 1)
    make(layout.step_dir(tmp_path, 2) / ROLE, 2, ("actor", "critic"))
    make(layout.step_dir(tmp_path, 3) / ROLE, 3)
    make(layout.step_dir(tmp_path, 4) / ROLE, 4, ("actor", "critic"))
    (layout.step_dir(tmp_path, 5) / ROLE).mkdir(parents=True)
    assert delete_old_steps(tmp_path, Policy(2)) == []
    assert delete_old_steps(tmp_path, Policy(1)) == [1, 2]
    assert checkpoints(tmp_path) == {3: 3}
    assert layout.step_dir(tmp_path, 4).is_dir()


def test_retention_keeps_a_step_that_a_role_is_saving(tmp_path: Path) -> None:
    """A role that is behind: its folder must not go from under its hands."""
    staging, attempt = stage(layout.step_dir(tmp_path, 1) / "critic", 4)
    for step in (2, 3):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, Policy(1)) == [2]
    commit.publish(staging, layout.step_dir(tmp_path, 1) / "critic", attempt)
    assert read_version(layout.step_dir(tmp_path, 1) / "critic") == 4


def test_a_crash_while_a_step_is_deleted(tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(Crash):
            delete_old_steps(tmp_path, Policy(1))
    assert checkpoints(tmp_path) == {2: 2}
    (deleted,) = [path for path in tmp_path.iterdir() if layout.is_deleted_dir(path.name)]
    commit.sweep(tmp_path, ROLE, alone=False)
    assert deleted.exists(), "its owner lives, and may still put it back"
    own(deleted, dead_owner(dead_pid))
    commit.sweep(tmp_path, ROLE, alone=False)
    assert remains(tmp_path) == []


def test_the_step_just_saved_stays_after_a_rollback(tmp_path: Path) -> None:
    for step in (60, 100):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert delete_old_steps(tmp_path, Policy(1), committed=60) == []
    assert checkpoints(tmp_path) == {60: 60, 100: 100}


def test_a_role_s_retention_leaves_another_role_its_newest(tmp_path: Path) -> None:
    for step in (8, 9):
        for role in (ROLE, "critic"):
            make(layout.step_dir(tmp_path, step) / role, step, roles=(role,))
    make(layout.step_dir(tmp_path, 10) / ROLE, 10, roles=(ROLE,))
    assert delete_old_steps(tmp_path, Policy(1), committed=10) == [8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_steps_10", "global_steps_9"]
