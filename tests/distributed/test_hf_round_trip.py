"""A HuggingFace folder into a live model, and what a save of that model exports: the same tensors, the same model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from agreement import everywhere
from checkpointing import TIMEOUT_S
from hf_models import Shape, assert_holds, build_model, global_tensors, read_tensors
from layouts import HAS_HYBRID
from tiers import marks
from tiny_models import make_hf_folder, read_config
from training import parallel
from transformers import AutoConfig

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.io import tuning
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.models import model_from_config, to_mcore_config

UNEVEN = {"pp": 2, "first_stage_layers": 1}

# A HybridModel of the same parts. Its stages end within the GPTModel's layers.
HYBRID = {
    "hybrid-linear-attention": ("qwen3_next", Shape(1, hybrid=True)),
    "hybrid-windows": ("gpt_oss", Shape(1, hybrid=True)),
    "hybrid-pp2-vpp2": ("qwen3", Shape(2, pp=2, vpp=2, hybrid=True)),
    "hybrid-mtp-pp2": ("glm4_moe-mtp", Shape(2, pp=2, hybrid=True)),
    "hybrid-shared-expert-tp2-ep2": ("qwen2_moe", Shape(4, tp=2, ep=2, hybrid=True)),
}

CASES: dict[str, tuple[str, Shape]] = {
    # one rank
    "value": ("llama-value", Shape(1)),
    "mla-mtp": ("deepseek_v3-mtp", Shape(1)),
    "mixture-bf16": ("mixtral", Shape(1, dtype=torch.bfloat16)),
    "biased-experts": ("gpt_oss", Shape(1)),
    # two ranks
    "tied-tp2-bf16": ("qwen2-tied", Shape(2, tp=2, dtype=torch.bfloat16)),
    "value-tp2": ("qwen3-value", Shape(2, tp=2)),
    "vpp2": ("qwen3", Shape(2, pp=2, vpp=2)),
    "shared-expert-ep2": ("qwen2_moe", Shape(2, ep=2)),
    "mixture-tp2-ep2-etp1": ("mixtral", Shape(2, tp=2, ep=2, etp=1)),
    "mla-tp2": ("deepseek_v3", Shape(2, tp=2)),
    "mla-pp2-uneven": ("deepseek_v3-no-q-lora", Shape(2, **UNEVEN)),
    "mtp-pp2": ("glm4_moe-mtp", Shape(2, pp=2)),
    "linear-attention-tp2": ("qwen3_next", Shape(2, tp=2)),
    # four ranks
    "value-tp2-pp2": ("qwen2-value", Shape(4, tp=2, pp=2)),
    "tied-tp2-vpp2": ("qwen3-tied", Shape(4, tp=2, pp=2, vpp=2)),
    "mixture-tp2-ep2": ("mixtral", Shape(4, tp=2, ep=2)),
    **(HYBRID if HAS_HYBRID else {}),
    "mixture-ep2-etp2": ("mixtral", Shape(4, ep=2, etp=2)),
    "shared-expert-tp2-pp2-ep2-etp1": ("qwen2_moe", Shape(4, tp=2, pp=2, ep=2, etp=1)),
    "mla-mtp-tp2-pp2-uneven": ("deepseek_v3-mtp", Shape(4, tp=2, **UNEVEN)),
    "mtp-tp2-ep2": ("glm4_moe-mtp", Shape(4, tp=2, ep=2)),
    "linear-attention-tp2-pp2": ("qwen3_next", Shape(4, tp=2, pp=2)),
    "biased-experts-tp2-ep2-etp1": ("gpt_oss", Shape(4, tp=2, ep=2, etp=1)),
}


# Each kind of attention, of layer and of cut once.
IN_CI = {
    "mla-mtp",
    "hybrid-linear-attention",
    "hybrid-mtp-pp2",
    "hybrid-windows",
    "biased-experts",
    "tied-tp2-bf16",
    "value-tp2",
    "vpp2",
    "mixture-tp2-ep2-etp1",
    "mla-pp2-uneven",
    "linear-attention-tp2",
    "shared-expert-tp2-pp2-ep2-etp1",
}


def marked(cases: dict[str, tuple[str, Shape]]) -> list[object]:
    return [pytest.param(*case, id=name, marks=marks(case[1].world, name in IN_CI)) for name, case in cases.items()]


@pytest.mark.parametrize(("name", "shape"), marked(CASES))
def test_a_folder_comes_back_through_a_live_model(
    name: str, shape: Shape, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small enough for every rank to write some of the export.
    monkeypatch.setattr(tuning, "HF_LEAST_FILE_BYTES", 1 << 12)
    folder = shared_path / "hf"
    with everywhere():
        if dist.get_rank() == 0:
            make_hf_folder(folder, name, dtype=str(shape.dtype).removeprefix("torch."))
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        load_hf(chunks, folder)
        with everywhere():
            # The rows that pad the vocabulary among it, which no export shows.
            assert_holds(chunks, global_tensors(folder, shape.hybrid))
        config = CheckpointConfig(save_contents=("model", "hf_model"), load_contents=("model",), timeout_s=TIMEOUT_S)
        root = shared_path / "root"
        manager = CheckpointManager(root, chunks, hf_config=AutoConfig.from_pretrained(folder), config=config)
        manager.save(1)
        manager.close()
        with everywhere():
            assert_same_model(root / "global_steps_1" / "actor" / "huggingface", folder)


def assert_same_model(folder: Path, wanted: Path) -> None:
    found, expected = read_tensors(folder), read_tensors(wanted)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert to_mcore_config(model_from_config(read_config(folder))) == to_mcore_config(
        model_from_config(read_config(wanted))
    )
