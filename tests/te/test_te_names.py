"""Transformer-engine's names and opaque states go through a checkpoint as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
# Installed beside the environment, not in it: megatron takes TE wherever it can be imported.
TRANSFORMER_ENGINE = Path(os.environ.get("MCORE_CKPT_TE", REPOSITORY / ".venv" / "te"))


@pytest.mark.skipif(not TRANSFORMER_ENGINE.is_dir(), reason=f"no transformer-engine in {TRANSFORMER_ENGINE}")
@pytest.mark.parametrize(("world", "models"), [(1, ["dense", "moe", "dense-specs", "moe-specs"]), (2, ["pp2", "ep2"])])
def test_round_trip(world: int, models: list[str], tmp_path: Path) -> None:
    path = os.pathsep.join([str(TRANSFORMER_ENGINE), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"),
            *(str(HERE / "round_trip.py"), str(tmp_path), *models),
        ],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
