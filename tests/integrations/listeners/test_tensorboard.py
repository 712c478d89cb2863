"""Scalars, read back by TensorBoard from its event file."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import Event, SaveReport
from mcore_ckpt.events import Committed
from mcore_ckpt.integrations.listeners import TensorBoardListener
from tests.support.told_events import BAD, GOOD, NEWEST

Told = tuple[list[Event], list[SaveReport]]


@pytest.fixture
def scalars(tensorboard: None, told: Told, tmp_path: Path) -> dict[str, list[Any]]:
    """What TensorBoard shows, by tag."""
    listener = TensorBoardListener(tmp_path)
    for event in told[0]:
        listener(event)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(tmp_path))  # the writer is still open: what was told is on the disk
    shown.Reload()
    return {tag: shown.Scalars(tag) for tag in shown.Tags()["scalars"]}


def test_the_figures_of_a_training(scalars: dict[str, list[Any]], told: Told) -> None:
    reports = told[1]
    committed = [event for event in told[0] if isinstance(event, Committed)]
    seconds = scalars["mcore_ckpt/actor/save_seconds"]
    assert [scalar.step for scalar in seconds] == [GOOD, NEWEST]
    assert [scalar.value for scalar in seconds] == pytest.approx([report.seconds for report in reports])
    assert [scalar.wall_time for scalar in seconds] == pytest.approx([event.time for event in committed])
    stall = scalars["mcore_ckpt/actor/save_stall_seconds"]
    assert [scalar.value for scalar in stall] == pytest.approx([report.stall_s for report in reports])
    write = scalars["mcore_ckpt/actor/save_write_seconds"]
    assert [scalar.value for scalar in write] == pytest.approx([report.write_s for report in reports])
    size = scalars["mcore_ckpt/actor/save_gigabytes"]
    assert [scalar.value for scalar in size] == pytest.approx([report.nbytes / 1e9 for report in reports])
    failed = scalars["mcore_ckpt/actor/save_failed"]
    assert [(scalar.step, scalar.value) for scalar in failed] == [(GOOD, 0), (NEWEST, 0), (BAD, 1)]
    assert [scalar.step for scalar in scalars["mcore_ckpt/actor/load_seconds"]] == [NEWEST]
    assert [scalar.step for scalar in scalars["mcore_ckpt/actor/upload_gigabytes"]] == [GOOD, NEWEST]
    for figure in ("delete_seconds", "remote_delete_seconds"):
        assert [scalar.step for scalar in scalars[f"mcore_ckpt/actor/{figure}"]] == [GOOD]


def test_a_writer_of_the_trainer(tensorboard: None, told: Told, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))  # type: ignore[no-untyped-call]
    listener = TensorBoardListener(writer)
    for event in told[0]:
        listener(event)
    assert len(list(tmp_path.iterdir())) == 1
    writer.close()  # type: ignore[no-untyped-call]


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard, or pass a writer"):
        TensorBoardListener(tmp_path)
