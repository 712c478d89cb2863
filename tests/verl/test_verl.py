"""With the real verl beside this environment: its trainers, registry and configuration with our checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
# Beside the environment, not in it: verl wants a transformers older than that of all other tests.
VERL = Path(os.environ.get("MCORE_CKPT_VERL", REPOSITORY / ".venv" / "verl"))


@pytest.mark.skipif(not VERL.is_dir(), reason=f"no verl in {VERL}")
def test_with_verl(tmp_path: Path) -> None:
    path = os.pathsep.join([str(VERL), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        # One process for all: importing verl takes longer than any test.
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--disable-warnings"),
            *("--basetemp", str(tmp_path / "inner"), str(HERE / "with_verl")),
        ],
        # Ranks are forked: nothing may have made threads before.
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
