"""AReaL's tests, in processes of their own: they import it without what most of it is about (areal_on_cpu.py)."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "areal"
REPOSITORY = HERE.parents[2]


def test_areal_in_one_process(run_python: Callable[..., str], inner_pytest: list[str]) -> None:
    names = ("contract", "recovering", "moving", "exporting", "killing", "several_ranks", "documented")
    files = [HERE / f"{name}.py" for name in names]
    run_python("-W", "ignore", *inner_pytest, "-p", "tests.integrations.areal.with_areal", *files)


@pytest.mark.full
def test_areal_on_several_ranks(tmp_path: Path, run_python: Callable[..., str]) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    run_python("-W", "ignore", *torchrun, HERE / "several_ranks.py", tmp_path)


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
