"""A device that is simulated in host memory, so that HybridDeviceOptimizer moves parameters to the host for real.

Every tensor counts as on the device (`is_cuda`), but for those that were made on the host or moved there. Moving a
tensor copies it. Real: the optimizer, its copies and its order of work. Stood in for: the memory of the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version
from torch.overrides import TorchFunctionMode

_MAKE = (torch.empty, torch.zeros, torch.tensor)
# What gives a tensor on the host if it is called with one.
_STAY = (
    *(torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.contiguous),
    *(torch.Tensor.to, torch.Tensor.view, torch.Tensor.reshape, torch.clone, torch.zeros_like, torch.empty_like),
)


class _Simulation(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # Looked up each time, as torch does: the emulated CUDA of tests/cuda replaces it.
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not is_on_host(args[0])
        if func is torch.Tensor.is_pinned:
            return is_on_host(args[0])
        if func is torch.Tensor.pin_memory:
            return _on_host(args[0])
        if func is torch.Tensor.cpu:
            return args[0] if is_on_host(args[0]) else _on_host(args[0].detach().clone())
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            return _move(args[0], str(args[1]))
        made = func(*args, **kwargs)
        if isinstance(made, str):
            # torch hands Tensor.type over by name, so the function that `enable_cpu` has put in its place runs twice.
            return made.replace("torch.cuda.", "torch.")
        if isinstance(made, torch.Tensor):
            is_host = func in _MAKE and str(kwargs.get("device")) == "cpu"
            stays = func in _STAY and isinstance(args[0], torch.Tensor) and is_on_host(args[0])
            if is_host or stays:
                _on_host(made)
        return made


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" if torch.cuda.is_available() else getattr(tensor, "_is_on_host", False)


def _on_host(tensor: torch.Tensor, value: bool = True) -> torch.Tensor:
    tensor._is_on_host = value  # type: ignore[attr-defined]
    return tensor


def _move(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if is_on_host(tensor) == (where == "cpu"):
        return tensor
    return _on_host(tensor.detach().clone(), where == "cpu")


@contextmanager
def simulated_device() -> Iterator[None]:
    if torch.cuda.is_available():  # then there is a real one
        yield
        return
    from megatron.core import utils

    installed = utils.get_te_version
    # Without transformer-engine it returns None, with which 0.16 compares a version.
    utils.get_te_version = lambda: Version("0.0")
    try:
        with _Simulation():
            yield
    finally:
        utils.get_te_version = installed
