"""A plain loop of megatron-core, as people write it without Megatron-LM's trainer. What has to do with checkpoints are
the import, `configure`, and one line each in `main` to load and to save: the two functions are Megatron-LM's.

    torchrun --standalone --nproc-per-node 2 examples/megatron_loop.py --save checkpoints --load checkpoints
"""

import argparse

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

from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from mcore_ckpt.integrations.megatron import configure, load_checkpoint, maybe_finalize_async_save, save_checkpoint

VOCABULARY, LENGTH, BATCH = 64, 32, 4


def main() -> None:
    args = arguments()
    configure(args)
    model, optimizer, scheduler = build()
    iteration, operations = load_checkpoint(model, optimizer, scheduler)
    while iteration < args.train_iters:
        loss = train_step(model[0], optimizer, args.consumed_train_samples)
        scheduler.step(increment=1)
        iteration, operations = iteration + 1, operations + 6 * BATCH * LENGTH
        args.consumed_train_samples += BATCH * dist.get_world_size()
        if iteration % args.save_interval == 0:
            save_checkpoint(iteration, model, optimizer, scheduler, operations)
        maybe_finalize_async_save(blocking=False)
        if dist.get_rank() == 0:
            print(f"iteration {iteration} loss {loss!r} samples {args.consumed_train_samples}", flush=True)
    maybe_finalize_async_save(blocking=True, terminate=True)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    """By Megatron-LM's names: the integration reads them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", required=True)
    parser.add_argument("--load")
    parser.add_argument("--save-interval", type=int, default=2)
    parser.add_argument("--train-iters", type=int, default=20)
    parser.add_argument("--async-save", action="store_true")
    args = parser.parse_args()
    args.consumed_train_samples = 0
    return args


def build() -> tuple[list[DistributedDataParallel], MegatronOptimizer, OptimizerParamScheduler]:
    """Two layers, data-parallel, with a distributed optimizer; on the CPU where there is no GPU."""
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
        # The fused kernels come with apex and transformer-engine.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
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
    """What the model learns is to count."""
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


if __name__ == "__main__":
    main()
