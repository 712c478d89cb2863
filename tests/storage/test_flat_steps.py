"""Steps whose folder is their only role's, as verl's SFT trainer has them, and what a trainer puts there beside."""

import os
from pathlib import Path

import pytest
from checkpoints import ROLE, dead_owner, make, own, read_version, remains, stage

from mcore_ckpt import layout
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.resharding.reshard import select
from mcore_ckpt.storage import commit, steps
from mcore_ckpt.storage.retention import Policy, delete_old_steps, pin, prune
from mcore_ckpt.storage.verify import verify

NAMES = ("global_steps_{}", "global_step_{}", "checkpoint-{}")


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(commit, "_exchange", lambda first, second: False)
    return request.param


def flat(root: Path, step: int, name: str = "global_step_{}") -> Path:
    return root / name.format(step)


@pytest.mark.parametrize("name", NAMES)
def test_a_flat_step_is_a_step(tmp_path: Path, name: str) -> None:
    for step in (1, 2):
        make(flat(tmp_path, step, name), step)
    status = steps.complete_steps(tmp_path)[-1]
    assert (status.step, status.committed, status.role_dir(ROLE)) == (2, {ROLE}, flat(tmp_path, 2, name))
    assert steps.update_tracker(tmp_path) == 2
    assert [status.step for status in resumable_steps(tmp_path, [ROLE])] == [2, 1]
    assert select(tmp_path).role_dirs == (flat(tmp_path, 2, name).resolve(),)
    report = verify(tmp_path, None)
    assert [verdict.path for verdict in report.roles] == [flat(tmp_path, 1, name), flat(tmp_path, 2, name)]
    assert not report.problems
    assert verify(flat(tmp_path, 2, name), 2).roles[0].path == flat(tmp_path, 2, name)
    pin(tmp_path, 1)
    assert delete_old_steps(tmp_path, Policy(1)) == []
    (flat(tmp_path, 1, name) / layout.PINNED_FILE).unlink()
    assert delete_old_steps(tmp_path, Policy(1)) == [1]
    assert read_version(flat(tmp_path, 2, name)) == 2
    assert remains(tmp_path) == []


def test_roles_and_flat_steps_beside_each_other(tmp_path: Path) -> None:
    make(flat(tmp_path, 1), 1)
    make(flat(tmp_path, 2) / ROLE, 2)
    make(flat(tmp_path, 3) / "critic", 3)
    assert [(s.step, s.committed) for s in steps.complete_steps(tmp_path)] == [
        (1, {ROLE}),
        (2, {ROLE}),
        (3, {"critic"}),
    ]
    assert delete_old_steps(tmp_path, Policy(1)) == [1]


def test_a_flat_step_copied_from_another_does_not_count(tmp_path: Path) -> None:
    make(flat(tmp_path, 1), 1)
    flat(tmp_path, 1).rename(flat(tmp_path, 7))
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert "global_step_7: its manifest is of actor at step 1" in status.reason


def test_a_flat_step_with_a_damaged_manifest(tmp_path: Path) -> None:
    make(flat(tmp_path, 1), 1)
    (flat(tmp_path, 1) / layout.MANIFEST_FILE).write_text("{")
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert delete_old_steps(tmp_path, Policy(1)) == []  # what is not understood stays
    report = verify(tmp_path, None)
    assert [bool(verdict.damages) for verdict in report.roles] == [True]


def test_what_a_trainer_puts_there_stays(tmp_path: Path, way: str) -> None:
    folder = flat(tmp_path, 5)
    make(folder, 1)
    (folder / "data_0.pt").write_text("of version 1")
    pin(tmp_path, 5)
    staging, attempt = stage(folder, 2)
    (folder / "data_1.pt").write_text("while the second save is under way")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "x").write_text("x")
    (folder / "link").symlink_to("data_0.pt")
    commit.publish(staging, folder, attempt)
    assert read_version(folder) == 2
    assert (folder / "data_0.pt").read_text() == "of version 1"
    assert (folder / "data_1.pt").read_text() == "while the second save is under way"
    assert (folder / "adapter" / "x").read_text() == "x"
    assert os.readlink(folder / "link") == "data_0.pt"
    assert steps.list_steps(tmp_path)[0].pinned
    assert remains(tmp_path) == []


def test_a_file_that_is_open_is_the_same_file_after(tmp_path: Path, way: str) -> None:
    folder = flat(tmp_path, 5)
    folder.mkdir(parents=True)
    staging, attempt = stage(folder, 1)
    with open(folder / "data_0.pt", "w") as file:
        file.write("first half, ")
        commit.publish(staging, folder, attempt)
        file.write("second half")
    assert (folder / "data_0.pt").read_text() == "first half, second half"
    assert read_version(folder) == 1


def test_a_folder_its_trainer_makes_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = flat(tmp_path, 5)
    staging, attempt = stage(folder, 1)
    exists = Path.exists

    def made_after(path: Path, **kwargs: bool) -> bool:
        found = exists(path, **kwargs)
        if path == folder and not found:
            folder.mkdir()
            (folder / "data_0.pt").write_text("x")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", made_after)
        commit.publish(staging, folder, attempt)
    assert read_version(folder) == 1
    assert (folder / "data_0.pt").read_text() == "x"


def test_remains_of_a_flat_step_are_swept(tmp_path: Path) -> None:
    make(flat(tmp_path, 1), 1)
    dead, _ = stage(flat(tmp_path, 2), 2)
    own(dead, dead_owner(2**22 + 1))
    living, _ = stage(flat(tmp_path, 3), 3)
    assert commit.find_remains(tmp_path) == [dead]
    assert [folder.path for folder in prune(tmp_path, Policy(), dry_run=True) if folder.step is None] == [dead]
    commit.sweep(tmp_path, ROLE, alone=True)
    assert not dead.exists()
    assert living.exists()
    assert read_version(flat(tmp_path, 1)) == 1


def test_a_flat_step_that_is_being_saved_again_is_not_deleted(tmp_path: Path) -> None:
    for step in (1, 2):
        make(flat(tmp_path, step), step)
    staging, attempt = stage(flat(tmp_path, 1), 11)
    assert delete_old_steps(tmp_path, Policy(1)) == []
    commit.publish(staging, flat(tmp_path, 1), attempt)
    assert delete_old_steps(tmp_path, Policy(1)) == [1]


@pytest.mark.parametrize("trainer_is_back", [False, True])
def test_a_crash_between_two_renames(tmp_path: Path, trainer_is_back: bool) -> None:
    """Where folders cannot be exchanged; the trainer may have made the folder again before the sweep."""
    folder = flat(tmp_path, 4)
    make(folder, 1)
    staging, attempt = stage(folder, 2)
    own(staging, dead_owner(2**22 + 1))
    folder.rename(layout.replaced_dir(folder, attempt))
    if trainer_is_back:
        folder.mkdir()
        (folder / "data_0.pt").write_text("x")
    commit.sweep(tmp_path, ROLE, alone=True)
    assert read_version(folder) == 1
    assert (folder / "data_0.pt").exists() == trainer_is_back
    assert remains(tmp_path) == []


def test_a_checkpoint_that_cannot_be_put_back_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = flat(tmp_path, 4)
    make(folder, 1)
    replaced = layout.replaced_dir(folder, "b" * 32)
    folder.rename(replaced)
    (folder / "model").mkdir(parents=True)
    commit.sweep(tmp_path, ROLE, alone=True)
    assert read_version(replaced) == 1
    assert "cannot be put back" in caplog.text
