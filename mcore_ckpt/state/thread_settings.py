"""Sets torch's settings of a thread while a public call works on the training state.

A call may come from any thread, and from inside `torch.inference_mode()` or `torch.device("cuda")`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from mcore_ckpt.io.device_waits import patience

_CPU = torch.device("cpu")


def gpu_of(chunks: Sequence[torch.nn.Module]) -> int | None:
    """Returns the number of the GPU that has the parameters of a training.

    If all parameters are in host memory, perhaps offloaded, the result is this thread's current GPU. Without a GPU, the
    result is None.
    """
    with torch._C.DisableTorchFunction():  # otherwise a TorchFunctionMode would be called for each parameter
        each = (parameter for chunk in chunks for parameter in chunk.parameters())
        found = next((parameter.get_device() for parameter in each if parameter.is_cuda), None)
    if found is None and torch.cuda.is_available():
        return torch.cuda.current_device()
    return found


def settings_here(gpu: int | None, timeout_s: float) -> AbstractContextManager[None]:
    """Returns a context in which another thread can work on the state for this thread, on this thread's CUDA stream."""
    stream = None if gpu is None or not torch.cuda.is_initialized() else torch.cuda.current_stream(gpu)
    return _settings_on(stream, gpu, timeout_s)


@contextmanager
def _settings_on(stream: torch.cuda.Stream | None, gpu: int | None, timeout_s: float) -> Iterator[None]:
    with settings_for_state(gpu, timeout_s), nullcontext() if stream is None else torch.cuda.stream(stream):
        yield


@contextmanager
def settings_for_state(gpu: int | None, timeout_s: float) -> Iterator[None]:
    """Lets the body of `with` read and change a training state on GPU number `gpu`; None: in host memory.

    The GPU becomes the current GPU. In a new thread, the current GPU is GPU 0, which may belong to another training.
    Inference mode is off, because a moment that was made or changed in inference mode would fail in the next step of
    the optimizer. Tensors that the body creates without naming a device are in host memory. Each wait for a GPU ends
    after at most `timeout_s` seconds.
    """
    with ExitStack() as settings:
        settings.enter_context(torch.inference_mode(False))
        settings.enter_context(torch.no_grad())
        settings.enter_context(patience(timeout_s))
        if gpu is not None:
            settings.enter_context(torch.cuda.device(gpu))
        if torch.get_default_device() != _CPU:  # avoid the context of a device, which slows each call of torch
            settings.enter_context(_CPU)
        yield
