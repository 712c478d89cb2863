"""HuggingFace folders into transformer-engine models, in two ways, and out again. A job of te_server.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors.torch import load_file
from transformers import AutoConfig

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.models import HfModel, model_from_config, read_config, to_mcore_config
from mcore_ckpt.models.reconcile import with_mtp_of
from mcore_ckpt.ranks.meeting import rendezvous
from mcore_ckpt.tools.convert.to_torch_dist import convert_to_torch_dist
from tests.support.tiny_models import make_hf_folder
from tests.te.hf_names import build
from tests.te.te_on_cpu import do_without_fla

CONFIG = CheckpointConfig(save_contents=("hf_model",), load_contents=("model",), timeout_s=40.0)


def main(root: Path, names: Sequence[str]) -> None:
    """On each rank, in its process group: every model there and back; `root` is for folders and checkpoints."""
    world = dist.get_world_size()
    # Made before CUDA seems to be there: transformers asks, too.
    if dist.get_rank() == 0:
        for name in names:
            make_hf_folder(root / name / "hf", name)
    dist.barrier()
    enable_cpu()
    do_without_fla()
    for name in names:
        # Only the tensors of Qwen3-Next show its multi-token prediction.
        model = with_mtp_of(model_from_config(read_config(root / name / "hf")), tensors_in(root / name / "hf"))
        experts = {"expert_model_parallel_size": world, "expert_tensor_parallel_size": 1}
        sizes = {"tensor_model_parallel_size": world, **(experts if "experts" in model.sizes else {})}
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        there_and_back(root / name, name, model, sizes)
        parallel_state.destroy_model_parallel()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def there_and_back(root: Path, name: str, hf_model: HfModel, sizes: dict[str, int]) -> None:
    folder = root / "hf"
    loaded, restored = poisoned(hf_model, sizes), poisoned(hf_model, sizes)
    load_hf(loaded, folder)
    convert_to_torch_dist(folder, root / "dist", rendezvous(f"te/{name}", 40.0))
    restored.load_state_dict(dist_checkpointing.load(restored.sharded_state_dict(), str(root / "dist")))
    assert_same(name, tensors_of(restored), tensors_of(loaded))
    export(root / "steps", loaded, folder)
    exported = root / "steps" / "global_steps_1" / "actor" / "huggingface"
    assert_same(name, tensors_in(exported), tensors_in(folder))
    described = with_mtp_of(model_from_config(read_config(exported)), tensors_in(exported))
    assert to_mcore_config(described) == to_mcore_config(hf_model), name


def poisoned(hf_model: HfModel, sizes: dict[str, int]) -> GPTModel:
    """With NaN in what a checkpoint must fill. Rows that pad the vocabulary have no counterpart there: zeros."""
    model: GPTModel = build(hf_model, vocab_divisor=2 * dist.get_world_size(), **sizes)
    for key, tensor in tensors_of(model).items():
        padded = key.startswith(("embedding.word_embeddings.", "output_layer."))
        tensor.data.fill_(0.0 if padded else float("nan"))
    return model


def tensors_of(model: GPTModel) -> dict[str, torch.Tensor]:
    found = model.state_dict(keep_vars=True).items()
    return {key: tensor for key, tensor in found if isinstance(tensor, torch.Tensor) and "_extra_state" not in key}


def export(root: Path, model: GPTModel, folder: Path) -> None:
    manager = CheckpointManager(root, model, hf_config=AutoConfig.from_pretrained(folder), config=CONFIG)
    manager.save(1)
    manager.close()


def assert_same(name: str, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys(), f"{name}: {sorted(found.keys() ^ wanted.keys())}"
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype, f"{name}: {key}"
        # NaN, which a tensor that was not filled has, is not equal to itself.
        assert torch.equal(found[key], tensor), f"{name}: {key}"
