"""A small part of what scripts/preemptions.sh does."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kills.preempted_life import STOPPED
from tests.faults.kills.preemptions import unexpected_ends

PREEMPTIONS = Path(__file__).parent / "preemptions.py"
FULL = pytest.mark.full


# In CI: a signal of one rank and of several, a file; sync, async and on the nodes.
@pytest.mark.parametrize(
    ("preemptions", "ranks", "seed"), [(3, 2, 1), pytest.param(50, 8, 2, marks=FULL)], ids=["few", "many"]
)
def test_random_preemptions(preemptions: int, ranks: int, seed: int) -> None:
    options = ("--preemptions", preemptions, "--ranks", ranks, "--seed", seed)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PREEMPTIONS), *map(str, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert f"{preemptions} preemptions of {ranks} ranks, 0 problems" in done.stdout


def raised(kind: str, where: str = "saving", is_gloo: bool = False) -> dict[str, Any]:
    return {"error": [kind, "text", "traceback"], "in": where, "is_gloo": is_gloo}


@pytest.mark.parametrize(
    ("status", "report", "problem"),
    [
        (STOPPED, {"error": None}, ""),
        (1, raised("AgreementError"), ""),
        (1, raised("RuntimeError", "training", is_gloo=True), ""),
        (1, raised("RuntimeError", is_gloo=True), "rank 1 has raised in saving"),
        (1, raised("AttributeError"), "rank 1 has raised in saving"),
        (1, {}, "rank 1 has ended with 1"),
        (0, {"error": None}, "rank 1 has ended with 0"),
        (-signal.SIGALRM, {}, "rank 1 has ended with -14: it has hung for 240 s"),
        (-signal.SIGSEGV, {}, "rank 1 has ended with -11"),
    ],
)
def test_survivors_of_a_death_end_as_they_should(status: int, report: dict[str, Any], problem: str) -> None:
    found = unexpected_ends([-signal.SIGKILL, status], [{}, report], killed=0)
    assert len(found) == bool(problem)
    assert problem in "".join(found)
