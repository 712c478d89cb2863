"""A small part of what scripts/preemptions.sh does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
