"""Transformer-engine's names and opaque states go through a checkpoint as they are."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
# Installed beside the environment, not in it: megatron takes TE wherever it can be imported.
TRANSFORMER_ENGINE = Path(os.environ.get("MCORE_CKPT_TE", REPOSITORY / ".venv" / "te"))


@pytest.mark.skipif(not TRANSFORMER_ENGINE.is_dir(), reason=f"no transformer-engine in {TRANSFORMER_ENGINE}")
@pytest.mark.parametrize(("world", "models"), [(1, ["dense", "moe", "dense-specs", "moe-specs"]), (2, ["pp2", "ep2"])])
def test_round_trip(world: int, models: list[str], tmp_path: Path, run_python: Callable[..., str]) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}")
    run_python(*torchrun, HERE / "round_trip.py", tmp_path, *models, path=[TRANSFORMER_ENGINE])
