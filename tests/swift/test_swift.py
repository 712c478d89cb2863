"""With the real ms-swift beside this environment: its pipelines, arguments and trainers with our checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.megatron_cases import packages

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent.parent / ".venv"
# Beside the environment, not in it: it wants an older peft, and with verl's packages an older transformers.
SWIFT = Path(os.environ.get("MCORE_CKPT_SWIFT", ENVIRONMENT / "swift"))


@pytest.mark.skipif(not SWIFT.is_dir(), reason=f"no ms-swift in {SWIFT}")
def test_with_swift(tmp_path: Path, run_python: Callable[..., str], inner_pytest: list[str]) -> None:
    path = [SWIFT, ENVIRONMENT / "verl", *packages("0.19")]
    # One process for all, because importing ms-swift takes longer than any test. It may not have made threads: ranks
    # are forked from it.
    run_python(*inner_pytest, "--disable-warnings", "--basetemp", tmp_path / "inner", HERE / "with_swift", path=path)


def test_without_swift_it_says_what_is_missing(run_python: Callable[..., str]) -> None:
    code = "\n".join(
        (
            "try:",
            "    import mcore_ckpt.integrations.swift",
            "except ImportError as error:",
            "    print(error)",
        )
    )
    assert "needs ms-swift and mcore-bridge: pip install 'ms-swift[megatron]'" in run_python("-c", code)
