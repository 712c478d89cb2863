"""A small part of what scripts/fault_chaos.sh does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parent / "faults.py"


@pytest.mark.full
def test_a_few_random_faults() -> None:
    if os.geteuid() != 0:
        pytest.skip("namespaces and file systems of its own need root")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(FAULTS), "--faults", "12", "--seed", "3", "--chains", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    assert "12 faults (" in done.stdout
