"""Trains the demo's model. This module is also an example of a trainer that uses this package.

A small Qwen-like decoder learns to predict the source code of Python's standard library, byte by byte, on four ranks
(tensor parallel 2 x pipeline parallel 2). Everything that has to do with checkpoints is in `main`. `tiny_trainer.py`
builds the decoder and trains it.

    torchrun --standalone --nproc-per-node 4 -m mcore_ckpt.cli.demo.training \
        --steps 20 --checkpoints checkpoints --progress progress.jsonl
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.cli.demo.huggingface import byte_tokenizer, hf_config
from mcore_ckpt.cli.demo.text import MICRO_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, HeldOutText, StandardLibraryText
from mcore_ckpt.cli.demo.tiny_trainer import run_microbatches, tiny_config, tiny_model, train_step, trainable
from mcore_ckpt.recover import recover

TENSOR_PARALLEL = 2
PIPELINE_PARALLEL = 2
RANKS = TENSOR_PARALLEL * PIPELINE_PARALLEL

SEED = 1234
NUM_MICROBATCHES = 4
MICRO_BATCH = {"micro_batch_size": MICRO_BATCH_SIZE, "seq_length": SEQUENCE_LENGTH}
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
        losses = train_step(model, optimizer, lr_scheduler, text, num_microbatches=NUM_MICROBATCHES, **MICRO_BATCH)
        step += 1
        progress.report(step=step, loss=mean(losses))
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


def start_distributed(
    tensor_parallel_size: int = TENSOR_PARALLEL, pipeline_parallel_size: int = PIPELINE_PARALLEL
) -> torch.device:
    """Starts NCCL if there is a GPU for each rank, otherwise gloo on the CPU. Returns the device."""
    on_gpu = torch.cuda.device_count() >= RANKS
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu

        enable_cpu()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(
        tensor_parallel_size, pipeline_parallel_size, create_gloo_process_groups=True
    )
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def build_training_state(
    device: torch.device, steps: int, num_layers: int = 8
) -> tuple[list[DistributedDataParallel], MegatronOptimizer, OptimizerParamScheduler]:
    """Builds a Qwen3-like decoder of 6 million parameters (GQA, RMSNorm, SwiGLU, RoPE), its optimizer and schedule."""
    config = tiny_config(
        num_layers=num_layers,
        hidden_size=256,
        num_attention_heads=8,
        ffn_hidden_size=768,
        qk_layernorm=True,
        # With dropout the losses depend on the random state. So the losses would differ if the random state were not
        # restored.
        hidden_dropout=0.1,
        attention_dropout=0.1,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        use_cpu_initialization=device.type == "cpu",
    )
    decoder = tiny_model(config, VOCAB_SIZE, SEQUENCE_LENGTH, share_embeddings_and_output_weights=True).to(device)
    schedule = {
        "max_lr": PEAK_LEARNING_RATE,
        "min_lr": PEAK_LEARNING_RATE / 10,
        "lr_warmup_steps": max(1, steps // 5),
        "lr_decay_steps": max(2, steps),
    }
    return trainable(config, decoder, schedule)


def held_out_loss(model: Sequence[DistributedDataParallel], device: torch.device) -> float | None:
    """Returns the mean loss on held-out text, without dropout, on the last pipeline stage; otherwise None."""
    for chunk in model:
        chunk.eval()
    text = HeldOutText(device)
    return mean(run_microbatches(model, text, num_microbatches=len(text), forward_only=True, **MICRO_BATCH))


def mean(losses: Sequence[torch.Tensor]) -> float | None:
    """Returns the mean of the micro-batches' losses; None on ranks that have no losses."""
    return sum(map(float, losses)) / len(losses) if losses else None


class Progress:
    """Reports process ids, losses and saves to the parent process. Each report is one line of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.append(rank=dist.get_rank(), pid=os.getpid())

    def report(self, **fields: Any) -> None:
        """Appends one line on one rank of the last pipeline stage. Does nothing on other ranks.

        Only the ranks of the last stage know the loss.
        """
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            self.append(**fields)

    def append(self, **fields: Any) -> None:
        # Use a single write in append mode, so that the lines of several ranks never mix.
        with open(self.path, "ab", buffering=0) as stream:
            stream.write((json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    main()
