"""Copies tensors from a GPU to host memory on a separate stream, while the training continues.

Within a save, the kernels that gather small tensors are launched first, then the large copies. With
`CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron sets with tensor or context parallelism on GPUs before Blackwell, all
streams share one queue. In another order, the training's kernels would wait in this queue behind one of our kernels,
which itself waits for a large copy. We know this from NVIDIA's description of the queue, not from a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.device_waits import as_checkpoint_errors, saying_what_hangs
from mcore_ckpt.io.pages import PAGE_BYTES, page_ceil


class DeviceCopies:
    """Copies the tensors of one save at a time from a GPU to pinned host memory. Waits `timeout_s` seconds at most.

    Raises UnsupportedError if the package was built without CUDA.
    """

    def __init__(self, device: int, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        try:
            stream = _native.side_stream(device)
            self._copier = _native.DeviceCopier(device, stream)
        except RuntimeError as error:
            raise UnsupportedError(str(error)) from None
        self._stream = torch.cuda.ExternalStream(stream, device)

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
            buffer: host memory to copy to, pinned for this GPU.
            offsets, sources, nbytes: the offset in the buffer, the source's address and the size of each copy. The
                offsets ascend.
            tensors: the tensors that the sources belong to. If the memory of a tensor is freed in the meantime
                (`resize_(0)`, a new `.data`), torch reuses that memory only after the copy.

        Returns:
            For each group of copies: (how many copies are done once the event has happened, the event).

        Raises CommitError if CUDA fails.
        """
        after = torch.cuda.current_stream(self._device).cuda_stream
        # Do this before the copies begin, so that even after an error torch does not reuse memory that a copy may still
        # read.
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        with as_checkpoint_errors(self._device):
            return self._copier.start(buffer, offsets, sources, nbytes, after, tuning.COPY_GROUP_BYTES)

    def hold(self) -> None:
        """Makes later work of the current stream wait for the copies that are under way, if any.

        The host does not wait, unless the stream is being captured into a CUDA graph. Raises CommitError if the host
        has to wait longer than `timeout_s`, or if a copy has failed.
        """
        with as_checkpoint_errors(self._device):
            self._copier.hold(torch.cuda.current_stream(self._device).cuda_stream, self._timeout_s)

    def wait(self) -> None:
        """Waits until all copies are done. Raises CommitError if they hang or have failed."""
        with as_checkpoint_errors(self._device):
            self._copier.wait(self._timeout_s)

    def close(self) -> None:
        """Waits for the copies. Raises CommitError if they hang or have failed. Does not free the host memory."""
        with as_checkpoint_errors(self._device):
            self._copier.close(self._timeout_s)

    def try_out(self) -> None:
        """Tries a gather and a large copy, so that a faulty installation is noticed before the first save.

        Raises UnsupportedError, which says what to do, if a copy fails, and CommitError if the GPU hangs.
        """
        large = tuning.GATHER_BELOW_BYTES
        after = torch.cuda.current_stream(self._device).cuda_stream
        try:
            source = torch.arange(large + PAGE_BYTES, device=f"cuda:{self._device}").to(torch.uint8)
            buffer = _native.HostBuffer(page_ceil(source.nbytes), device=self._device)
            sizes, sources = [PAGE_BYTES, large], [source.data_ptr(), source.data_ptr() + PAGE_BYTES]
            with saying_what_hangs():
                self._copier.start(buffer, [0, PAGE_BYTES], sources, sizes, after, tuning.COPY_GROUP_BYTES)
                self._copier.wait(self._timeout_s)
        except (RuntimeError, MemoryError) as error:
            raise UnsupportedError(
                f"the state is on GPU {self._device}, from which nothing can be copied: {error}"
            ) from error
        copied = torch.frombuffer(buffer, dtype=torch.uint8, count=source.nbytes)
        if not torch.equal(copied, source.cpu()):
            raise UnsupportedError(
                f"GPU {self._device}: a copy of its memory differs from it: do not train on this machine"
            )
