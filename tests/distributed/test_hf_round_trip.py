"""A HuggingFace folder into a live model, and what a save of that model exports: the same tensors, the same model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.io import tuning
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.models import model_from_config, to_mcore_config
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import TIMEOUT_S
from tests.distributed.hf_models import Shape, assert_holds, build_model, global_tensors, read_tensors
from tests.distributed.layouts import HAS_HYBRID, HAS_SPARSE
from tests.distributed.tiers import marks
from tests.distributed.training import parallel
from tests.support.tiny_models import make_hf_folder, read_config

UNEVEN = {"pp": 2, "first_stage_layers": 1}

# A HybridModel of the same parts. Its stages end within the GPTModel's layers.
HYBRID = {
    "hybrid-linear-attention": ("qwen3_next", Shape(1, hybrid=True)),
    "hybrid-separate-projections": ("qwen3_5_moe_text", Shape(1, hybrid=True)),
    "hybrid-separate-projections-mtp-pp2": ("qwen3_5_text-mtp", Shape(2, pp=2, hybrid=True)),
    "hybrid-norms-of-all-heads-tp2": ("minimax_m2", Shape(2, tp=2, hybrid=True)),
    "hybrid-windows": ("gpt_oss", Shape(1, hybrid=True)),
    "hybrid-pp2-vpp2": ("qwen3", Shape(2, pp=2, vpp=2, hybrid=True)),
    "hybrid-mtp-pp2": ("glm4_moe-mtp", Shape(2, pp=2, hybrid=True)),
    "hybrid-shared-expert-tp2-ep2": ("qwen2_moe", Shape(4, tp=2, ep=2, hybrid=True)),
}

# Its layers are of each kind, so that each stage has other ones.
NEMOTRON_H = {
    "nemotron-h-mtp": ("nemotron_h-mtp", Shape(1)),
    "nemotron-h-tp2": ("nemotron_h", Shape(2, tp=2)),
    "nemotron-h-pp2-uneven": ("nemotron_h", Shape(2, **UNEVEN)),
    "nemotron-h-mtp-tp2-pp2-vpp2": ("nemotron_h-mtp", Shape(4, tp=2, pp=2, vpp=2)),
    "nemotron-h-tp2-ep2": ("nemotron_h", Shape(4, tp=2, ep=2)),
}
SPARSE = {
    "sparse-mtp": ("deepseek_v32-mtp", Shape(1)),
    "sparse-shared-tp2": ("glm_moe_dsa-shared", Shape(2, tp=2)),
    "sparse-tp2-pp2-ep2-etp1": ("glm_moe_dsa", Shape(4, tp=2, pp=2, ep=2, etp=1)),
    "sparse-vpp2": ("deepseek_v32", Shape(2, pp=2, vpp=2)),
}

CASES: dict[str, tuple[str, Shape]] = {
    # one rank
    "value": ("llama-value", Shape(1)),
    "mla-mtp": ("deepseek_v3-mtp", Shape(1)),
    "mixture-bf16": ("mixtral", Shape(1, dtype=torch.bfloat16)),
    "biased-experts": ("gpt_oss", Shape(1)),
    "tower-of-mbridge": ("qwen2_5_vl", Shape(1, tower="megatron")),
    # two ranks
    "tower-tp2": ("qwen2_5_vl-tied", Shape(2, tp=2)),
    "tower-pp2-bf16": ("qwen2_5_vl", Shape(2, pp=2, dtype=torch.bfloat16)),
    "tower-of-mbridge-tp2": ("qwen2_5_vl", Shape(2, tp=2, tower="megatron")),
    "tower-of-megatron-tp2": ("qwen3_vl", Shape(2, tp=2)),
    "tower-of-megatron-vpp2": ("qwen3_vl-tied", Shape(2, pp=2, vpp=2)),
    "tower-of-transformers-tp2": ("qwen3_vl", Shape(2, tp=2, tower="transformers")),
    "tower-mixture-ep2": ("qwen3_vl_moe", Shape(2, ep=2)),
    "tower-linear-attention-tp2": ("qwen3_5", Shape(2, tp=2)),
    "tower-linear-attention-ep2": ("qwen3_5_moe", Shape(2, ep=2)),
    "tower-of-its-own-tp2": ("kimi_k25", Shape(2, tp=2)),
    "tower-of-its-own-pp2-vpp2": ("kimi_k25", Shape(2, pp=2, vpp=2)),
    "tied-tp2-bf16": ("qwen2-tied", Shape(2, tp=2, dtype=torch.bfloat16)),
    "value-tp2": ("qwen3-value", Shape(2, tp=2)),
    "vpp2": ("qwen3", Shape(2, pp=2, vpp=2)),
    "shared-expert-ep2": ("qwen2_moe", Shape(2, ep=2)),
    "mixture-tp2-ep2-etp1": ("mixtral", Shape(2, tp=2, ep=2, etp=1)),
    "mla-tp2": ("deepseek_v3", Shape(2, tp=2)),
    "mla-pp2-uneven": ("deepseek_v3-no-q-lora", Shape(2, **UNEVEN)),
    "mtp-pp2": ("glm4_moe-mtp", Shape(2, pp=2)),
    "linear-attention-tp2": ("qwen3_next", Shape(2, tp=2)),
    "separate-projections-mtp-tp2": ("qwen3_5_text-mtp", Shape(2, tp=2)),
    "separate-projections-mtp-pp2-vpp2": ("qwen3_5_text-mtp", Shape(2, pp=2, vpp=2)),
    "norms-of-all-heads-tp2": ("minimax_m2", Shape(2, tp=2)),
    "softmax-mla-tp2": ("deepseek_v2", Shape(2, tp=2)),
    "softmax-mla-pp2-uneven": ("deepseek_v2-lite", Shape(2, **UNEVEN)),
    "biased-vpp2": ("seed_oss", Shape(2, pp=2, vpp=2)),
    # four ranks
    "tower-tp2-pp2": ("qwen2_5_vl", Shape(4, tp=2, pp=2)),
    "tower-of-megatron-tp2-pp2": ("qwen3_vl", Shape(4, tp=2, pp=2)),
    "tower-mixture-tp2-pp2-ep2": ("qwen3_vl_moe", Shape(4, tp=2, pp=2, vpp=2, ep=2, etp=1)),
    "value-tp2-pp2": ("qwen2-value", Shape(4, tp=2, pp=2)),
    "tied-tp2-vpp2": ("qwen3-tied", Shape(4, tp=2, pp=2, vpp=2)),
    "mixture-tp2-ep2": ("mixtral", Shape(4, tp=2, ep=2)),
    **(HYBRID | NEMOTRON_H if HAS_HYBRID else {}),
    **(SPARSE if HAS_SPARSE else {}),
    "mixture-ep2-etp2": ("mixtral", Shape(4, ep=2, etp=2)),
    "shared-expert-tp2-pp2-ep2-etp1": ("qwen2_moe", Shape(4, tp=2, pp=2, ep=2, etp=1)),
    "mla-mtp-tp2-pp2-uneven": ("deepseek_v3-mtp", Shape(4, tp=2, **UNEVEN)),
    "mtp-tp2-ep2": ("glm4_moe-mtp", Shape(4, tp=2, ep=2)),
    "linear-attention-tp2-pp2": ("qwen3_next", Shape(4, tp=2, pp=2)),
    "separate-projections-mtp-tp2-ep2": ("qwen3_5_moe_text-mtp", Shape(4, tp=2, ep=2)),
    "separate-projections-mtp-tp2-pp2-ep2-etp1": ("qwen3_5_moe_text-mtp", Shape(4, tp=2, pp=2, ep=2, etp=1)),
    "norms-of-all-heads-tp4": ("minimax_m2", Shape(4, tp=4)),
    "norms-of-all-heads-tp2-pp2-uneven-ep2-etp1": ("minimax_m2", Shape(4, tp=2, ep=2, etp=1, **UNEVEN)),
    "softmax-mla-tp2-ep2": ("deepseek_v2", Shape(4, tp=2, ep=2)),
    "biased-tp2-pp2": ("seed_oss", Shape(4, tp=2, pp=2)),
    "biased-experts-tp2-ep2-etp1": ("gpt_oss", Shape(4, tp=2, ep=2, etp=1)),
}


# Each kind of attention, of layer and of cut once.
IN_CI = {
    "mla-mtp",
    "hybrid-linear-attention",
    "hybrid-mtp-pp2",
    "hybrid-windows",
    "biased-experts",
    "nemotron-h-mtp-tp2-pp2-vpp2",
    "sparse-shared-tp2",
    "tied-tp2-bf16",
    "value-tp2",
    "vpp2",
    "mixture-tp2-ep2-etp1",
    "mla-pp2-uneven",
    "linear-attention-tp2",
    "separate-projections-mtp-tp2",
    "norms-of-all-heads-tp2",
    "shared-expert-tp2-pp2-ep2-etp1",
    "tower-tp2",
    "tower-of-mbridge-tp2",
    "tower-mixture-tp2-pp2-ep2",
    "tower-of-its-own-tp2",
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
            assert_holds(chunks, global_tensors(folder, shape.hybrid, shape.tower))
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
