"""A step is one unit, also when its roles are saved by programs that know nothing of each other."""

import logging
import os
from functools import partial
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.steps import commit, tracker
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from tests.support.checkpoints import make, read_version, remains, stage
from tests.support.role_program import run_together, save_role

BOTH = ("actor", "critic")


def versions(root: Path) -> dict[int, dict[str, int]]:
    """Of each complete step the version of each role, each read whole."""
    return {
        status.step: {role: read_version(status.path / role) for role in sorted(status.committed)}
        for status in steps.complete_steps(root)
    }


def both(*numbers: int) -> dict[int, dict[str, int]]:
    return {number: dict.fromkeys(BOTH, number) for number in numbers}


def test_roles_of_one_step_saved_by_several_programs_at_once(tmp_path: Path) -> None:
    """The tracker ends at the newest step, whoever came last, and nothing that one of them needs is deleted."""
    numbers = range(1, 13)
    run_together([partial(save_role, tmp_path, role, numbers, BOTH, 2) for role in BOTH])
    assert versions(tmp_path) == both(11, 12)
    assert tracker.read_tracker(tmp_path) == 12
    assert remains(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == ["global_steps_11", "global_steps_12", file_names.TRACKER_FILE]


def test_roles_that_are_units_of_their_own(tmp_path: Path) -> None:
    """One of them is far ahead: its retention must leave the other its newest steps, and those it is writing."""
    fast, slow = range(1, 25), range(1, 25, 4)
    run_together(
        [
            partial(save_role, tmp_path, "actor", fast, ("actor",), 1),
            partial(save_role, tmp_path, "critic", slow, ("critic",), 1),
        ]
    )
    found = versions(tmp_path)
    assert found[24]["actor"] == 24
    assert found[21]["critic"] == 21
    assert tracker.read_tracker(tmp_path) == 24
    assert remains(tmp_path) == []


def test_the_same_step_committed_by_all_at_once(tmp_path: Path) -> None:
    roles = ("actor", "critic", "ref", "reward")
    for number in (1, 2, 3):
        run_together([partial(save_role, tmp_path, role, [number], roles, 1) for role in roles])
        assert versions(tmp_path) == {number: dict.fromkeys(roles, number)}
        assert tracker.read_tracker(tmp_path) == number


def test_a_role_that_never_comes(tmp_path: Path) -> None:
    save_role(tmp_path, "critic", [1], BOTH, 1)
    save_role(tmp_path, "actor", [1, 2, 3], BOTH, 1)
    assert versions(tmp_path) == both(1)
    assert tracker.read_tracker(tmp_path) == 1
    assert [status.reason for status in steps.list_steps(tmp_path) if not status.is_complete] == [
        f"{file_names.step_dir(tmp_path, step)}: not committed by critic" for step in (2, 3)
    ]
    # It does not come for step 2, but for 3: what nobody can come back to goes.
    save_role(tmp_path, "critic", [3], BOTH, 1)
    assert versions(tmp_path) == both(3)
    assert tracker.read_tracker(tmp_path) == 3
    assert not file_names.step_dir(tmp_path, 2).exists()


def test_a_role_that_dies_between_its_seal_and_its_rename(tmp_path: Path) -> None:
    save_role(tmp_path, "actor", [1, 2], BOTH, None)
    save_role(tmp_path, "critic", [1], BOTH, None)
    staging, attempt = stage(file_names.step_dir(tmp_path, 2) / "critic", 2, BOTH)
    assert versions(tmp_path) == both(1)
    assert tracker.update_tracker(tmp_path) == 1
    commit.publish(staging, file_names.step_dir(tmp_path, 2) / "critic", attempt)
    assert versions(tmp_path) == both(1, 2)


def test_a_step_saved_again_by_one_role_stays_complete(tmp_path: Path) -> None:
    """After a rollback one role is there again before the other: the step is of both all the time."""
    save_role(tmp_path, "actor", [1, 2], BOTH, None)
    save_role(tmp_path, "critic", [1, 2], BOTH, None)
    make(file_names.step_dir(tmp_path, 2) / "actor", 22, BOTH)
    assert versions(tmp_path) == both(1) | {2: {"actor": 22, "critic": 2}}


def test_retention_of_one_role_waits_for_the_other_s_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The critic is writing step 1 for the second time; the actor is at step 3 already."""
    caplog.set_level(logging.INFO)
    for step in (1, 2, 3):
        for role in BOTH:
            make(file_names.step_dir(tmp_path, step) / role, step, BOTH)
    staging, attempt = stage(file_names.step_dir(tmp_path, 1) / "critic", 12, BOTH)
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [2]
    assert "step 1 is too old, but stays for now: a save is under way in it" in caplog.text
    commit.publish(staging, file_names.step_dir(tmp_path, 1) / "critic", attempt)
    assert versions(tmp_path) == both(3) | {1: {"actor": 1, "critic": 12}}
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]
