"""AReaL's tests, in processes of their own: they import it without what most of it is about (areal_on_cpu.py)."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent / "areal"
REPOSITORY = HERE.parents[2]


def run(*command: object) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}:{HERE}", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_areal_in_one_process() -> None:
    files = [HERE / f"{name}.py" for name in ("contract", "recovering", "moving", "exporting", "killing")]
    options = ("-q", "-p", "with_areal", "-p", "no:cacheprovider", "-o", "tmp_path_retention_policy=failed")
    run("-m", "pytest", *options, *files)


def test_areal_on_several_ranks(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    run(*launcher, HERE / "several_ranks.py", tmp_path)


def test_without_areal_it_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import mcore_ckpt.integrations.areal"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    assert "needs the package areal, which is not installed" in done.stderr
