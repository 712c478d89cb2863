"""Copies this rank's training state into images of its files in host memory, which saves reuse."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_ckpt.formats.native.file_plan import FilePlan
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.save.capture import Capture, FileTensors, arena_bytes, capture_copies
from mcore_ckpt.save.device_copies import DeviceCopies


class HostImages:
    """Host memory, and the copies from the GPU into it.

    Args:
        limit: bytes of host memory it may take; None for as many as it takes.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._arena = HostMemory(limit)
        self._device: DeviceCopies | None = None

    def reserve(self, files: Sequence[FilePlan]) -> int:
        """The address of host memory for this rank's parts of the files. What was captured before is lost.

        Raises UnsupportedError above the limit, MemoryError, RuntimeError in CUDA's words.
        """
        self.wait()  # a save that failed may have left copies under way into that memory
        return self._arena.take(arena_bytes(files))

    def capture(
        self,
        files: Sequence[FilePlan],
        tensors: Sequence[FileTensors],
        address: int,
        lazy: Sequence[tuple[int, int]] | None,
    ) -> Capture:
        """Copies the tensors into images at `address`.

        Args:
            files, tensors: what to save.
            address: of the memory reserved.
            lazy: None: when this returns, the state may change. Else tensors on a GPU are still being copied, and what
                changes them must be held up by `hold`; but for these (file, tensor) numbers, which may change at once.
        """
        if lazy is not None:
            tensors = _detached(tensors, lazy)
        if self._device is None and any(tensor.is_cuda for members in tensors for tensor in members.tensors):
            self._device = DeviceCopies()
        capture = capture_copies(files, tensors, address, self._device)
        if lazy is None:
            self.wait()
        return capture

    def hold(self) -> None:
        """What the current stream is given from now on waits until the state has been copied. The host goes on."""
        if self._device is not None:
            self._device.hold()

    def wait(self) -> None:
        """Returns once nothing is being copied."""
        if self._device is not None:
            self._device.wait()

    def close(self) -> None:
        """Frees the memory, once nothing is copied to it any more."""
        if self._device is not None:
            self._device.close()
            self._device = None
        self._arena.release()


def _detached(tensors: Sequence[FileTensors], which: Sequence[tuple[int, int]]) -> list[FileTensors]:
    """The tensors, with copies on the GPU of some, made in stream order: the host does not wait for them."""
    by_file = [list(members.tensors) for members in tensors]
    for file, number in which:
        if by_file[file][number].is_cuda:
            by_file[file][number] = by_file[file][number].detach().clone()
    return list(map(FileTensors.of, by_file))
