"""Launches a test of tests/distributed by torchrun: without it, all of them run on forked ranks."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


def test_a_test_of_several_ranks_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        # The ranks share one cache folder.
        [*command, "-m", "pytest", "tests/distributed/test_paths.py", "-q", "-p", "no:cacheprovider"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    # Rank 0 reports for both.
    assert done.stdout.count(" passed") == 1, done.stdout
