"""Trainings of tests/distributed, with mcore_ckpt on the emulated GPU: other_states.py FOLDER CASE...

Quantized weights are their stand-in (tests/support/quantized.py). Of an optimizer that is offloaded, what it has on the
host is host memory for mcore_ckpt, too, and all else is memory of the GPU.
"""

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.cuda import emulation

# isort: split
from tests.distributed.checkpointing import manager_of
from tests.distributed.snapshot import assert_same, chained, poison, snapshot
from tests.distributed.training import Layout, Training, build, parallel, train

FOLDER = Path(sys.argv[1])
LAYOUTS: dict[str, dict[str, Any]] = {
    "blockwise": {"quantized": "blockwise"},
    "delayed": {"quantized": "delayed"},
    "offload": {"offload": 0.5},
    "offload_overlap": {"offload": 0.5, "offload_overlap": True, "precision_aware": True},
}


def saves_are_whole(name: str, layout: Layout, mode: str) -> None:
    """Saves, trains on while the copies are made, and loads into state that was spoiled."""
    training = build(layout, seed=1)
    train(training, 0, 2)
    root, step = FOLDER / f"{name}-{mode}", 2
    with closing(manager_of(training, root, async_save=True, async_mode=mode)) as manager:
        for _ in range(int(os.environ.get("ROUNDS", "2"))):
            emulation.on_host = host_storages(training)
            before = snapshot(training)
            handle = manager.save(step)
            train(training, step, step + 2)
            handle.wait()
            poison(training)
            manager.load(step=step)
            assert_same(snapshot(training), before)
            train(training, step, step + 1)
            step += 1


def host_storages(training: Training) -> set[int]:
    """The addresses of what an optimizer keeps on the host."""
    found: set[int] = set()
    for part in chained(training.optimizer):
        for optimizer in getattr(part.optimizer, "cpu_optimizers", []):
            for parameter, state in optimizer.state.items():
                tensors = [parameter, *(each for each in state.values() if isinstance(each, torch.Tensor))]
                found |= {each.untyped_storage().data_ptr() for each in tensors}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    emulation.install(dist.get_rank())
    for name in sys.argv[2:]:
        layout = Layout(dist.get_world_size(), precision="bf16", **LAYOUTS[name])
        for mode in ("snapshot", "lazy"):
            with parallel(layout):
                saves_are_whole(name, layout, mode)
        if name.startswith("offload"):
            assert emulation.on_host
        sys.stdout.write(f"{name}: whole\n")
        sys.stdout.flush()
    assert emulation.contexts() == {dist.get_rank()}, emulation.report()
