"""Transformer-engine's models: their names and opaque states go through a checkpoint as they are, and the HuggingFace
tables hold for their layer specs: each tensor is there under one of its names."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.support.bridge_peft import BRIDGE
from tests.support.tiny_models import NAMES, has_tower, megatron_has

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
# Installed beside the environment, not in it: megatron takes TE wherever it can be imported.
TRANSFORMER_ENGINE = Path(os.environ.get("MCORE_CKPT_TE", REPOSITORY / ".venv" / "te"))

pytestmark = pytest.mark.skipif(
    not TRANSFORMER_ENGINE.is_dir(), reason=f"no transformer-engine in {TRANSFORMER_ENGINE}"
)


@dataclass(frozen=True)
class Job:
    """What te_server.py runs: `name` on `world` ranks, with `folder` and `models`; the ranks' output goes to `log`."""

    name: str
    world: int
    folder: str
    models: list[str]
    log: str


class Server:
    def __init__(self) -> None:
        path = [REPOSITORY, TRANSFORMER_ENGINE, REPOSITORY / "tests" / "support" / "stand_ins"]
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "te_server.py")],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ["PYTHONPATH"]]),
                # The ranks share two cores, and may not share a GPU.
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, folder: Path, models: list[str], world: int = 1) -> None:
        """Fails the test unless all ranks end well."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log = folder / "log"
        self._process.stdin.write(json.dumps(asdict(Job(name, world, str(folder), models, str(log)))) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server has ended; what it said is above"
        assert json.loads(answer) == [0] * world, log.read_text()

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


# -- names and opaque states ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "models"), [(1, ["dense", "moe", "dense-specs", "moe-specs"]), (2, ["pp2", "ep2"])])
def test_round_trip(world: int, models: list[str], server: Server, tmp_path: Path) -> None:
    server.run("round_trip", tmp_path, models, world)


# -- adapters ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not BRIDGE.is_dir(), reason=f"no Megatron-Bridge in {BRIDGE}")
def test_adapters_of_grouped_experts(server: Server, tmp_path: Path) -> None:
    server.run("expert_adapters", tmp_path, ["shared", "per-expert"], world=2)


# -- HuggingFace's tables ---------------------------------------------------------------------------------------

# MiniMax's norms of queries and keys cover all heads, and megatron's specs have none that do. tests/distributed has
# them with local layers.
LANGUAGE_MODELS = [
    name for name in NAMES if not name.endswith("-value") and name != "minimax_m2" and megatron_has(name)
]


def test_tables_name_every_tensor_of_a_transformer_engine_model(server: Server, tmp_path: Path) -> None:
    server.run("hf_names", tmp_path, LANGUAGE_MODELS)


# CI runs each architecture once, on one rank or on two. Towers have no layers of transformer-engine here. The latent
# projections are whole on every tensor-parallel rank here, and cut with local layers.
IN_CI_ON_ONE = ["llama-tied", "mistral", "qwen2", "qwen3", "qwen3_moe-sparse", "mixtral", "gpt_oss", "glm4_moe-mtp"]
IN_CI_ON_ONE += filter(megatron_has, ["nemotron_h-latent"])
ON_TWO = ["qwen2_moe", "deepseek_v3", "qwen3_next", *filter(megatron_has, ["nemotron_h-mtp"])]
# Where there are no latent queries, 0.19 puts a norm before `linear_q_proj` that no published model has
# (QKNormConfigResolver), so load_hf refuses these models. tests/distributed has it with local layers.
REFUSED = ("deepseek_v3-no-q-lora", "deepseek_v2-lite")


@pytest.mark.parametrize(
    ("world", "models"),
    [
        pytest.param(1, IN_CI_ON_ONE, id="one rank"),
        pytest.param(2, ON_TWO, id="two ranks", marks=pytest.mark.full),
        pytest.param(
            1,
            [name for name in LANGUAGE_MODELS if name not in (*IN_CI_ON_ONE, *REFUSED) and not has_tower(name)],
            id="one rank, the others",
            marks=pytest.mark.full,
        ),
        pytest.param(2, ["qwen2", "glm4_moe-mtp"], id="two ranks, the others", marks=pytest.mark.full),
    ],
)
def test_folders_become_what_megatron_loads_and_come_back(
    world: int, models: list[str], server: Server, tmp_path: Path
) -> None:
    server.run("hf_conversion", tmp_path, models, world)
