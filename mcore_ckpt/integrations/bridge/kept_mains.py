"""Keeps main parameters that Megatron-Bridge would round after a load.

With `optimizer_cpu_offload`, Bridge's `setup` copies the bf16 parameters of the model over all main parameters as soon
as the manager has loaded (`sync_hybrid_device_optimizer_fp32_master_copies`, 0.6.2). Copying is right if only the
weights were loaded. If the optimizer was also loaded, the main parameters lose the bits that bf16 does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mcore_ckpt.state import optimizer_parts

# Fields of HybridDeviceOptimizer (megatron-core 0.16 to 0.19): the dict that maps a parameter to the parameter that is
# updated in its place, and the dicts that map the parameter to its other copies. After a load, the parameter and all
# copies have the values of the updated parameter, each in its own dtype.
_UPDATED = "param_to_inner_param"
_COPIES = ("gpu_params_map_cpu_copy", "param_to_fp32_param")


class KeptMains:
    """Copies the parameters of the HybridDeviceOptimizers in an optimizer to host memory, right after a load."""

    def __init__(self, optimizer: Any) -> None:
        self._kept = [
            (updated.detach().to("cpu", copy=True), levels)
            for part in optimizer_parts(optimizer)
            if hasattr(part.inner, _UPDATED)
            for updated, levels in _levels(part.inner)
        ]

    def restore(self) -> None:
        """Restores the parameters, and frees the copies."""
        kept, self._kept = self._kept, []
        with torch.no_grad():
            for copy, levels in kept:
                for tensor in levels:
                    tensor.data.copy_(copy)


def _levels(inner: Any) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yields each parameter that is updated, with a list of this parameter and all of its copies."""
    for outer, updated in getattr(inner, _UPDATED).items():
        copies = [getattr(inner, name, {}).get(outer) for name in _COPIES]
        levels = [outer, updated, *(copy for copy in copies if copy is not None)]
        yield updated, list({id(tensor): tensor for tensor in levels}.values())
