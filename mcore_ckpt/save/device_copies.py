"""Copies out of a GPU on a stream of their own, under whatever the training does next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mcore_ckpt.io import _native, tuning


class DeviceCopies:
    """The copies of one save at a time, from the current GPU to pinned host memory."""

    def __init__(self) -> None:
        self._copier = _native.DeviceCopier(torch.cuda.current_device())
        self._stream = torch.cuda.ExternalStream(self._copier.stream)

    def start(
        self,
        destinations: list[int],
        sources: list[int],
        nbytes: list[int],
        tensors: Sequence[torch.Tensor],
    ) -> list[tuple[int, int]]:
        """Queues copies behind what the current stream has been given; the host does not wait.

        Args:
            destinations, sources, nbytes: addresses and sizes, by ascending destination.
            tensors: those the sources belong to. Their memory, freed meanwhile (`resize_(0)`, a new `.data`), is not
                used again before it has been copied.

        Returns:
            (copies done, CUDA event) for each group of them.
        """
        after = torch.cuda.current_stream().cuda_stream
        ready = self._copier.start(destinations, sources, nbytes, after, tuning.COPY_GROUP_BYTES)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return ready

    def hold(self) -> None:
        """Makes what the current stream is given from now on wait for the copies. The host goes on."""
        self._copier.hold(torch.cuda.current_stream().cuda_stream)

    def wait(self) -> None:
        """Returns when all has been copied."""
        self._copier.wait()

    def close(self) -> None:
        self._copier.close()
