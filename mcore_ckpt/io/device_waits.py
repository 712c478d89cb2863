"""Waits for a GPU, always with a deadline.

Copies that are queued behind a collective never end if the collective never ends, and a thread that waits inside CUDA
cannot be woken up.

Threads ask the GPU whether it is done, with pauses of 20 µs to 1 ms, until a deadline. The deadline is `timeout_s`, or
ten minutes for the copies of a load, which begin after the load has waited for the training. `cudaDeviceSynchronize`
and `cudaHostUnregister` wait for all work of the GPU, even for work that does not use the memory to unregister. CUDA
has no variants of these calls that do not wait. So these calls run on threads that may be left behind. On an H200
(driver 580), `cudaFree` waits for all work, too, so it is not called. The other calls of `csrc/` did not wait behind a
stuck kernel: registering memory, making, querying and destroying events and streams, and queueing copies. After a
deadline, memory that the GPU may still write to is never freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist

from mcore_ckpt.errors import CommitError
from mcore_ckpt.io import _native, tuning

# How long this thread waits for a GPU before it reads from the GPU, in seconds.
_patience = ContextVar("patience", default=tuning.DEVICE_READ_S)


@contextmanager
def patience(timeout_s: float) -> Iterator[None]:
    """Limits each wait of this thread for a GPU, inside a `with` block, to `timeout_s` seconds."""
    before = _patience.set(timeout_s)
    try:
        yield
    finally:
        _patience.reset(before)


def patience_s() -> float:
    """Returns how long this thread waits for a GPU, in seconds."""
    return _patience.get()


def wait_for_gpu(timeout_s: float) -> None:
    """Waits until the current GPU, if any, has done all queued work. Raises CommitError after `timeout_s` seconds."""
    if not torch.cuda.is_available():
        return
    if not _native.built_with_cuda:  # this build saves only state in host memory, and refuses other saves
        torch.cuda.synchronize()
        return
    gpu = torch.cuda.current_device()
    with as_checkpoint_errors(gpu):
        _native.wait_for_device(gpu, timeout_s)


def wait_before_reading(tensor: torch.Tensor) -> None:
    """Waits, with a deadline, for the GPU of a tensor that the host reads next.

    Torch itself would wait without a deadline.
    """
    if tensor.is_cuda:
        wait_for_gpu(patience_s())


@contextmanager
def saying_what_hangs() -> Iterator[None]:
    """Raises CommitError, with rank, GPU and time, if a GPU does not do its work in time."""
    try:
        yield
    except _native.DeviceStuck as stuck:
        device, seconds = stuck.args
        raise _error_of_rank(
            f"GPU {device} has not done its work for {seconds:.0f} s: a collective or a kernel of the training may "
            "hang, here or on another rank (a stack trace of each rank's process shows which one waits)"
        ) from None


@contextmanager
def as_checkpoint_errors(gpu: int | None, advice: str = "") -> Iterator[None]:
    """Raises CommitError, with the rank and the number of the GPU, if a GPU hangs or CUDA fails."""
    try:
        with saying_what_hangs():
            yield
    except RuntimeError as error:
        raise _error_of_rank(f"GPU {gpu}: {error}{advice}") from None


def _error_of_rank(message: str) -> CommitError:
    error = CommitError(f"rank {dist.get_rank() if dist.is_initialized() else 0}: {message}")
    error.names_rank = True
    return error
