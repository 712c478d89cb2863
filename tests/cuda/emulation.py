"""Makes mcore_ckpt, and nothing else, believe that the tensors of a CPU training are on a GPU.

The GPU is that of emulated_cuda.cpp. The training runs on the CPU as ever: its thread is the current stream, so that
what it does is in stream order, and copies run on threads, after random delays.

Import this module before mcore_ckpt, and call `install` after megatron_on_cpu.enable_cpu.
"""

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

_NATIVE = "mcore_ckpt.io._native"


def _load_native() -> ctypes.CDLL:
    path = os.environ["EMULATED_NATIVE"]
    spec = importlib.util.spec_from_file_location(_NATIVE, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_NATIVE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_NATIVE])
    library = ctypes.CDLL(path)
    for name in ("emulated_is_pinned", "emulated_stream_is_dead"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.emulated_held_us.restype = ctypes.c_long
    library.emulated_pinned_bytes.restype = ctypes.c_size_t
    library.emulated_report.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.emulated_queued.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return library


library = _load_native()

# The tensors' storages that were recorded on a stream, with the stream. torch's allocator uses the stream when it frees
# such a storage (cudaEventRecord).
recorded: list[tuple[torch.UntypedStorage, int]] = []

_real_is_cuda: Any = torch._C.TensorBase.is_cuda.__get__  # type: ignore[attr-defined]
_device = 0
_current = threading.local()


def _is_asked_by_us() -> bool:
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("mcore_ckpt.") and not name.startswith("mcore_ckpt.cli.demo")


# The addresses of storages that are host memory, pinned or not.
on_host: set[int] = set()


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """All host memory that is neither pinned nor in `on_host` counts as memory of the GPU."""
    if tensor.device.type != "cpu" or (on_host and tensor.untyped_storage().data_ptr() in on_host):
        return False
    return not (tensor.numel() and library.emulated_is_pinned(tensor.data_ptr()))


class _Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def install(device: int) -> None:
    """Puts this process, on whose thread the training runs, on a GPU of the emulated CUDA."""
    global _device
    _device = _current.device = device
    library.emulated_set_device(device)
    torch.Tensor.is_cuda = property(  # type: ignore[assignment,method-assign]
        lambda tensor: is_on_gpu(tensor) if _is_asked_by_us() else _real_is_cuda(tensor)
    )
    is_cpu: Any = torch._C.TensorBase.is_cpu.__get__  # type: ignore[attr-defined]
    torch.Tensor.is_cpu = property(  # type: ignore[assignment,method-assign]
        lambda tensor: is_cpu(tensor) and not (_is_asked_by_us() and is_on_gpu(tensor))
    )
    get_device = torch.Tensor.get_device
    torch.Tensor.get_device = lambda t: _device if _is_asked_by_us() else get_device(t)  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda tensor, stream: recorded.append(  # type: ignore[method-assign]
        (tensor.untyped_storage(), stream.cuda_stream)
    )
    _replace("is_available", lambda: True)
    _replace("current_device", _current_device)
    _replace("device", _as_current)
    _replace("current_stream", lambda *_: _Stream(0))
    _replace("synchronize", lambda *_: None)
    _replace("get_rng_state", lambda *_: torch.get_rng_state())
    _replace("set_rng_state", lambda state, *_: torch.set_rng_state(state))
    _replace("ExternalStream", lambda handle, *_: _Stream(handle))
    arange = torch.arange
    torch.arange = lambda *args, **named: arange(*args, **{k: v for k, v in named.items() if "cuda" not in str(v)})


def _replace(name: str, ours: Any) -> None:
    theirs = getattr(torch.cuda, name)
    setattr(torch.cuda, name, lambda *args: ours(*args) if _is_asked_by_us() else theirs(*args))


def _current_device() -> int:
    return getattr(_current, "device", 0)  # that of a new thread is GPU 0


@contextmanager
def _as_current(device: int) -> Iterator[None]:
    before = _current_device()
    _current.device = device
    yield
    _current.device = before


@contextmanager
def capturing() -> Iterator[SimpleNamespace]:
    """Captures a CUDA graph in Global mode on this thread, as megatron's CudaGraphManager does."""
    seen = SimpleNamespace(is_valid=True)
    library.emulated_capture(1)
    try:
        yield seen
    finally:
        seen.is_valid = not library.emulated_invalidated()
        library.emulated_capture(0)


def report() -> list[list[str]]:
    """Returns what the emulated CUDA has seen, as lists of words (`emulated_report`)."""
    text = ctypes.create_string_buffer(1 << 20)
    library.emulated_report(text, len(text))
    return [line.split() for line in text.value.decode().splitlines()]


def queued() -> str:
    """Returns what has been queued on the streams since the last call: k for each kernel, c for each copy."""
    text = ctypes.create_string_buffer(1 << 20)
    library.emulated_queued(text, len(text))
    return text.value.decode()


def contexts() -> set[int]:
    """Returns the GPUs on which this process has a context."""
    return {int(line[1]) for line in report() if line[0] == "context"}


def unsafe_calls() -> set[str]:
    """Returns the calls that have broken a capture."""
    return {line[1] for line in report() if line[0] == "unsafe"}
