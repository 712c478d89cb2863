"""What each rank of an FSDP training saves, by torch's own means.

python fsdp_training.py FOLDER     forks the ranks, by tests/distributed/forked_ranks.py
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

WORLD = 4


class Small(nn.Module):
    """Rows that do not divide, a scalar, fewer rows than ranks, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(2))
        self.norm = nn.Parameter(torch.empty(3))
        self.narrow = nn.Parameter(torch.empty(7, 2, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.tensor([2**40 + 1, -3]))
        self.register_buffer("bias", torch.empty(4, dtype=torch.float32))


def model_of(seed: int) -> Small:
    generator = torch.Generator().manual_seed(seed)
    model = Small()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.bias):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def _fully_sharded(names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = model_of(1)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.state_dict()


def _placed_otherwise() -> dict[str, torch.Tensor]:
    """Placements that FSDP alone does not make, each tensor its own, and the first by name not cut."""
    world = dist.get_world_size()
    one = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    two = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))
    tensors = model_of(2).state_dict()
    placed = {
        "embed.weight": (one, [Shard(1)]),
        "layers.0.weight": (two, [Replicate(), Shard(1)]),
        "layers.0.bias": (two, [Shard(0), Shard(0)]),
        "layers.1.weight": (two, [Shard(1), Shard(0)]),
        "layers.1.bias": (one, [Replicate()]),
        "narrow": (one, [Shard(-2)]),
    }
    return {
        name: distribute_tensor(tensor, *placed[name]) if name in placed else tensor
        for name, tensor in sorted(tensors.items())
    }


KINDS = {
    "fsdp": lambda world: _fully_sharded(("fsdp",), (world,)),
    "hsdp": lambda world: _fully_sharded(("ddp", "fsdp"), (2, world // 2)),
    "otherwise": lambda _: _placed_otherwise(),
}


def save(folder: Path, rank: int) -> None:
    for kind, state_of in KINDS.items():
        (folder / kind).mkdir(exist_ok=True)
        torch.save(state_of(WORLD), folder / kind / f"model_world_size_{WORLD}_rank_{rank}.pt")
        if rank == 0:
            (folder / kind / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))


def main(folder: Path) -> None:
    from tests.distributed import forked_ranks

    codes = forked_ranks.run(WORLD, partial(save, folder), folder / "log")
    sys.exit((folder / "log").read_text() if any(codes) else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
