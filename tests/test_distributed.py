"""Launches tests/distributed, which needs several ranks, once for each world size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

# The ranks share one cache folder, and each keeps its temporary folders, of some 60 MB.
ONE_OF_MANY = ("-p", "no:cacheprovider", "-o", "tmp_path_retention_policy=failed")


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_distributed(world: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    done = subprocess.run(
        # Ranks above 0 say nothing unless they die: rank 0 reports for all.
        [*command, "-m", "pytest", "tests/distributed", "-q", *ONE_OF_MANY],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{world} ranks:\n{done.stdout}"
