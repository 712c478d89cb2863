"""A small part of what scripts/chaos.sh does, and that it finds what is broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent / "chaos.py"


# CI has the kills of tests/faults/crash, one by one, in a commit. With seed 6, four kills are of each rank and of both;
# at an event and at a time; in a start, a load and a save; sync and async; with and without an exchange of folders.
@pytest.mark.full
@pytest.mark.parametrize(("kills", "chains", "seed"), [(4, 2, 6), (8, 2, 5), (20, 4, 5)])
def test_a_few_random_kills(kills: int, chains: int, seed: int) -> None:
    options = ("--kills", kills, "--seed", seed, "--chains", chains)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CHAOS), *map(str, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert f"{kills} kills" in done.stdout
