"""Copies between the training state and host images, many tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mcore_ckpt import _native
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.knobs import HOST_THREADS


def copy_out(tensors: Sequence[torch.Tensor], image: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copies each tensor's elements, row-major, to its offset (bytes) in a host image (uint8). Blocks until done.

    Raises:
        UnsupportedError: a tensor is on another kind of device than CPU or CUDA: its address means nothing here.
    """
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"a tensor on device {tensor.device} cannot be copied: only CPU and CUDA are supported"
            )
    host: list[tuple[int, int, int]] = []
    device: list[tuple[int, int, int]] = []
    contiguous = [tensor.detach().contiguous() for tensor in tensors]
    for tensor, offset in zip(contiguous, offsets, strict=True):
        if tensor.nbytes:
            (device if tensor.is_cuda else host).append((image.data_ptr() + offset, tensor.data_ptr(), tensor.nbytes))
    if host:
        _native.copy_host(*_columns(host), HOST_THREADS)
    if not device:
        return
    if _native.built_with_cuda:
        # On the stream that computes: what is queued there before the save is what gets saved.
        _native.copy_to_host(*_columns(device), torch.cuda.current_stream().cuda_stream)
    else:
        for tensor, offset in zip(contiguous, offsets, strict=True):
            if tensor.is_cuda and tensor.nbytes:
                image[offset : offset + tensor.nbytes].copy_(as_bytes(tensor))


def _columns(rows: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[int], list[int]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor: writing to it writes to the tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
