"""Launches tests/s3, which need s3fs and a store of their own: these are installed beside the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGES = Path(os.environ.get("MCORE_CKPT_REMOTE", REPOSITORY / ".venv" / "remote"))


@pytest.mark.skipif(not PACKAGES.is_dir(), reason=f"no s3fs in {PACKAGES}")
def test_s3() -> None:
    path = [PACKAGES, REPOSITORY, os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/s3", "-q", "-p", "no:cacheprovider"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", "MCORE_CKPT_S3": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
