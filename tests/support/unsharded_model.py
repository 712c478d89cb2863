"""Says of a plain torch module, as megatron says of a model, where its tensors belong: here each is whole."""

from types import SimpleNamespace
from typing import Any

import torch


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
