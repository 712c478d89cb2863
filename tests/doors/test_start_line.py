"""The line that a manager logs about its root when it starts."""

import logging
from pathlib import Path

import pytest

from mcore_ckpt.io.disk_space import Amount, DiskSpace, Limit
from mcore_ckpt.io.mounts import parse_mount
from mcore_ckpt.tools.examine.doctor import free_space, start_line
from tests.doors.test_errors import manager_of
from tests.support.small_model import STEP, make, tensors_of

LOGGER = start_line.logger.name


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == LOGGER]


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)


def pretend(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    mount = parse_mount(f"1 1 0:1 / /mnt rw - {system}")
    monkeypatch.setattr(start_line, "mount_of", lambda folder: mount)


def test_a_manager_logs_one_line_and_makes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "ext4 /dev/sda1 rw")
    root = tmp_path / "checkpoints" / "run"
    manager_of(root).close()
    (line,) = lines(caplog)
    text = line.getMessage()
    assert line.levelno == logging.INFO
    assert "\n" not in text
    assert text.startswith(
        f"checkpoints in {root}: ext4 (/dev/sda1 on /mnt); has O_DIRECT, exchange of folders, flock; "
    )
    assert "B free" in text
    assert list(tmp_path.iterdir()) == []


def test_the_space_in_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "ext4 /dev/sda1 rw")
    make(tmp_path, tensors_of())
    manager_of(tmp_path).close()
    assert f"more saves like step {STEP}" in lines(caplog)[0].getMessage()


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("tmpfs tmpfs rw", "in memory, everything is lost"),
        ("overlay overlay rw", "a layer of a container"),
        ("ext4 /dev/sda1 rw,nobarrier", "nobarrier"),
        ("nfs4 server:/a rw,soft", "soft: a request"),
    ],
)
def test_what_is_to_be_changed_is_a_warning(
    system: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, system)
    manager_of(tmp_path).close()
    (line,) = lines(caplog)
    assert line.levelno == logging.WARNING
    assert words in line.getMessage()


def test_a_file_system_that_was_not_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "beegfs beegfs rw")
    manager_of(tmp_path).close()
    (line,) = lines(caplog)
    assert "O_DIRECT, exchange of folders and flock unknown" in line.getMessage()
    assert f"`mcore-ckpt doctor {tmp_path}`" in line.getMessage()


def test_little_space_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "ext4 /dev/sda1 rw")
    space = free_space.FreeSpace(DiskSpace((Limit("nbytes", 10, "disk"),)), 5, Amount(100, 1))
    monkeypatch.setattr(start_line, "free_space", lambda folder: space)
    manager_of(tmp_path).close()
    (line,) = lines(caplog)
    assert line.levelno == logging.WARNING
    assert "the next save fails" in line.getMessage()


@pytest.mark.parametrize("error", [OSError("x"), RuntimeError("x")])
def test_a_start_never_fails_because_of_it(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise error

    monkeypatch.setattr(start_line, "mount_of", fail)
    manager_of(tmp_path).close()
    (line,) = lines(caplog)
    assert line.levelno == logging.DEBUG
