"""Builds the tiny GPTModel that the examples train, and trains it for one step. It runs on a CPU if there is no GPU."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_ckpt.cli.demo import enable_cpu

VOCABULARY, LENGTH, BATCH = 64, 32, 4


def build() -> tuple[list[DistributedDataParallel], MegatronOptimizer, OptimizerParamScheduler]:
    """Builds a data-parallel model of two layers, a distributed optimizer and a learning rate schedule."""
    enable_cpu()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH).cuda()
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = [DistributedDataParallel(config, ddp_config, gpt)]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-4, use_distributed_optimizer=True), model
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_steps=100,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.1,
        wd_incr_steps=100,
        wd_incr_style="linear",
    )
    return model, optimizer, scheduler


def train_step(model: DistributedDataParallel, optimizer: MegatronOptimizer, first_sample: int) -> float:
    """Trains one step and returns the loss of this rank's samples. The model learns to count.

    Args:
        model: the data-parallel model.
        optimizer: the model's optimizer.
        first_sample: how many samples all ranks together have seen before this step.
    """
    model.zero_grad_buffer()
    optimizer.zero_grad()
    samples = torch.arange(BATCH).cuda() + first_sample + BATCH * dist.get_rank()
    tokens = (samples[:, None] + torch.arange(LENGTH + 1).cuda()) % VOCABULARY
    positions = torch.arange(LENGTH).cuda().expand(BATCH, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).cuda()[None, None]
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    return float(loss.detach())
