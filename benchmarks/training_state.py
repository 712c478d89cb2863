"""A real megatron-core training, sized by what a checkpoint of it weighs. It runs on the current GPU, or on the CPU.

GPTModel in bfloat16 under DistributedDataParallel, DistributedOptimizer with Adam: main parameter and both moments in
float32, so 14 bytes a parameter over all ranks' files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_ckpt.cli.demo import tiny_trainer
from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu

BYTES_PER_PARAMETER = 2 + 3 * 4
TENSORS_PER_LAYER = 6 * 4
"""Norms, QKV, projection and both of the MLP; each as model parameter, main parameter and two moments."""

SEQUENCE_LENGTH = 16
SCHEDULE = {"max_lr": 1e-4, "min_lr": 1e-5, "lr_warmup_steps": 2, "lr_decay_steps": 1000}


@dataclass(frozen=True)
class Shape:
    num_layers: int
    hidden_size: int
    vocab_size: int
    sequence_length: int = SEQUENCE_LENGTH
    num_microbatches: int = 1


@dataclass(frozen=True)
class TrainingState:
    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    shape: Shape
    device: torch.device


def shape_of_size(gigabytes: float) -> Shape:
    """Layers as wide as those of a model that is trained, and as many as the size asks for."""
    parameters = gigabytes * 1e9 / BYTES_PER_PARAMETER
    hidden_size = 1024 if gigabytes >= 1 else 256
    vocab_size = 16384
    # GQA with a quarter as many key-value heads, gated MLP three times as wide (see _transformer_config).
    per_layer = 11.5 * hidden_size**2
    return Shape(max(1, round((parameters - 2 * vocab_size * hidden_size) / per_layer)), hidden_size, vocab_size)


def shape_of_tensors(tensors: int) -> Shape:
    """Very many, very small tensors."""
    return Shape(num_layers=max(1, round(tensors / TENSORS_PER_LAYER)), hidden_size=64, vocab_size=256)


def build(shape: Shape, tp: int = 1, pp: int = 1, fp8: bool = False, **optimizer_config: Any) -> TrainingState:
    """Every rank's training state, after one step: the optimizer has made its moments. What tp and pp leave is dp.

    Args:
        shape: the sizes of the model and of a step.
        tp, pp: the sizes of the tensor- and pipeline-parallel groups.
        fp8: whether the weights of linear layers are in FP8. Needs transformer-engine and a GPU that has FP8.
        optimizer_config: further settings of megatron's OptimizerConfig.
    """
    enable_cpu()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = _transformer_config(shape, tp, pp, fp8)
    specs = {"transformer_layer_spec": get_gpt_layer_with_transformer_engine_spec()} if fp8 else {}
    decoder = tiny_trainer.tiny_model(config, shape.vocab_size, shape.sequence_length, **specs).to(device)
    if not fp8:
        _fill(decoder)
    state = TrainingState(*tiny_trainer.trainable(config, decoder, SCHEDULE, **optimizer_config), shape, device)
    train_step(state)
    return state


def _transformer_config(shape: Shape, tp: int, pp: int, fp8: bool) -> TransformerConfig:
    return tiny_trainer.tiny_config(
        torch.bfloat16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=8,
        ffn_hidden_size=3 * shape.hidden_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # transformer-engine makes weights in FP8 on the GPU only.
        use_cpu_initialization=not fp8,
        # Megatron's draws each weight in float32 first, which takes longer than what is measured.
        perform_initialization=fp8,
        **({"fp8": "e4m3", "fp8_param": True} if fp8 else {}),
    )


def _fill(decoder: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in decoder.parameters():
            # Norms are ones already.
            if parameter.dim() > 1:
                parameter.uniform_(-0.03, 0.03)


def train_step(state: TrainingState) -> None:
    tiny_trainer.train_step(
        state.model,
        state.optimizer,
        state.scheduler,
        _batches(state),
        num_microbatches=state.shape.num_microbatches,
        micro_batch_size=1,
        seq_length=state.shape.sequence_length,
    )


def _batches(state: TrainingState) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        tokens = torch.randint(0, state.shape.vocab_size, (1, state.shape.sequence_length + 1), device=state.device)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def rank_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """What this rank has to save, as plain tensors under names of its own: its optimizer shard, a share of the model.

    As many bytes as this rank writes of a checkpoint: replicas share the model's file.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in _parameters(state):
        share = value.view(-1).tensor_split(ranks)[rank]
        if share.numel():
            tensors[f"model/{name}"] = share
    for name, adam in enumerate(_adams(state.optimizer)):
        parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            moments = {kind: adam.state[parameter][kind] for kind in ("exp_avg", "exp_avg_sq")}
            for kind, value in {"param": parameter.data, **moments}.items():
                tensors[f"optimizer{name}/{number}/{kind}"] = value
    return {f"rank{dist.get_rank()}/{name}": value for name, value in tensors.items()}


def _parameters(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in state.model:
        for name, parameter in chunk.named_parameters():
            yield name, parameter.data


def _adams(optimizer: Any) -> list[torch.optim.Optimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part.optimizer is not None]


def threads_of_rank() -> int:
    """As many as ours copies with, so that a ratio compares copies and not thread counts."""
    from mcore_ckpt.io.tuning import HOST_THREADS

    return min(HOST_THREADS, os.cpu_count() or 1)
