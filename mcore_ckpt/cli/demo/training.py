"""Trains the demo's model. This module is also an example of a trainer that uses this package.

A small Qwen-like decoder learns to predict the source code of Python's standard library, byte by byte, on four ranks
(tensor parallel 2 x pipeline parallel 2). Everything that has to do with checkpoints is in `main`.

    torchrun --standalone --nproc-per-node 4 -m mcore_ckpt.cli.demo.training \
        --steps 20 --checkpoints checkpoints --progress progress.jsonl
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.cli.demo.huggingface import byte_tokenizer, hf_config
from mcore_ckpt.cli.demo.text import (
    MICRO_BATCH_SIZE,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    Batch,
    HeldOutText,
    StandardLibraryText,
)
from mcore_ckpt.recover import recover

TENSOR_PARALLEL = 2
PIPELINE_PARALLEL = 2
RANKS = TENSOR_PARALLEL * PIPELINE_PARALLEL

SEED = 1234
NUM_MICROBATCHES = 4
PEAK_LEARNING_RATE = 2e-3


def main() -> None:
    """Trains from the newest checkpoint, or from the beginning, to the last step."""
    args = parse_arguments()
    device = start_distributed()
    model, optimizer, lr_scheduler = build_training_state(device, args.steps)
    text = StandardLibraryText(device)
    progress = Progress(args.progress)
    step = 0

    manager = None
    if args.checkpoints:
        manager = CheckpointManager(
            args.checkpoints,
            model,
            optimizer,
            lr_scheduler,
            role="actor",
            hf_config=hf_config(),
            processing_class=byte_tokenizer(),
            config=CheckpointConfig(save_contents=("model", "optimizer", "extra", "hf_model"), max_to_keep=2),
        )
        recovery = recover(manager)
        if recovery.step is not None:
            extra_state = recovery.results["actor"].extra_state
            assert extra_state is not None, "every save below has an extra state"
            step, text.position = recovery.step, extra_state["data_position"]
            progress.report(resumed_from=step)

    while step < args.steps:
        loss = train_step(model, optimizer, lr_scheduler, text)
        step += 1
        progress.report(step=step, loss=loss)
        if manager and (step % args.save_every == 0 or step == args.steps):
            manager.save(step, extra_state={"data_position": text.position}).wait()
            progress.report(saved=step)

    if manager:
        manager.close()
    progress.report(held_out_loss=held_out_loss(model, device))
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--checkpoints", type=Path, help="folder to save to and resume from (if not given, no saves)")
    parser.add_argument("--progress", type=Path, required=True, help="file of JSON lines for the parent process")
    return parser.parse_args()


def start_distributed() -> torch.device:
    """Starts NCCL if there is a GPU for each rank, otherwise gloo on the CPU. Returns the device."""
    on_gpu = torch.cuda.device_count() >= RANKS
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu

        enable_cpu()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(TENSOR_PARALLEL, PIPELINE_PARALLEL, create_gloo_process_groups=True)
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def build_training_state(
    device: torch.device, steps: int
) -> tuple[list[DistributedDataParallel], MegatronOptimizer, OptimizerParamScheduler]:
    """Builds a Qwen3-like decoder of 6 million parameters (GQA, RMSNorm, SwiGLU, RoPE), its optimizer and schedule."""
    config = TransformerConfig(
        num_layers=8,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=2,
        ffn_hidden_size=768,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        # With dropout the losses depend on the random state. They would differ if it were not restored.
        hidden_dropout=0.1,
        attention_dropout=0.1,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        pipeline_model_parallel_size=PIPELINE_PARALLEL,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=device.type == "cpu",
        # The fused kernels need a GPU and transformer-engine or Apex, which the demo does not require.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    decoder = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQUENCE_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    ).to(device)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = [DistributedDataParallel(config, ddp_config, decoder)]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=PEAK_LEARNING_RATE,
        min_lr=PEAK_LEARNING_RATE / 10,
        weight_decay=0.01,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        params_dtype=torch.float32,
    )
    optimizer = get_megatron_optimizer(optimizer_config, model)
    lr_scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=PEAK_LEARNING_RATE,
        min_lr=PEAK_LEARNING_RATE / 10,
        lr_warmup_steps=max(1, steps // 5),
        lr_decay_steps=max(2, steps),
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer, lr_scheduler


def train_step(
    model: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    lr_scheduler: OptimizerParamScheduler,
    text: StandardLibraryText,
) -> float | None:
    """Trains one step. Returns the loss on the last pipeline stage, None on the other stages."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=text,
        model=list(model),
        num_microbatches=NUM_MICROBATCHES,
        seq_length=SEQUENCE_LENGTH,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_only=False,
    )
    optimizer.step()
    lr_scheduler.step(increment=1)
    losses = [float(output["loss"]) for output in outputs]
    return sum(losses) / len(losses) if losses else None


def held_out_loss(model: Sequence[DistributedDataParallel], device: torch.device) -> float | None:
    """Returns the mean loss on held-out text, without dropout, on the last pipeline stage; otherwise None."""
    for chunk in model:
        chunk.eval()
    text = HeldOutText(device)
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=text,
        model=list(model),
        num_microbatches=len(text),
        seq_length=SEQUENCE_LENGTH,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_only=True,
    )
    losses = [float(output["loss"]) for output in outputs]
    return sum(losses) / len(losses) if losses else None


def forward_step(text: Iterator[Batch], chunk: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
    """Computes the output of one micro-batch. Returns the output and the function that computes the loss from it."""
    tokens, labels = next(text)
    positions = torch.arange(SEQUENCE_LENGTH, device=tokens.device).expand_as(tokens)
    # The local attention uses the mask as given. True hides a position.
    mask = torch.ones(SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool, device=tokens.device).triu(1)[None, None]

    def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return losses.mean(), {"loss": losses.detach().mean()}

    return chunk(tokens, positions, mask, labels=labels), mean_loss


class Progress:
    """Reports process ids, losses and saves to the parent process. Each report is one line of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.append(rank=dist.get_rank(), pid=os.getpid())

    def report(self, **fields: Any) -> None:
        """Appends one line, but only on one rank of the last pipeline stage, which knows the loss."""
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            self.append(**fields)

    def append(self, **fields: Any) -> None:
        # Use a single write in append mode, so that the lines of several ranks never mix.
        with open(self.path, "ab", buffering=0) as stream:
            stream.write((json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    main()
