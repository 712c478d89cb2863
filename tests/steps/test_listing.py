"""A step counts when all its roles are committed, and the reason says why another does not."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.provenance import Commit
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.steps import leftovers, tracker
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from tests.support.checkpoints import (
    ROLE,
    alone_in_the_world,
    checkpoints,
    make,
    save_together,
)
from tests.support.privileges import protect, without_privileges


def test_a_step_counts_when_all_declared_roles_have_committed(tmp_path: Path) -> None:
    roles = ("actor", "critic", "reward")
    for number, role in enumerate(roles):
        assert steps.complete_steps(tmp_path) == []
        assert tracker.update_tracker(tmp_path) is None
        make(file_names.step_dir(tmp_path, 7) / role, number, roles)
    (status,) = steps.complete_steps(tmp_path)
    assert (status.step, status.committed) == (7, frozenset(roles))
    assert tracker.update_tracker(tmp_path) == 7


def test_an_incomplete_step_says_who_is_missing(tmp_path: Path) -> None:
    make(file_names.step_dir(tmp_path, 7) / "actor", 3, ("actor", "critic"))
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert "not committed by critic" in status.reason


def test_any_manifest_s_roles_are_declared(tmp_path: Path) -> None:
    make(file_names.step_dir(tmp_path, 7) / "actor", 3, ("actor",))
    make(file_names.step_dir(tmp_path, 7) / "critic", 4, ("actor", "critic", "ref"))
    (status,) = steps.list_steps(tmp_path)
    assert not status.is_complete
    assert "ref" in status.reason


def test_a_manifest_is_read_once_and_forgotten_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run saves thousands of steps: what is known of those that are gone must not stay in memory."""
    reads = []
    read = steps.read_manifest_summary
    monkeypatch.setattr(
        steps, "read_manifest_summary", lambda role_dir: reads.append(role_dir.parent.name) or read(role_dir)
    )
    for step in range(1, 4):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    for _ in range(3):
        assert [status.step for status in steps.list_steps(tmp_path)] == [1, 2, 3]
    assert sorted(reads) == ["global_steps_1", "global_steps_2", "global_steps_3"]
    make(file_names.step_dir(tmp_path, 2) / ROLE, 22)
    shutil.rmtree(file_names.step_dir(tmp_path, 1))
    assert [status.step for status in steps.list_steps(tmp_path)] == [2, 3]
    assert reads[3:] == ["global_steps_2"]
    assert sorted(path.parent.name for path in steps._heads[tmp_path]) == ["global_steps_2", "global_steps_3"]


def test_what_is_known_of_many_roots_is_forgotten(tmp_path: Path) -> None:
    roots = [tmp_path / str(number) for number in range(20)]
    for root in roots:
        make(file_names.step_dir(root, 1) / ROLE, 1)
        assert len(steps.list_steps(root)) == 1
    assert set(steps._heads) <= set(roots[-8:])


def test_the_newest_step_is_found_without_a_look_at_older_ones(tmp_path: Path) -> None:
    for step, roles in ((1, None), (2, None), (3, (ROLE, "critic"))):
        make(file_names.step_dir(tmp_path, step) / ROLE, step, roles)
    file_names.step_dir(tmp_path, 1).joinpath(ROLE, file_names.MANIFEST_FILE).write_text("damaged")
    found = steps.newest_complete(tmp_path)
    assert found is not None
    assert found.step == 2
    assert steps.newest_complete(tmp_path, "critic") is None
    assert [status.step for status in steps.list_steps(tmp_path, 3)] == [3]
    assert steps.list_steps(tmp_path, 4) == []


@pytest.mark.parametrize("is_known", [True, False])
def test_a_commit_is_the_newest_before_the_tracker_names_it(is_known: bool, tmp_path: Path) -> None:
    """A training went back to 80 and died between its first commit and the tracker."""

    def commit(step: int, number: int, *branch: tuple[int, int]) -> None:
        role_dir = file_names.step_dir(tmp_path, step) / ROLE
        make(role_dir, step)
        manifest = replace(read_manifest(role_dir), commit=Commit(number, None, branch))
        (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))

    for number, step in enumerate((70, 80, 90, 100), 1):
        commit(step, number, (1, number))
    tracker.update_tracker(tmp_path)
    commit(82, 5, (1, 2), (5, 5))
    steps._heads.clear()
    if is_known:
        steps.list_steps(tmp_path)
    found = steps.newest_complete(tmp_path)
    assert found is not None
    assert found.step == 82
    assert [status.step for status in steps.newest_steps(tmp_path, 3)] == [70, 80, 82]
    assert tracker.read_tracker(tmp_path) == 100
    for file in file_names.step_dir(tmp_path, 82).rglob("*.pt"):
        file.unlink()
    found = steps.newest_complete(tmp_path)
    assert found is not None
    assert found.step == 80


def test_a_folder_under_another_name_does_not_count(tmp_path: Path) -> None:
    make(file_names.step_dir(tmp_path, 7) / "actor", 3)
    shutil.copytree(file_names.step_dir(tmp_path, 7), file_names.step_dir(tmp_path, 8))
    shutil.copytree(file_names.step_dir(tmp_path, 7) / "actor", file_names.step_dir(tmp_path, 9) / "critic")
    assert checkpoints(tmp_path) == {7: 3}
    assert "its manifest is of actor at step 7" in steps.list_steps(tmp_path)[1].reason


def test_a_damaged_manifest_does_not_count(role_dir: Path) -> None:
    make(role_dir, 3)
    path = role_dir / file_names.MANIFEST_FILE
    data = path.read_bytes()
    assert steps.complete_steps(role_dir.parent.parent)
    path.write_bytes(data[: len(data) // 2])
    assert steps.complete_steps(role_dir.parent.parent) == []
    assert str(path) in steps.list_steps(role_dir.parent.parent)[0].reason


def test_a_manifest_of_a_newer_format_does_not_count_and_says_so(role_dir: Path) -> None:
    make(role_dir, 3)
    manifest = b'{"format":"mcore_ckpt","format_version":12,"files":"in another form"}'
    (role_dir / file_names.MANIFEST_FILE).write_bytes(manifest)
    (status,) = steps.list_steps(role_dir.parent.parent)
    assert not status.is_complete
    assert str(role_dir / file_names.MANIFEST_FILE) in status.reason
    assert "format version 12 is newer than 2" in status.reason
    assert "upgrade" in status.reason


def a_protected_folder(path: Path) -> None:
    path.mkdir()
    protect(path)


def a_protected_role(path: Path) -> None:
    make(path / ROLE, 3)
    protect(path / ROLE)


def a_protected_role_that_another_declares(path: Path) -> None:
    for role in (ROLE, "critic"):
        make(path / role, 3, (ROLE, "critic"))
    protect(path / "critic")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("elsewhere")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def a_link_to_what_is_protected(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to("elsewhere/there")
    protect(path.parent / "elsewhere")


@pytest.mark.parametrize(
    "put",
    [
        a_protected_folder,
        a_protected_role,
        a_protected_role_that_another_declares,
        a_link_to_nothing,
        a_link_to_itself,
        a_link_to_what_is_protected,
    ],
)
def test_one_that_cannot_be_read_is_its_own_problem(
    tmp_path: Path, put: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Else one step of somebody else's would keep a trainer from all its own."""
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    strange = file_names.step_dir(tmp_path, 3)
    put(strange)
    with without_privileges():
        *good, bad = steps.list_steps(tmp_path)
        assert [status.is_complete for status in good] == [True, True]
        assert not bad.is_complete
        assert f"{strange}" in bad.reason
        assert "cannot be read" in bad.reason
        assert tracker.update_tracker(tmp_path) == 2
        leftovers.remove_leftovers(tmp_path, ROLE, alone=True)
        assert leftovers.find_leftovers(tmp_path) == []
        assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]
        assert os.path.lexists(strange)
        assert main(["list", str(tmp_path)]) == 0
        capsys.readouterr()
        assert main(["verify", str(tmp_path)]) == 1
        told = capsys.readouterr().out
        assert "global_steps_2/actor: sound" in told
        assert "cannot be read" in told


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_what_may_pass_does_not_lead_to_an_older_step(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    newest = file_names.step_dir(tmp_path, 2) / ROLE / file_names.MANIFEST_FILE
    look = Path.stat

    def stat(path: Path, **words: bool) -> os.stat_result:
        if path == newest:
            raise OSError(number, os.strerror(number), str(path))
        return look(path, **words)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(OSError, match="global_steps_2"):
        steps.list_steps(tmp_path)


def test_the_other_spelling_of_a_step(tmp_path: Path) -> None:
    make(tmp_path / "global_step_7" / ROLE, 3)
    make(file_names.step_dir(tmp_path, 5) / ROLE, 2)
    assert checkpoints(tmp_path) == {5: 2, 7: 3}
    assert tracker.update_tracker(tmp_path) == 7
    # Of two, the one that is complete.
    (file_names.step_dir(tmp_path, 7) / ROLE).mkdir(parents=True)
    assert checkpoints(tmp_path) == {5: 2, 7: 3}


def test_a_save_refuses_a_file_in_the_place_of_its_step(tmp_path: Path) -> None:
    file_names.step_dir(tmp_path, 7).write_bytes(b"not a folder")
    with pytest.raises(CheckpointError, match="FileExistsError"):
        save_together(alone_in_the_world(), tmp_path, 7, 3)
    assert file_names.step_dir(tmp_path, 7).read_bytes() == b"not a folder"
