"""Copies this rank's training state into host images of its files. All saves use the same host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_ckpt.formats.native.file_plan import FilePlan
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.device_waits import as_checkpoint_errors
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.save.capture import Capture, FileTensors, WeightCopies, arena_bytes, capture_copies
from mcore_ckpt.save.device_copies import DeviceCopies
from mcore_ckpt.state.main_weights import MainWeights


@dataclass(frozen=True)
class ReservedImages:
    """Host memory that is reserved for one save.

    Attributes:
        buffer: the memory. The first image is at its beginning. None if no file has an image.
        files: the numbers of the files that have an image, ascending. The other files are written in place, from the
            tensors themselves.
    """

    buffer: _native.HostBuffer | None
    files: tuple[int, ...]


class HostImages:
    """Owns the host memory for images, at most `limit` bytes. Makes the copies from the GPU, if any, to this memory."""

    def __init__(self, timeout_s: float, gpu: int | None, limit: int | None = None) -> None:
        self._memory = HostMemory(limit)
        self._timeout_s, self._gpu = timeout_s, gpu
        self._device: DeviceCopies | None = None

    def try_gpu(self) -> None:
        """Copies a few bytes from the GPU, as a check. Raises UnsupportedError if the copy fails."""
        self._copies_from_gpu().try_out()

    def prepare(self, nbytes: int, on_gpu: bool) -> None:
        """Starts to allocate host memory in the background, pinned if `on_gpu`. Raises nothing."""
        self._memory.prepare(nbytes, self._gpu if on_gpu else None)

    def reserve(self, files: Sequence[FilePlan]) -> _native.HostBuffer:
        """Reserves host memory for this rank's parts of the files, and returns it. Earlier images are lost.

        Waits for memory that is still being prepared, because every file of a state on a GPU needs pinned memory.

        Raises:
            UnsupportedError: the files need more bytes than the limit.
            CommitError: copies of an earlier save hang, or CUDA cannot pin the memory.
            MemoryError: the system does not have the memory.
        """
        self.wait()  # copies of a save that failed may still be writing into the host memory
        nbytes = arena_bytes(files)
        advice = f"; this save needs {nbytes} bytes of pinned memory, and a save with async_save=False about 1 GB"
        with as_checkpoint_errors(self._gpu, advice):
            return self._memory.take(nbytes, self._gpu)

    def reserve_ready(self, files: Sequence[FilePlan]) -> ReservedImages:
        """Reserves host memory for the files of a state in CPU memory, without a long wait. Raises as `reserve` does.

        While the memory is still being prepared, only the files that fit into the ready part get an image. But if
        nearly all of the memory is ready, this method waits for the missing part, which is faster than writing files in
        place. Then all files get an image.
        """
        self.wait()
        needed, ready = arena_bytes(files), self._memory.bytes_at_once
        if ready is None or needed - ready <= needed // tuning.WAIT_FOR_PART:
            return ReservedImages(self._memory.take(needed), tuple(range(len(files))))
        self._memory.check_limit(needed)
        fitting = _largest_that_fit(files, ready)
        nbytes = arena_bytes([files[number] for number in fitting])
        return ReservedImages(self._memory.take(nbytes) if fitting else None, fitting)

    def copy_weights(
        self,
        weights: MainWeights,
        files: Sequence[FilePlan],
        tensors: Sequence[FileTensors],
        buffer: _native.HostBuffer | None,
    ) -> _native.DeviceEvent | None:
        """Makes weights from main parameters, and copies them to their places in images, or to their own memory.

        All ranks call this method, before `capture`. `files` are this rank's files that have an image. Returns the
        event after the last copy from a GPU; None if nothing was copied from a GPU.
        """
        if not weights.pieces:
            return None
        device = self._copies_from_gpu if weights.is_cuda else None
        copies = WeightCopies(weights.by_parameter.values(), files, tensors, buffer, device)
        weights.make(copies.take)
        return copies.arrived

    def capture(
        self,
        files: Sequence[FilePlan],
        tensors: Sequence[FileTensors],
        buffer: _native.HostBuffer,
        lazy: Sequence[tuple[int, int]] | None,
        weights: _native.DeviceEvent | None = None,
    ) -> Capture:
        """Copies the tensors into images in the reserved memory. `weights` is what `copy_weights` has returned.

        If `lazy` is None, this method waits for all copies, so that all tensors may change when it returns. Otherwise
        this method does not wait for copies from a GPU, and code that changes a tensor on a GPU must call `hold` first.
        The tensors with the (file, tensor) numbers in `lazy` are cloned on the GPU, so that they may change
        immediately.
        """
        if lazy is not None:
            tensors = _detached(tensors, lazy)
        on_gpu = any(tensor.is_cuda for members in tensors for tensor in members.tensors)
        started = time.perf_counter()
        capture = capture_copies(files, tensors, buffer, self._copies_from_gpu() if on_gpu else None, weights)
        if lazy is not None:
            return capture
        self.wait()
        # Drop the events, because all bytes have arrived. Otherwise a thread would ask for an event later, when the
        # training may be capturing a CUDA graph.
        return Capture(tuple(replace(write, ready=()) for write in capture.writes), time.perf_counter() - started)

    def _copies_from_gpu(self) -> DeviceCopies:
        if self._device is None:
            assert self._gpu is not None, "tensors are on a GPU, but this rank has none"
            self._device = DeviceCopies(self._gpu, self._timeout_s)
        return self._device

    def hold(self) -> None:
        """Makes later work of the current stream wait until the state has been copied (`DeviceCopies.hold`)."""
        if self._device is not None:
            self._device.hold()

    def wait(self) -> None:
        """Waits until nothing is being copied."""
        if self._device is not None:
            self._device.wait()

    def close(self) -> None:
        """Waits for copies under way, and frees the memory. Raises CommitError if the copies hang or have failed."""
        device, self._device = self._device, None
        try:
            if device is not None:
                device.close()
        finally:
            self._memory.release()


def _largest_that_fit(files: Sequence[FilePlan], nbytes: int) -> tuple[int, ...]:
    """Chooses files whose images fit together into `nbytes` bytes, large files first, and returns their numbers."""
    fitting: list[int] = []
    for number in sorted(range(len(files)), key=lambda number: -files[number].nbytes):
        size = arena_bytes([files[number]])
        if size <= nbytes:
            fitting.append(number)
            nbytes -= size
    return tuple(sorted(fitting))


def _detached(tensors: Sequence[FileTensors], which: Sequence[tuple[int, int]]) -> list[FileTensors]:
    """Replaces some tensors by clones on the GPU. The clones are made in stream order, so the host does not wait."""
    by_file = [list(members.tensors) for members in tensors]
    for file, number in which:
        if by_file[file][number].is_cuda:
            by_file[file][number] = by_file[file][number].detach().clone()
    return list(map(FileTensors.of, by_file))
