"""Adapters of Megatron-Bridge go out in PEFT's form, or merged, and compute the same there; and they come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.adapter_parity import CASES
from tests.support.bridge_peft import BRIDGE

REPOSITORY = Path(__file__).parents[2]

# tests/distributed has the same adapters in CI: their tensors, and not what PEFT computes with them.
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not BRIDGE.is_dir(), reason=f"no Megatron-Bridge in {BRIDGE}"),
]


@pytest.fixture(scope="module")
def differences(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("adapters")
    names = [name for name, case in CASES.items() if case.in_ci or pytestconfig.getoption("full")]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / "support" / "adapter_parity.py"), str(folder), *names],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    found: dict[str, dict[str, float]] = json.loads((folder / "differences.json").read_text())
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if case.in_ci else pytest.mark.full) for name, case in CASES.items()]
)
def test_adapters_compute_the_same_and_come_back(differences: dict[str, dict[str, float]], name: str) -> None:
    found = differences[name]
    assert found["peft"] <= 2e-5
    assert found["merged"] <= 2e-5
    # Bit for bit: adapters that were saved alone, adapters that came back, the base that was filled below them.
    assert (found["alone"], found["loaded"], found["base"]) == (0, 0, 0)
