"""Megatron-Bridge's adapters on grouped experts, with expert parallelism. A job of te_server.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors.torch import load_file

from mcore_ckpt import CheckpointConfig, CheckpointManager, load_hf
from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from mcore_ckpt.models import model_from_config, read_config
from mcore_ckpt.tools.convert.merge import MergeRequest, merge
from tests.support.bridge_peft import import_peft
from tests.support.tiny_models import make_hf_folder
from tests.te.hf_names import build

CONFIG = CheckpointConfig(save_contents=("model",), load_contents=("model",), skip_frozen=True, timeout_s=40.0)
# Arguments of Megatron-Bridge's LoRA: one adapter for all experts, or one for each.
KINDS: dict[str, dict[str, Any]] = {"shared": {}, "per-expert": {"share_expert_adapters": False}}
ALPHA, DIM = 6, 4


def main(root: Path, names: Sequence[str]) -> None:
    """On each rank, in its process group: out, back, and into another expert-parallel size."""
    if dist.get_rank() == 0:
        make_hf_folder(root / "hf", "qwen3_moe")
    dist.barrier()
    enable_cpu()
    world = dist.get_world_size()
    for name in names:
        for ep in (world, 1):
            parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, create_gloo_process_groups=False)
            model = adapted(root / "hf", KINDS[name], ep)
            if ep == world:
                there_and_back(root / name, root / "hf", model)
            else:
                into(root / name, root / "hf", model)
            parallel_state.destroy_model_parallel()


def adapted(folder: Path, arguments: dict[str, Any], ep: int) -> GPTModel:
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build(model_from_config(read_config(folder)), vocab_divisor=2, expert_model_parallel_size=ep)
    (model,) = import_peft("lora").LoRA(dim=DIM, alpha=ALPHA, **arguments)([model], training=True)
    generators = [
        torch.Generator().manual_seed(seed) for seed in (1, 2 + parallel_state.get_expert_model_parallel_rank())
    ]
    for parameter in adapters_of(model).values():
        generator = generators[parameter.dim() == 3]  # those of the rank's own experts
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def adapters_of(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if ".adapter." in name}


def there_and_back(root: Path, hf: Path, model: GPTModel) -> None:
    manager = CheckpointManager(root, model, config=CONFIG)
    manager.save(1)
    if dist.get_rank() == 0:
        merge(MergeRequest(root, root / "peft", hf_model_path=hf, adapters="only"))
    dist.barrier()
    assert_exported(load_file(root / "peft" / "adapter_model.safetensors"), model)
    before = {name: parameter.detach().clone() for name, parameter in adapters_of(model).items()}
    for load in (lambda: manager.load(), lambda: load_hf(model, root / "peft", base=hf)):
        for parameter in adapters_of(model).values():
            parameter.data.fill_(float("nan"))
        load()
        for name, parameter in adapters_of(model).items():
            assert torch.equal(parameter, before[name]), name
    manager.close()


def assert_exported(found: dict[str, torch.Tensor], model: GPTModel) -> None:
    """PEFT's form has one adapter for each projection of each expert."""
    layer = model.decoder.layers[0].mlp.experts.linear_fc1.adapter
    a, b = layer.linear_in.weight.detach(), layer.linear_out.weight.detach()
    first = parallel_state.get_expert_model_parallel_rank() * 2
    for expert in range(2):
        own_a, own_b = (tensor[expert] if tensor.dim() == 3 else tensor for tensor in (a, b))
        for projection, rows in zip(("gate_proj", "up_proj"), own_b.chunk(2), strict=True):
            prefix = f"base_model.model.model.layers.0.mlp.experts.{first + expert}.{projection}"
            assert torch.equal(found[f"{prefix}.lora_A.weight"], own_a), prefix
            assert torch.equal(found[f"{prefix}.lora_B.weight"], rows), prefix


def into(root: Path, hf: Path, model: GPTModel) -> None:
    """The checkpoint of the other layout, in the form that PEFT has, is the same again."""
    for parameter in adapters_of(model).values():
        parameter.data.fill_(float("nan"))
    manager = CheckpointManager(root, model, config=CONFIG)
    manager.load()
    manager.save(2)
    manager.close()
    if dist.get_rank() == 0:
        merge(MergeRequest(root, root / "again", step=2, hf_model_path=hf, adapters="only"))
        one, other = (load_file(root / name / "adapter_model.safetensors") for name in ("peft", "again"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    dist.barrier()
