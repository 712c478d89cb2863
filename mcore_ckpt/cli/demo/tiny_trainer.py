"""Defines a tiny trainer with Megatron-core. The demo, the benchmarks and the tests share this trainer.

Its model is a Qwen-like decoder: grouped-query attention, RMSNorm, SwiGLU, RoPE, no biases. Callers choose the sizes,
and pass all other settings as fields of Megatron's own classes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_ckpt.cli.demo.text import Batch


def tiny_config(dtype: torch.dtype = torch.float32, **fields: Any) -> TransformerConfig:
    """Returns the configuration of the decoder.

    Args:
        dtype: the dtype of parameters, and of the activations that pipeline stages send each other.
        fields: fields of TransformerConfig, which replace the defaults below. The sizes have no defaults.
    """
    defaults: dict[str, Any] = {
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**defaults, **fields})


def tiny_model(config: TransformerConfig, vocab_size: int, max_sequence_length: int, **fields: Any) -> GPTModel:
    """Returns this rank's pipeline stage of the decoder, in the process groups of `parallel_state`.

    `fields` are arguments of GPTModel, such as another `transformer_layer_spec`.
    """
    defaults: dict[str, Any] = {
        "transformer_layer_spec": get_gpt_layer_local_spec(
            normalization=config.normalization, qk_layernorm=config.qk_layernorm
        ),
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "position_embedding_type": "rope",
    }
    return GPTModel(config, vocab_size=vocab_size, max_sequence_length=max_sequence_length, **{**defaults, **fields})


def trainable(
    config: TransformerConfig, decoder: GPTModel, schedule: dict[str, Any], **fields: Any
) -> tuple[list[DistributedDataParallel], MegatronOptimizer, OptimizerParamScheduler]:
    """Returns a model in DistributedDataParallel, with its distributed optimizer (Adam) and its schedule.

    Args:
        config: the configuration that the decoder was built with.
        decoder: the model on its device, in the dtype that it was built in.
        schedule: arguments of `tiny_scheduler`.
        fields: fields of OptimizerConfig, which replace the defaults below.
    """
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, fp8_param_gather=config.fp8_param
    )
    module = Float16Module(config, decoder) if config.bf16 or config.fp16 else decoder
    model = [DistributedDataParallel(config, ddp_config, module)]
    defaults: dict[str, Any] = {
        "optimizer": "adam",
        "lr": schedule["max_lr"],
        "min_lr": schedule["min_lr"],
        "bf16": config.bf16,
        "fp16": config.fp16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": True,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**defaults, **fields}), model)
    connect(config, optimizer)
    return model, optimizer, tiny_scheduler(optimizer, **schedule)


def connect(config: TransformerConfig, optimizer: MegatronOptimizer) -> None:
    """Sets the functions that Megatron's schedules call, as Megatron-LM does (`train` in training.py)."""
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss


def tiny_scheduler(optimizer: MegatronOptimizer, **fields: Any) -> OptimizerParamScheduler:
    """Returns a schedule with a warm-up from 0, a cosine decay, and a constant weight decay.

    `fields` are arguments of OptimizerParamScheduler, which replace the defaults below. `max_lr`, `min_lr`,
    `lr_warmup_steps` and `lr_decay_steps` have no defaults.
    """
    defaults: dict[str, Any] = {
        "init_lr": 0.0,
        "lr_decay_style": "cosine",
        "start_wd": 0.01,
        "end_wd": 0.01,
        "wd_incr_steps": 0,
        "wd_incr_style": "constant",
    }
    return OptimizerParamScheduler(optimizer, **{**defaults, **fields})


def train_step(
    model: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    lr_scheduler: OptimizerParamScheduler,
    batches: Iterator[Batch],
    *,
    num_microbatches: int,
    micro_batch_size: int,
    seq_length: int,
) -> list[torch.Tensor]:
    """Trains one step. Returns the losses, as `run_microbatches` does."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = run_microbatches(
        model,
        batches,
        num_microbatches=num_microbatches,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
    )
    optimizer.step()
    lr_scheduler.step(increment=1)
    return losses


def run_microbatches(
    model: Sequence[DistributedDataParallel],
    batches: Iterator[Batch] | Sequence[Iterator[Batch]],
    *,
    num_microbatches: int,
    micro_batch_size: int,
    seq_length: int,
    forward_only: bool = False,
) -> list[torch.Tensor]:
    """Computes the losses of micro-batches and, unless `forward_only`, their gradients.

    Args:
        model: the chunks of this rank.
        batches: an iterator of micro-batches, or one iterator for each chunk if there are several chunks.

    Returns:
        On the last pipeline stage the mean loss of each micro-batch, a float scalar on the model's device. On other
        stages an empty list.
    """
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=list(model),
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )
    return [output["loss"] for output in outputs]


def forward_step(
    batches: Iterator[Batch], chunk: DistributedDataParallel
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Computes the output of one micro-batch. Returns the output and the function that computes the loss from it."""
    tokens, labels = next(batches)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # No mask is needed, because the layer spec makes attention causal.
    output = chunk(tokens, positions, None, labels=labels)
    return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})
