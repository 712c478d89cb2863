"""A file system that is frozen while a manager saves and loads: nothing waits for ever, and all is well afterwards."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import FastTier, SaveHandle
from mcore_ckpt.errors import BusyError, HungDiskError
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.save.root_commit import OldSteps
from mcore_ckpt.tools.examine.verify import verify
from tests.doors.test_runs import Training
from tests.support.small_disks import ext4, frozen
from tests.support.waiting import LONG_S, wait_for_hung_calls

TIMEOUT_S = 1.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with ext4(tmp_path / "disk") as disk:
        yield disk


HANGS = r"^rank 0: .*/run/.* has not returned for \d+ s: the disk, or the server that has it, hangs"


def test_a_save_fails_and_the_next_one_after_the_thaw_is_whole(disk: Path) -> None:
    training = Training(disk / "run", timeout_s=TIMEOUT_S).save(1)
    with frozen(disk):
        for _ in range(2):  # the second one is refused at once
            with pytest.raises(HungDiskError, match=HANGS):
                training.save(2)
    wait_for_hung_calls(training.manager)
    training.save(3)
    training.close()
    assert verify(disk / "run").is_sound
    assert Training(disk / "run", timeout_s=TIMEOUT_S).manager.load().step == 3


def test_an_async_save_returns_whatever_the_disk_does(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "DISK_PATIENCE_S", 0.2)
    training = Training(disk / "run", timeout_s=TIMEOUT_S, async_save=True, if_busy="raise", if_failed="warn")
    training.manager.save(1).wait()
    with frozen(disk):
        first = training.manager.save(2)
        assert not first.done  # it has returned before anything was decided
        with pytest.raises(BusyError):
            training.manager.save(3)
        with pytest.raises(HungDiskError, match=HANGS):
            first.wait(LONG_S)
        second = training.manager.save(3)
        with pytest.raises(HungDiskError, match=HANGS):
            second.wait(LONG_S)
    wait_for_hung_calls(training.manager)
    training.manager.save(4).wait(LONG_S)
    training.close()
    assert verify(disk / "run").is_sound


def test_a_save_returns_after_what_prepares_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller goes on from that: a driver commits its role, for example, which must not be undone later."""
    monkeypatch.setattr(deadlines, "DISK_PATIENCE_S", 0.0)
    training = Training(tmp_path / "run", async_save=True)
    pipe, called = tmp_path / "pipe", []
    os.mkfifo(pipe)
    threading.Timer(0.3, lambda: pipe.write_bytes(b"at last")).start()
    handle = training.manager.save(1, prepared=lambda: called.append(pipe.read_bytes()))
    assert called == [b"at last"]
    handle.wait(LONG_S)
    training.close()


def test_a_load_fails_and_succeeds_after_the_thaw(disk: Path) -> None:
    """Reading does not hang on a frozen file system, but what a load notes there does."""
    training = Training(disk / "run", timeout_s=TIMEOUT_S).save(1)
    with frozen(disk), suppress(HungDiskError):
        training.manager.load()
    assert training.manager.load().step == 1
    training.close()


def test_closing_ends(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(disk / "run", timeout_s=TIMEOUT_S).save(1)
    with frozen(disk):
        training.close()
    assert "a lock stays until this process has ended" in caplog.text
    wait_for_hung_calls(training.manager)
    Training(disk / "run", timeout_s=TIMEOUT_S).save(2).close()


def test_a_root_that_hangs_stops_neither_the_fast_tier_nor_its_end(disk: Path, tmp_path: Path) -> None:
    training = fast(disk / "run", tmp_path / "node")
    drained(training.manager.save(1))
    with frozen(disk):
        second = training.manager.save(2)
        with pytest.raises(HungDiskError, match=HANGS):
            drained(second)
        with suppress(HungDiskError):
            training.close()
    assert fast(disk / "run", tmp_path / "node").manager.load().step == 2


def test_a_node_s_folder_that_hangs_fails_the_save_and_the_next_one_is_whole(disk: Path, tmp_path: Path) -> None:
    training = fast(tmp_path / "run", disk / "run")
    drained(training.manager.save(1))
    with frozen(disk), pytest.raises(HungDiskError, match=HANGS):
        training.manager.save(2).wait(LONG_S)
    wait_for_hung_calls(training.manager)
    drained(training.manager.save(3))
    training.close()
    assert verify(tmp_path / "run").is_sound


def test_old_steps_that_hang_fail_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody writes to hangs as a server that has gone does."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(OldSteps, "delete", lambda self: pipe.read_bytes())
    training = fast(tmp_path / "run", tmp_path / "node", max_to_keep=1)
    for step in range(1, 5):
        training.manager.save(step).wait(LONG_S)
    with suppress(HungDiskError):
        training.close()
    os.close(os.open(pipe, os.O_RDWR))  # the thread that was left may end
    assert Training(tmp_path / "run").manager.load(step=1).step == 1
    assert fast(tmp_path / "run", tmp_path / "node").manager.load().step == 4


def drained(handle: SaveHandle) -> None:
    handle.wait(LONG_S)  # for the step on the node
    assert handle.drain is not None
    handle.drain.wait(LONG_S)


def fast(root: Path, node: Path, **choices: Any) -> Training:
    tier = FastTier(str(node), replicas=0, durable_every=1)
    return Training(root, timeout_s=TIMEOUT_S, async_save=True, fast=tier, **choices)
