"""Which steps count, the tracker that names the newest, and which steps may go."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import (
    ROLE,
    Crash,
    alone_in_the_world,
    checkpoints,
    crash,
    make,
    save_together,
)
from privileges import protect, without_privileges

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.steps import leftovers, tracker
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps

# -- which steps count ------------------------------------------------------------------------------------


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
    assert "format version 12 is newer than 1" in status.reason
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


# -- the tracker ------------------------------------------------------------------------------------------


GARBAGE = {
    "empty": b"",
    "a-line": b"\n",
    "of-megatron": b"release",
    "negative": b"-7",
    "a-fraction": b"7.0",
    "two": b"7 8",
    "long": b"1" * 30,
    "binary": bytes(range(256)),
    "not-text": b"\xff",
    "other-digits": b"\xd9\xa7",
    "huge": b"7" * (1 << 20),
}


def folder(path: Path) -> None:
    path.mkdir()


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    os.mkfifo(path)  # opened as a file is, it would wait for a writer for ever


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_tracker_of_garbage_is_none(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / file_names.TRACKER_FILE).write_bytes(content)
    assert tracker.read_tracker(tmp_path) is None
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path))
    assert "does not name a step; loading the newest complete one, 7" in caplog.text
    assert tracker.update_tracker(tmp_path) == 7
    assert (tmp_path / file_names.TRACKER_FILE).read_bytes() == b"7"


@pytest.mark.parametrize("make_it", [folder, dangling_link, link_to_itself, pipe])
def test_a_tracker_that_is_no_file(
    tmp_path: Path, make_it: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    make_it(tmp_path / file_names.TRACKER_FILE)
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    assert tracker.read_tracker(tmp_path) is None
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path))
    assert "does not name a step" in caplog.text
    tracker.move_tracker(tmp_path)
    if make_it is folder:
        assert "the tracker could not be updated" in caplog.text
    else:
        assert tracker.read_tracker(tmp_path) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_steps_7", file_names.TRACKER_FILE]
    assert checkpoints(tmp_path) == {7: 3}


def test_no_tracker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert tracker.read_tracker(tmp_path) is None
    assert tracker.update_tracker(tmp_path) is None
    assert os.listdir(tmp_path) == []
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path))
    assert caplog.text == ""


@pytest.mark.parametrize("content", [b"12", b"12\n"])
def test_a_tracker_that_points_nowhere(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / file_names.TRACKER_FILE).write_bytes(content)
    assert tracker.read_tracker(tmp_path) == 12
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path))
    assert "names step 12, where there is nothing complete to load; loading the newest complete step, 7" in caplog.text


def test_a_tracker_that_names_an_older_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (7, 12):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    (tmp_path / file_names.TRACKER_FILE).write_bytes(b"7")
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path))
    assert "names step 7, but the newest complete step is 12" in caplog.text
    assert "load(step=7)" in caplog.text


def test_two_roles_that_move_the_tracker_at_once_leave_it_at_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between one role's look at the steps and its write, another completes a newer step and moves the tracker."""
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    replace, others = tracker.replace_file, [8, 9]

    def late(path: Path, data: bytes) -> None:
        if others:
            step = others.pop(0)
            make(file_names.step_dir(tmp_path, step) / "critic", step)
            replace(path, str(step).encode())
        replace(path, data)

    monkeypatch.setattr(tracker, "replace_file", late)
    assert tracker.update_tracker(tmp_path) == 9
    assert tracker.read_tracker(tmp_path) == 9


def test_a_crash_while_the_tracker_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    tracker.update_tracker(tmp_path)
    make(file_names.step_dir(tmp_path, 8) / ROLE, 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: crash())
        with pytest.raises(Crash):
            tracker.update_tracker(tmp_path)
    assert tracker.read_tracker(tmp_path) == 7
    assert tracker.update_tracker(tmp_path) == 8
    assert tracker.read_tracker(tmp_path) == 8


def test_a_save_refuses_a_file_in_the_place_of_its_step(tmp_path: Path) -> None:
    file_names.step_dir(tmp_path, 7).write_bytes(b"not a folder")
    with pytest.raises(CheckpointError, match="FileExistsError"):
        save_together(alone_in_the_world(), tmp_path, 7, 3)
    assert file_names.step_dir(tmp_path, 7).read_bytes() == b"not a folder"
