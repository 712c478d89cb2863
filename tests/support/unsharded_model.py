"""Says of a plain torch module, as megatron says of a model, where its tensors belong: here each is whole."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.ranks.topology import RankCoordinates, Replicas, Topology
from mcore_ckpt.state.trainer import Trainer


def sharded_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """An object as megatron's ShardedTensor for each parameter and buffer: the live tensor, and that it is whole."""
    return {
        name: SimpleNamespace(
            data=value,
            key=name,
            replica_id=(0, 0, 0),
            prepend_axis_num=0,
            local_shape=value.shape,
            global_offset=(0,) * value.dim(),
            global_shape=value.shape,
        )
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }


def trainer_of(model: torch.nn.Module, optimizer: Any, **config: Any) -> Trainer:
    """The only rank that trains `model`. `optimizer` is as megatron wraps one: with the field `optimizer`."""
    return Trainer(
        root=Path("unused"),
        role="actor",
        chunks=(model,),
        optimizer=optimizer,
        lr_scheduler=None,
        hf_config=None,
        processing_class=None,
        config=CheckpointConfig(**config),
        coordinates=RankCoordinates(),
        topology=Topology(),
        replicas=Replicas(),
        stages=(),
        first_instance=True,
        vocab_size=None,
        gpu=None,
        agreement=SimpleNamespace(rank=0),  # type: ignore[arg-type]
    )


class Model(torch.nn.Module):
    """As much of a megatron model as saving looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1)
        self.weight = torch.nn.Parameter(torch.rand(64, 64))

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return sharded_state_dict(self)
