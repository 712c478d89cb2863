"""With the real Megatron-Bridge beside this environment: its `pretrain()` with our checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.megatron_cases import packages

HERE = Path(__file__).parent
BRIDGE = HERE.parent.parent / ".venv" / "bridge"


@pytest.mark.skipif(not BRIDGE.is_dir(), reason=f"no Megatron-Bridge in {BRIDGE}")
def test_with_bridge(tmp_path: Path, run_python: Callable[..., str], inner_pytest: list[str]) -> None:
    # One process for all, because importing Bridge takes longer than most tests. It may not have made threads: ranks
    # are forked from it.
    path = [BRIDGE, *packages("0.19")]
    run_python(*inner_pytest, "--disable-warnings", "--basetemp", tmp_path / "inner", HERE / "with_bridge", path=path)
