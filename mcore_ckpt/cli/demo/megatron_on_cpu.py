"""Lets megatron-core train on a machine without CUDA.

Megatron-core (seen with 0.16 to 0.19) uses "cuda" in many places and never checks whether CUDA is available. Only
this module maps these uses to the CPU. So the demo and the tests train the real GPTModel, DDP, schedules and optimizers
under gloo, not stand-ins.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

_enabled = False


# The functions of torch and methods of tensors to which megatron and trainers pass a device.
_FUNCTIONS = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like"),
    *("linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like"),
    *("randn", "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices"),
    *("zeros", "zeros_like"),
)
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with `device="cuda"` replaced by the CPU, and without `pin_memory`.

    Functions are replaced one by one, because a TorchFunctionMode would see every call of torch and add 2 to 3
    microseconds to each call.
    """

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        # Pinning needs a CUDA context, and only makes copies faster, so leave it out.
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return on_cpu


def _itself(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _named_as_on_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement for `torch.Tensor.type` that names the type as if the tensor were on CUDA.

    Both mixed-precision optimizers sort parameters by type names such as "torch.cuda.BFloat16Tensor", and refuse names
    that they do not know (Float16OptimizerWithFloat16Params.__init__,
    DistributedOptimizer._build_model_and_main_param_groups).
    """

    @functools.wraps(type_of)
    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(tensor, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.", 1)

    return named


class _Stream:
    """A stand-in for a CUDA stream, on which all work is already done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    # The alltoall dispatcher of experts calls this method (MoEAlltoAllTokenDispatcher, 0.19).
    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> "_Event":
        return _Event()

    def synchronize(self) -> None: ...


class _Event:
    """A stand-in for a CUDA event that has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    yield


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _is_not_fork_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _map_devices() -> None:
    # On its first use, `with torch.device(...)` collects the functions of torch that the block changes (torch 2.13,
    # `_device_constructors`). Run such a block once before the functions are replaced. Otherwise the first block would
    # collect the replacements, and change nothing. transformers loads models in such a block.
    with torch.device("cpu"):
        torch.empty(0)
    for owner, names in ((torch, _FUNCTIONS), (torch.Tensor, _METHODS)):
        for name in names:
            setattr(owner, name, _on_cpu(getattr(owner, name)))
    setattr(torch.Tensor, "cuda", _itself)  # noqa: B010
    setattr(torch.Tensor, "type", _named_as_on_cuda(torch.Tensor.type))  # noqa: B010


def _map_torch_cuda() -> None:
    replacements: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "manual_seed": torch.manual_seed,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        # DistributedDataParallel makes a stream if num_distributed_optimizer_instances > 1. MoE token dispatchers and
        # shared experts make a stream in their constructors.
        "Stream": _Stream,
        "Event": _Event,
        "stream": _on_stream,
        "current_stream": lambda *args: _Stream(),
        "default_stream": lambda *args: _Stream(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _map_megatron() -> None:
    import megatron.core.tensor_parallel.random as tp_random
    from megatron.core.transformer.moe import moe_utils

    tp_random._get_cuda_rng_state = _get_rng_state
    tp_random._set_cuda_rng_state = _set_rng_state
    # The CPU's generator also stands in for CUDA's. So CudaRNGStatesTracker.fork() always sees the CPU's generator
    # change, and warns without a reason. The filter drops this warning.
    logging.getLogger(tp_random.__name__).addFilter(_is_not_fork_warning)
    # `te_general_gemm` may be a kernel for GPUs, or missing. Set it to None, so that RouterGatingLinearFunction does
    # not call it.
    moe_utils.te_general_gemm = None


def enable_cpu() -> None:
    """Maps megatron's CUDA calls to the CPU for the rest of the process. Does nothing if CUDA is available.

    Call this function before building a model.

    >>> enable_cpu()
    """
    global _enabled
    if _enabled or torch.cuda.is_available():
        return
    _enabled = True
    # megatron decorates functions with torch.compile (core/jit.py). Compiling these functions for the CPU would take
    # half a minute, and would need a C++ compiler.
    torch.compiler.set_stance("force_eager")
    _map_devices()
    _map_torch_cuda()
    _map_megatron()
