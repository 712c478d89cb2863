"""A GPTModel filled from a HuggingFace model computes what that one does: logits, or a critic's values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import NAMES, architecture_of

REPOSITORY = Path(__file__).parents[2]
DENSE = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("parity")
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / "support" / "parity.py"), str(folder), *NAMES],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    found: dict[str, float] = json.loads((folder / "differences.json").read_text())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(differences: dict[str, float], name: str) -> None:
    assert differences[name] <= (1e-5 if architecture_of(name) in DENSE else 2e-5)
