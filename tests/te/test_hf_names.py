"""HuggingFace tables hold for transformer-engine's layer specs: each tensor is there under one of its names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
TRANSFORMER_ENGINE = Path(os.environ.get("MCORE_CKPT_TE", REPOSITORY / ".venv" / "te"))


@pytest.mark.skipif(not TRANSFORMER_ENGINE.is_dir(), reason=f"no transformer-engine in {TRANSFORMER_ENGINE}")
def test_tables_name_every_tensor_of_a_transformer_engine_model() -> None:
    path = os.pathsep.join([str(TRANSFORMER_ENGINE), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "hf_names.py"), str(REPOSITORY / "tests" / "hf")],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
