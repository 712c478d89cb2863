"""A small part of what scripts/chaos.sh does, and that it finds what is broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent / "chaos.py"


@pytest.mark.parametrize(("kills", "chains"), [(8, 2), pytest.param(20, 4, marks=pytest.mark.full)])
def test_a_few_random_kills(kills: int, chains: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CHAOS), "--kills", str(kills), "--seed", "5", "--chains", str(chains)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert f"{kills} kills" in done.stdout
