"""Keeps main parameters that Megatron-Bridge would round after a load.

With `optimizer_cpu_offload`, Bridge's `setup` copies the bf16 parameters of the model over all main parameters as soon
as the manager has loaded (`sync_hybrid_device_optimizer_fp32_master_copies`, 0.6.2). That is right after the weights
alone were loaded. After the optimizer was loaded, too, it loses the bits that bf16 does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

# The dicts of HybridDeviceOptimizer (megatron-core 0.16 to 0.19) from a parameter to a copy of it, or several.
_COPIES = ("param_to_inner_param", "gpu_params_map_cpu_copy", "param_to_fp32_param")


class KeptMains:
    """Copies of all main parameters of the HybridDeviceOptimizers in an optimizer; nothing if it has none."""

    def __init__(self, optimizer: Any) -> None:
        self._copies = [(tensor, tensor.detach().clone()) for tensor in _main_parameters(optimizer)]

    def restore(self) -> None:
        """Puts them back, and frees the copies."""
        copies, self._copies = self._copies, []
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.data.copy_(copy)


def _main_parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for inner in _inner_optimizers(optimizer):
        for name in _COPIES:
            copies: Mapping[Any, Any] = getattr(inner, name, {})
            for tensor in (*copies.keys(), *copies.values()):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:  # its own `optimizer` raises if there are several
        for each in chained:
            yield from _inner_optimizers(each)
    elif hasattr(getattr(optimizer, "optimizer", None), _COPIES[0]):
        yield optimizer.optimizer
