"""The lines that LoggingListener logs."""

import logging
import re

import pytest

from mcore_ckpt import Event, SaveReport
from mcore_ckpt.events import Skipped
from mcore_ckpt.integrations.listeners import LoggingListener
from tests.support.told_events import BAD, DISK_ERROR, GOOD, NEWEST

Told = tuple[list[Event], list[SaveReport]]


def test_each_event_is_one_line(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mcore_ckpt.events")
    listener = LoggingListener(level=logging.DEBUG)
    for event in told[0]:
        listener(event)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "mcore_ckpt.events"]
    assert len(lines) == len(told[0])
    good = [text for _, text in lines if text.startswith(f"step {GOOD} of actor on rank 0: ")]
    saved = ("the save has started", "captured", "written", r"committed, [\d.]+ kB in", "uploaded")
    for part in (*saved, "deleted, in", "deleted from the remote store, in"):
        assert sum(re.search(part, text) is not None for text in good) == 1, part
    assert any(re.match(rf"step {NEWEST} of actor .*: loaded, [\d.]+ kB in", text) for _, text in lines)
    listener(Skipped(step=7, role="actor", rank=0, path="steps", time=1.0, reason="of rank 1", seconds=0.1))
    assert "step 7 of actor on rank 0: the save is skipped, because of rank 1" in caplog.text
    failed_load, failed_save = (text for level, text in lines if level == "ERROR")
    assert "the load has failed" in failed_load
    assert f"step {BAD} of actor" in failed_save
    assert "the save has failed after" in failed_save
    assert "in the phase 'write'" in failed_save
    assert DISK_ERROR in failed_save


def test_a_logger_of_the_trainer(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    listener = LoggingListener(logging.getLogger("trainer"))
    listener(told[0][0])
    assert [(record.name, record.levelno) for record in caplog.records] == [("trainer", logging.INFO)]
