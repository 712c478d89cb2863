"""A megatron-core training loop that saves and loads with Megatron-LM's own functions, imported from mcore_ckpt.

    torchrun --standalone --nproc-per-node 2 examples/megatron_loop.py --save checkpoints --load checkpoints

Only the import from mcore_ckpt and the calls of the imported functions have to do with checkpoints. For a new loop,
start from plain_loop.py instead.
"""

import argparse

import torch.distributed as dist
from tiny_gpt import BATCH, LENGTH, build, train_step

from mcore_ckpt.integrations.megatron import configure, load_checkpoint, maybe_finalize_async_save, save_checkpoint


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
    """Parses the command line. The integration reads the arguments, so they have the names that Megatron-LM uses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", required=True)
    parser.add_argument("--load")
    parser.add_argument("--save-interval", type=int, default=2)
    parser.add_argument("--train-iters", type=int, default=20)
    parser.add_argument("--async-save", action="store_true")
    args = parser.parse_args()
    args.consumed_train_samples = 0
    return args


if __name__ == "__main__":
    main()
