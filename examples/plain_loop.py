"""A plain training loop with a CheckpointManager. Run it, kill it at any time, and run it again. It then resumes.

    torchrun --standalone --nproc-per-node 2 examples/plain_loop.py --checkpoints checkpoints

It trains a tiny GPTModel, on a CPU if there is no GPU. Four calls in `main` have to do with checkpoints:
`CheckpointManager`, `recover`, `manager.save` and `manager.close`.
"""

import argparse
from pathlib import Path

import torch.distributed as dist
from tiny_gpt import BATCH, build, train_step

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.recover import recover


def main() -> None:
    args = arguments()
    model, optimizer, scheduler = build()
    config = CheckpointConfig(async_save=True, max_to_keep=2)
    manager = CheckpointManager(args.checkpoints, model, optimizer, scheduler, config=config)

    # Without a checkpoint, recovery.step is None and nothing has been loaded.
    recovery = recover(manager)
    step = recovery.step or 0
    samples = recovery.results[manager.role].extra_state["samples"] if recovery.results else 0

    while step < args.steps:
        loss = train_step(model[0], optimizer, samples)
        scheduler.step(increment=1)
        step, samples = step + 1, samples + BATCH * dist.get_world_size()
        if step % args.save_every == 0:
            # `save` returns as soon as training can continue. The checkpoint is committed in the background.
            manager.save(step, extra_state={"samples": samples})
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss!r} samples {samples}", flush=True)

    manager.close()  # waits for the last save, and raises an error if that save failed
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder to save to and resume from")
    parser.add_argument("--save-every", type=int, default=5, metavar="N", help="save every N steps (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="train N steps (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
