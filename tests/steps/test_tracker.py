"""The tracker names the newest complete step, and garbage in its place does no harm."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from tests.support.checkpoints import (
    ROLE,
    Crash,
    checkpoints,
    crash,
    make,
)

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
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path)[::-1])
    assert "does not name a step; loading the newest complete step, 7" in caplog.text
    assert tracker.update_tracker(tmp_path) == 7
    assert (tmp_path / file_names.TRACKER_FILE).read_bytes() == b"7"


@pytest.mark.parametrize("make_it", [folder, dangling_link, link_to_itself, pipe])
def test_a_tracker_that_is_no_file(
    tmp_path: Path, make_it: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    make_it(tmp_path / file_names.TRACKER_FILE)
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    assert tracker.read_tracker(tmp_path) is None
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path)[::-1])
    assert "does not name a step" in caplog.text
    (problem,) = tracker.tracker_problems(tmp_path)
    assert ("no save can write the tracker: remove it" in problem) is (make_it is folder)
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
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path)[::-1])
    assert caplog.text == ""


@pytest.mark.parametrize("content", [b"12", b"12\n"])
def test_a_tracker_that_points_nowhere(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / file_names.TRACKER_FILE).write_bytes(content)
    assert tracker.read_tracker(tmp_path) == 12
    make(file_names.step_dir(tmp_path, 7) / ROLE, 3)
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path)[::-1])
    assert "names step 12, which is not complete; loading the newest complete step, 7" in caplog.text


def test_a_tracker_that_names_an_older_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (7, 12):
        make(file_names.step_dir(tmp_path, step) / ROLE, step)
    (tmp_path / file_names.TRACKER_FILE).write_bytes(b"7")
    tracker.warn_if_tracker_differs(tmp_path, steps.complete_steps(tmp_path)[::-1])
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
