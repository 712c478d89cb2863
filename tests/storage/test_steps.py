"""Which steps count, the tracker that names the newest, and which steps may go."""

import os
import shutil
from pathlib import Path

import pytest
from checkpoints import (
    ATTEMPT,
    ROLE,
    Crash,
    alone_in_the_world,
    checkpoints,
    crash,
    make,
    read_version,
    remains,
    save_together,
    stage,
)

from mcore_ckpt import layout
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage import commit, steps

# -- which steps count ------------------------------------------------------------------------------------


def test_a_step_counts_when_all_declared_roles_have_committed(tmp_path: Path) -> None:
    roles = ("actor", "critic", "reward")
    for number, role in enumerate(roles):
        assert steps.complete_steps(tmp_path) == []
        assert steps.update_tracker(tmp_path) is None
        make(layout.step_dir(tmp_path, 7) / role, number, roles)
    (status,) = steps.complete_steps(tmp_path)
    assert (status.step, status.committed) == (7, frozenset(roles))
    assert steps.update_tracker(tmp_path) == 7


def test_an_incomplete_step_says_who_is_missing(tmp_path: Path) -> None:
    make(layout.step_dir(tmp_path, 7) / "actor", 3, ("actor", "critic"))
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert "not committed by critic" in status.reason


def test_any_manifest_s_roles_are_declared(tmp_path: Path) -> None:
    make(layout.step_dir(tmp_path, 7) / "actor", 3, ("actor",))
    make(layout.step_dir(tmp_path, 7) / "critic", 4, ("actor", "critic", "ref"))
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert "ref" in status.reason


def test_a_folder_under_another_name_does_not_count(tmp_path: Path) -> None:
    make(layout.step_dir(tmp_path, 7) / "actor", 3)
    shutil.copytree(layout.step_dir(tmp_path, 7), layout.step_dir(tmp_path, 8))
    shutil.copytree(layout.step_dir(tmp_path, 7) / "actor", layout.step_dir(tmp_path, 9) / "critic")
    assert checkpoints(tmp_path) == {7: 3}
    assert "its manifest is of actor at step 7" in steps.list_steps(tmp_path)[1].reason


def test_a_damaged_manifest_does_not_count(role_dir: Path) -> None:
    make(role_dir, 3)
    path = role_dir / layout.MANIFEST_FILE
    data = path.read_bytes()
    assert steps.complete_steps(role_dir.parent.parent)
    path.write_bytes(data[: len(data) // 2])
    assert steps.complete_steps(role_dir.parent.parent) == []
    assert str(path) in steps.list_steps(role_dir.parent.parent)[0].reason


def test_a_manifest_of_a_newer_format_does_not_count_and_says_so(role_dir: Path) -> None:
    make(role_dir, 3)
    manifest = b'{"format":"mcore_ckpt","format_version":12,"files":"in another form"}'
    (role_dir / layout.MANIFEST_FILE).write_bytes(manifest)
    (status,) = steps.list_steps(role_dir.parent.parent)
    assert not status.is_complete
    assert str(role_dir / layout.MANIFEST_FILE) in status.reason
    assert "format version 12 is newer than 1" in status.reason
    assert "upgrade" in status.reason


def test_the_other_spelling_of_a_step(tmp_path: Path) -> None:
    make(tmp_path / "global_step_7" / ROLE, 3)
    make(layout.step_dir(tmp_path, 5) / ROLE, 2)
    assert checkpoints(tmp_path) == {5: 2, 7: 3}
    assert steps.update_tracker(tmp_path) == 7
    # Of two, the one that is complete.
    (layout.step_dir(tmp_path, 7) / ROLE).mkdir(parents=True)
    assert checkpoints(tmp_path) == {5: 2, 7: 3}


# -- the tracker ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\n", b"release", b"-7", b"7.0", b"7 8", b"1" * 30, b"\xff", b"\xd9\xa7"])
def test_a_tracker_of_garbage_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / layout.TRACKER_FILE).write_bytes(content)
    assert steps.read_tracker(tmp_path) is None
    make(layout.step_dir(tmp_path, 7) / ROLE, 3)
    assert steps.update_tracker(tmp_path) == 7
    assert (tmp_path / layout.TRACKER_FILE).read_bytes() == b"7"


def test_no_tracker(tmp_path: Path) -> None:
    assert steps.read_tracker(tmp_path) is None
    assert steps.update_tracker(tmp_path) is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"12", b"12\n"])
def test_a_tracker_that_disagrees_is_a_hint(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / layout.TRACKER_FILE).write_bytes(content)
    assert steps.read_tracker(tmp_path) == 12
    make(layout.step_dir(tmp_path, 7) / ROLE, 3)
    steps.warn_if_tracker_differs(tmp_path, 7)
    assert "names step 12, but the newest complete step is 7" in caplog.text
    assert "load(step=12)" in caplog.text


def test_a_crash_while_the_tracker_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(layout.step_dir(tmp_path, 7) / ROLE, 3)
    steps.update_tracker(tmp_path)
    make(layout.step_dir(tmp_path, 8) / ROLE, 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: crash())
        with pytest.raises(Crash):
            steps.update_tracker(tmp_path)
    assert steps.read_tracker(tmp_path) == 7
    assert steps.update_tracker(tmp_path) == 8
    assert steps.read_tracker(tmp_path) == 8


# -- retention --------------------------------------------------------------------------------------------


def test_retention_counts_what_is_on_disk(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert steps.delete_old_steps(tmp_path, 2, ATTEMPT) == [1, 2]
    assert checkpoints(tmp_path) == {3: 3, 10: 10}
    assert steps.delete_old_steps(tmp_path, 2, ATTEMPT) == []
    assert sorted(os.listdir(tmp_path)) == ["global_steps_10", "global_steps_3"]


def test_retention_keeps_what_is_not_of_ours(tmp_path: Path) -> None:
    foreign = tmp_path / "global_step_7" / "actor"
    foreign.mkdir(parents=True)
    (foreign / "model_world_size_8_rank_0.pt").write_bytes(b"of verl")
    (tmp_path / "global_steps_8").mkdir()
    (tmp_path / "iter_0000001").mkdir()
    for step in (9, 10, 11):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert steps.delete_old_steps(tmp_path, 1, ATTEMPT) == [9, 10]
    assert (foreign / "model_world_size_8_rank_0.pt").read_bytes() == b"of verl"
    assert sorted(os.listdir(tmp_path)) == ["global_step_7", "global_steps_11", "global_steps_8", "iter_0000001"]


def test_retention_does_not_count_incomplete_steps(tmp_path: Path) -> None:
    """Else the last one to come back to might go."""
    make(layout.step_dir(tmp_path, 1) / ROLE, 1)
    make(layout.step_dir(tmp_path, 2) / ROLE, 2, ("actor", "critic"))
    make(layout.step_dir(tmp_path, 3) / ROLE, 3)
    make(layout.step_dir(tmp_path, 4) / ROLE, 4, ("actor", "critic"))
    (layout.step_dir(tmp_path, 5) / ROLE).mkdir(parents=True)
    assert steps.delete_old_steps(tmp_path, 2, ATTEMPT) == []
    assert steps.delete_old_steps(tmp_path, 1, ATTEMPT) == [1, 2]
    assert checkpoints(tmp_path) == {3: 3}
    assert layout.step_dir(tmp_path, 4).is_dir()


def test_retention_keeps_a_step_that_a_role_is_saving(tmp_path: Path) -> None:
    """A role that is behind: its folder must not go from under its hands."""
    staging, attempt = stage(layout.step_dir(tmp_path, 1) / "critic", 4)
    for step in (2, 3):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert steps.delete_old_steps(tmp_path, 1, ATTEMPT) == [2]
    commit.publish(staging, layout.step_dir(tmp_path, 1) / "critic", attempt)
    assert read_version(layout.step_dir(tmp_path, 1) / "critic") == 4


def test_a_crash_while_a_step_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(Crash):
            steps.delete_old_steps(tmp_path, 1, ATTEMPT)
    assert checkpoints(tmp_path) == {2: 2}
    assert len(remains(tmp_path)) == 1
    commit.sweep(tmp_path, ROLE, alone=False)
    assert remains(tmp_path) == []


def test_a_save_refuses_a_file_in_the_place_of_its_step(tmp_path: Path) -> None:
    layout.step_dir(tmp_path, 7).write_bytes(b"not a folder")
    with pytest.raises(CheckpointError, match="FileExistsError"):
        save_together(alone_in_the_world(), tmp_path, 7, 3)
    assert layout.step_dir(tmp_path, 7).read_bytes() == b"not a folder"


def test_the_step_just_saved_stays_after_a_rollback(tmp_path: Path) -> None:
    for step in (60, 100):
        make(layout.step_dir(tmp_path, step) / ROLE, step)
    assert steps.delete_old_steps(tmp_path, 1, commit.new_attempt(), committed=60) == []
    assert checkpoints(tmp_path) == {60: 60, 100: 100}


def test_a_role_s_retention_leaves_another_role_its_newest(tmp_path: Path) -> None:
    for step in (8, 9):
        for role in (ROLE, "critic"):
            make(layout.step_dir(tmp_path, step) / role, step, roles=(role,))
    make(layout.step_dir(tmp_path, 10) / ROLE, 10, roles=(ROLE,))
    assert steps.delete_old_steps(tmp_path, 1, commit.new_attempt(), committed=10) == [8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_steps_10", "global_steps_9"]
