"""What W&B gets: of a stand-in for its run, and (`--full`, because wandb is large) read back from a real run's file."""

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import Event, SaveReport
from mcore_ckpt.integrations.listeners import WandbListener
from tests.support.told_events import BAD, GOOD, NEWEST

HERE = Path(__file__).parent
WANDB = Path(os.environ.get("MCORE_CKPT_WANDB", HERE.parents[2] / ".venv" / "wandb"))
Told = tuple[list[Event], list[SaveReport]]


class StandInForRun:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, data: dict[str, Any], *, commit: bool | None = None) -> None:
        assert commit is False
        self.rows.append(data)


def check(rows: list[dict[str, Any]], told: Told) -> None:
    name = "mcore_ckpt/actor/"
    saves = [row for row in rows if f"{name}save_seconds" in row]
    assert [row[f"{name}step"] for row in saves] == [GOOD, NEWEST]
    for row, report in zip(saves, told[1], strict=True):
        assert row[f"{name}save_seconds"] == pytest.approx(report.seconds)
        assert row[f"{name}save_stall_seconds"] == report.stall_s
        assert row[f"{name}save_gigabytes"] == report.nbytes / 1e9
        assert row[f"{name}save_commit_seconds"] == pytest.approx(report.commit_s)
        assert row[f"{name}save_failed"] == 0
    (failed,) = [row for row in rows if row.get(f"{name}save_failed") == 1]
    assert failed[f"{name}step"] == BAD
    deletions = {"delete_seconds": [GOOD], "remote_delete_seconds": [GOOD]}
    for figure, steps in {"load_seconds": [NEWEST], "upload_seconds": [GOOD, NEWEST], **deletions}.items():
        assert [row[f"{name}step"] for row in rows if name + figure in row] == steps


def test_the_figures_of_a_training(told: Told) -> None:
    run = StandInForRun()
    listener = WandbListener(run)
    for event in told[0]:
        listener(event)
    check(run.rows, told)


def test_without_wandb_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb, or pass a run"):
        WandbListener()


@pytest.mark.full
@pytest.mark.skipif(not WANDB.is_dir(), reason=f"no wandb in {WANDB}")
def test_the_figures_in_the_file_of_a_real_run(told: Told, tmp_path: Path, run_python: Callable[..., str]) -> None:
    (tmp_path / "events").write_bytes(pickle.dumps(told[0]))
    run_python(HERE / "wandb_run.py", tmp_path, path=[WANDB])
    check(json.loads((tmp_path / "rows").read_text()), told)
