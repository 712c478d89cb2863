"""HuggingFace tables hold for transformer-engine's layer specs: each tensor is there under one of its names."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
TINY_MODELS = str(REPOSITORY / "tests" / "support")
TRANSFORMER_ENGINE = Path(os.environ.get("MCORE_CKPT_TE", REPOSITORY / ".venv" / "te"))

pytestmark = pytest.mark.skipif(
    not TRANSFORMER_ENGINE.is_dir(), reason=f"no transformer-engine in {TRANSFORMER_ENGINE}"
)


def test_tables_name_every_tensor_of_a_transformer_engine_model(run_python: Callable[..., str]) -> None:
    run_python(HERE / "hf_names.py", TINY_MODELS, path=[TRANSFORMER_ENGINE])


# None is all models. The latent projections are whole on every tensor-parallel rank here, and cut with local layers.
@pytest.mark.parametrize(
    ("world", "models"), [(1, ()), (2, ("qwen2", "qwen2_moe", "deepseek_v3", "glm4_moe-mtp", "qwen3_next"))]
)
def test_folders_become_what_megatron_loads_and_come_back(
    world: int, models: tuple[str, ...], tmp_path: Path, run_python: Callable[..., str]
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}")
    command = (*torchrun, HERE / "hf_conversion.py", TINY_MODELS, tmp_path, *models)
    run_python(*command, path=[TRANSFORMER_ENGINE])
