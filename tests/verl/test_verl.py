"""With the real verl beside this environment: its trainers, registry and configuration with our checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.megatron_cases import packages

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
# Beside the environment, not in it: verl wants a transformers older than that of all other tests.
VERL = Path(os.environ.get("MCORE_CKPT_VERL", REPOSITORY / ".venv" / "verl"))

QUEUE = REPOSITORY / ".venv" / "transferqueue"  # verl's queue; without it, its tests are left out


@pytest.mark.skipif(not VERL.is_dir(), reason=f"no verl in {VERL}")
def test_with_verl(tmp_path: Path, run_python: Callable[..., str], inner_pytest: list[str]) -> None:
    # mbridge 0.15, which verl builds the model with, needs a name that megatron removed in 0.17.
    path = [VERL, QUEUE, *packages("0.16")]
    # One process for all, because importing verl takes longer than any test. It may not have made threads: ranks are
    # forked from it.
    run_python(*inner_pytest, "--disable-warnings", "--basetemp", tmp_path / "inner", HERE / "with_verl", path=path)
