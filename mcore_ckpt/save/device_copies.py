"""Copies tensors from a GPU to host memory on a separate stream, while the training continues."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mcore_ckpt.io import _native, tuning


class DeviceCopies:
    """Copies the tensors of one save at a time from the current GPU to pinned host memory."""

    def __init__(self) -> None:
        self._copier = _native.DeviceCopier(torch.cuda.current_device())
        self._stream = torch.cuda.ExternalStream(self._copier.stream)

    def start(
        self,
        buffer: _native.HostBuffer,
        offsets: list[int],
        sources: list[int],
        nbytes: list[int],
        tensors: Sequence[torch.Tensor],
    ) -> list[tuple[int, _native.DeviceEvent]]:
        """Queues copies that begin after the work already queued on the current stream. The host does not wait.

        Args:
            buffer: pinned host memory to copy to.
            offsets, sources, nbytes: the offset in the buffer, the source's address and the size of each copy. The
                offsets ascend.
            tensors: the tensors that the sources belong to. If the memory of a tensor is freed in the meantime
                (`resize_(0)`, a new `.data`), torch does not reuse that memory before it has been copied.

        Returns:
            For each group of copies: (how many copies are done once the event has happened, the event).
        """
        after = torch.cuda.current_stream().cuda_stream
        ready = self._copier.start(buffer, offsets, sources, nbytes, after, tuning.COPY_GROUP_BYTES)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return ready

    def hold(self) -> None:
        """Makes later work of the current stream wait for the copies. The host does not wait."""
        self._copier.hold(torch.cuda.current_stream().cuda_stream)

    def wait(self) -> None:
        """Waits until all copies are done."""
        self._copier.wait()

    def close(self) -> None:
        """Waits for the copies, and frees the stream."""
        self._copier.close()
