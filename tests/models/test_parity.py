"""A megatron model filled from a HuggingFace model computes what that one does: logits, or a critic's values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import NAMES, architecture_of, computes_images, megatron_has

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
DENSE = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "qwen2_5_vl", "qwen3_vl")
# Their logits, of up to 5, change by 1e-4 if the last bit of the embedding changes: each CPU adds in another order. A
# tensor in a wrong place changes them by more than 1.
DELTA_NETS = ("qwen3_next", "qwen3_5")

# Megatron builds the projection before and after experts only with transformer-engine (MoELayer, 0.16 to 0.19).
NEEDS_TE = frozenset({"nemotron_h-latent"})
COMPUTED = tuple(name for name in NAMES if name not in NEEDS_TE and megatron_has(name))

# What these compute, another model of the same architecture computes in CI, or one that differs in the same way.
REPEATED = frozenset(
    {
        "llama-tied",
        "mistral",
        "qwen2",
        "qwen2-value",
        "qwen3-tied",
        "qwen3-value",
        "qwen3_moe",
        "deepseek_v3",
        "deepseek_v3-mtp",
        "glm4_moe-mtp",
        "nemotron_h-mtp",
        "deepseek_v32-mtp",
        "glm_moe_dsa",
        "seed_oss-value",
        "qwen3_5_text",
        "qwen3_next-mtp",
        "qwen3_5_moe_text-mtp",
        "qwen3_5_moe",
        "deepseek_v2-lite",
        "qwen2_5_vl-tied",
        "qwen3_vl",
        "qwen3_vl-tied",
    }
)


@pytest.fixture(scope="module")
def differences(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("parity")
    names = [name for name in COMPUTED if name not in REPEATED or pytestconfig.getoption("full")]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / "support" / "parity.py"), str(folder), *names],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    found: dict[str, float] = json.loads((folder / "differences.json").read_text())
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in REPEATED else ()) for name in COMPUTED]
)
def test_logits_are_those_of_transformers(differences: dict[str, float], name: str) -> None:
    architecture = architecture_of(name)
    most = 1e-5 if architecture in DENSE else 2e-4 if architecture.startswith(DELTA_NETS) else 2e-5
    assert differences[name] <= most


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in REPEATED else ()) for name in NAMES if computes_images(name)],
)
def test_images_are_to_it_what_they_are_to_transformers(differences: dict[str, float], name: str) -> None:
    assert differences[f"{name} image"] <= 1e-5
