"""Finds the host copies of parameters whose GPU memory was freed by offloading.

A save takes the state from the copy that the framework keeps in host memory. The save first waits for the GPU, because
verl and megatron start this copy without waiting for its end. A parameter's offset in the freed storage gives its place
in the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.state.model import ddp_buffers


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A host copy of a buffer. `data` begins with the copy of element `start` of the freed storage."""

    data: torch.Tensor
    start: int


HostCopies = Mapping[int, HostCopy]
"""The host copies, by the identity of the freed storage."""


def host_copies(chunks: Iterable[torch.nn.Module]) -> HostCopies:
    """Returns the host copies of those DistributedDataParallel buffers that have no memory now.

    verl (0.9.1, `offload_megatron_model_to_cpu`) keeps a copy as `param_data.cpu_data`, and megatron's own
    `offload_to_cpu` (0.16.1) as `param_data_cpu`. Both programs keep the copy even after the parameters are back on the
    GPU. Then the copy is outdated, so this function ignores the copies of buffers that have memory.

    Raises UnsupportedError: the model has `overlap_param_gather`. Shards of other ranks were possibly not gathered when
    the parameters were copied, and these shards cannot be gathered now.
    """
    copies = {}
    for chunk in chunks:
        for buffer in ddp_buffers(chunk):
            data = getattr(buffer, "param_data", None)
            if data is None or not data.numel() or data.untyped_storage().nbytes():
                continue
            copy = getattr(data, "cpu_data", None)
            copy = getattr(buffer, "param_data_cpu", None) if copy is None else copy
            if copy is None:
                continue  # the planner refuses the tensor if it is to be saved
            if chunk.ddp_config.overlap_param_gather:  # type: ignore[union-attr]
                raise UnsupportedError(
                    "the model's parameters are offloaded, and the model has overlap_param_gather: the shards of other "
                    "ranks are possibly outdated; bring the model back to the GPU before save()"
                )
            copies[_storage(data)] = HostCopy(copy.view(-1), data.storage_offset())
    return copies


def in_host_memory(tensors: Iterable[torch.Tensor], copies: HostCopies) -> list[torch.Tensor]:
    """Returns the tensors. Each tensor without memory is replaced by its part of the host copy."""
    found = ((tensor, copies.get(_storage(tensor))) for tensor in tensors)
    return [tensor if copy is None else _part(tensor, copy) for tensor, copy in found]


def _part(tensor: torch.Tensor, copy: HostCopy) -> torch.Tensor:
    return copy.data.as_strided(
        tensor.shape, tensor.stride(), copy.data.storage_offset() + tensor.storage_offset() - copy.start
    )


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata
