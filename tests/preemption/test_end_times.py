"""When the machine goes: what is given, what the environment says, and what scontrol says."""

import math
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from mcore_ckpt.preemption import end_times
from mcore_ckpt.preemption.end_times import find_end


def left(environment: dict[str, str], given_s: float | None = None) -> float | None:
    found = find_end(given_s, environment)
    return None if found is None else found.at - time.monotonic()


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_END_TIME",
        "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
        "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    ],
)
def test_the_environment_says_it(name: str) -> None:
    environment = {name: str(int(time.time()) + 1000)}
    assert left(environment) == pytest.approx(1000, abs=30)
    assert left(environment, given_s=50.0) == pytest.approx(50, abs=30)
    assert left(environment, given_s=math.inf) is None


def test_nobody_says_it(caplog: pytest.LogCaptureFixture) -> None:
    assert left({}) is None
    assert left({"SLURM_JOB_END_TIME": "tomorrow"}) is None
    assert "SLURM_JOB_END_TIME is 'tomorrow'" in caplog.text


@pytest.mark.parametrize("name", end_times._VARIABLES)
def test_an_end_that_has_passed_is_of_another_job(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """As `docker run` or a nested job inherits it. Each start would train one step, and save nothing."""
    assert left({name: str(int(time.time()) - 3600)}) is None
    assert f"{name} says that the time of this training has ended 36" in caplog.text
    other = next(each for each in end_times._VARIABLES if each != name)
    both = {name: str(int(time.time()) - 3600), other: str(int(time.time()) + 1000)}
    assert left(both) == pytest.approx(1000, abs=30)


def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_in_s: int) -> None:
    end = datetime.fromtimestamp(int(time.time()) + ends_in_s).isoformat()
    command = tmp_path / "scontrol"
    command.write_text(
        f'#!/bin/sh\n[ "$3" = 7 ] && echo "JobId=7 StartTime=2020-01-01T00:00:00 EndTime={end} Deadline=N/A"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_scontrol_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    scontrol(tmp_path, monkeypatch, 1000)
    assert left({"SLURM_JOB_ID": "7"}) == pytest.approx(1000, abs=30)
    assert left({"SLURM_JOB_ID": "8"}) is None
    assert not caplog.text
    # The limit was extended, or the variable is that of another job.
    old = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) - 3600)}
    assert left(old) == pytest.approx(1000, abs=30)
    scontrol(tmp_path, monkeypatch, -60)  # Slurm lets the job go on (OverTimeLimit)
    assert left(old) is None
    assert "scontrol says that the time of this training has ended 6" in caplog.text
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert left({"SLURM_JOB_ID": "7"}) is None
    assert "scontrol does not answer" in caplog.text
