"""A small part of what scripts/chaos.sh does, and that it finds what is broken."""

import os
import subprocess
import sys
from pathlib import Path

CHAOS = Path(__file__).parent / "chaos.py"
KILLS = 20


def test_a_few_random_kills() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CHAOS), "--kills", str(KILLS), "--seed", "5", "--chains", "4"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert f"{KILLS} kills" in done.stdout
