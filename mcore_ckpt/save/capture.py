"""Copies tensors into host images of their files, each tensor to the offset that it has on disk.

Weights that are made from main parameters are copied piece by piece.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import NamedTuple

import torch

from mcore_ckpt.formats.native.file_plan import FilePlan, FileWrite
from mcore_ckpt.io import _native
from mcore_ckpt.io.pages import page_ceil
from mcore_ckpt.io.tuning import HOST_THREADS
from mcore_ckpt.save.device_copies import DeviceCopies
from mcore_ckpt.state.main_weights import Fragment


class FileTensors(NamedTuple):
    """The tensors to save to one file, in the order of its request, and the address of each tensor's first element.

    The tensors may have any strides; `in_rows` says whether all are contiguous. The tensors are in host memory or on a
    GPU. Tensors on the device `meta` stand for weights that `WeightCopies` copies.
    """

    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    in_rows: bool

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> FileTensors:
        """Reads the addresses of the tensors, and whether all are contiguous."""
        # Without this context, a TorchFunctionMode, such as a profiler's, would be called for each of thousands of
        # tensors.
        with torch._C.DisableTorchFunction():
            addresses = list(map(torch.Tensor.data_ptr, tensors))
            return FileTensors(tensors, addresses, all(map(torch.Tensor.is_contiguous, tensors)))


@dataclass(frozen=True, eq=False)
class Capture:
    """Where the bytes of each file are in memory.

    `seconds` is how long the trainer waited for copies; 0 without copies.
    """

    writes: tuple[FileWrite, ...]
    seconds: float


def arena_bytes(files: Sequence[FilePlan]) -> int:
    """Returns how many bytes the images of this rank's parts of the files need. Each image begins on a page."""
    return sum(page_ceil(plan.head) + page_ceil(plan.nbytes) for plan in files)


def image_places(files: Sequence[FilePlan]) -> list[int]:
    """Returns, for each file, where this rank's range begins in the buffer: an offset in bytes, at a page boundary."""
    ends = accumulate(page_ceil(plan.head) + page_ceil(plan.nbytes) for plan in files)
    return [end - page_ceil(plan.nbytes) for end, plan in zip(ends, files, strict=True)]


def capture_in_place(files: Sequence[FilePlan], tensors: Sequence[FileTensors]) -> Capture:
    """Returns the tensors' own places in memory. The tensors must not change until they are on the disk.

    Tensors on a GPU are copied piece by piece while they are written. The GPU must have done all work that changes
    these tensors.
    """
    writes: list[FileWrite] = []
    for plan, members in zip(files, tensors, strict=True):
        first, found, addresses = _locate(plan, members)
        others = len(members.tensors) - first - len(found)
        on_gpu, _ = _devices(found)
        device = next((tensor.get_device() for tensor, is_cuda in zip(found, on_gpu, strict=True) if is_cuda), None)
        on_device = () if device is None else [*[False] * first, *on_gpu, *[False] * others]
        addresses = [*[0] * first, *addresses, *[0] * others]
        writes.append(FileWrite(plan, addresses, owner=found, device=device, on_device=on_device))
    return Capture(tuple(writes), 0.0)


def capture_copies(
    files: Sequence[FilePlan],
    tensors: Sequence[FileTensors],
    buffer: _native.HostBuffer,
    device: DeviceCopies | None,
    weights: _native.DeviceEvent | None = None,
) -> Capture:
    """Copies the tensors to their places in images.

    When this returns, tensors in host memory may change. Tensors on a GPU may change once `device` has copied them.

    Args:
        files, tensors: the files of this rank, and the tensors of each.
        buffer: host memory of at least `arena_bytes(files)` bytes, pinned if tensors are on a GPU.
        device: makes the copies from the GPU; None if no tensor is on a GPU.
        weights: the event after the last copy of weights from the GPU to the images (`WeightCopies`); None if the
            weights are in the images already.
    """
    started = time.perf_counter()
    host, on_device = _Columns(), _Columns()
    copied_from: list[torch.Tensor] = []
    places: list[tuple[FilePlan, int, list[tuple[int, int]]]] = []
    for plan, members, place in zip(files, tensors, image_places(files), strict=True):
        first, found, addresses = _locate(plan, members)
        copied_from += found
        parts = plan.parts
        offsets = [place - plan.start + at for at in parts.at]
        sources = [addresses[tensor - first] + skip for tensor, skip in zip(parts.tensor, parts.skip, strict=True)]
        on_gpu, on_host = _devices(found)
        is_cuda = [on_gpu[tensor - first] for tensor in parts.tensor]
        host.add(offsets, sources, parts.nbytes, [on_host[tensor - first] for tensor in parts.tensor])
        before = len(on_device.nbytes)
        on_device.add(offsets, sources, parts.nbytes, is_cuda)
        places.append((plan, place, list(enumerate(compress(parts.at, is_cuda), before + 1))))
    events: list[tuple[int, _native.DeviceEvent]] = []
    if on_device.nbytes:
        assert device is not None, "tensors are on a GPU, but `device` is None"
        events = device.start(buffer, on_device.offsets, on_device.sources, on_device.nbytes, copied_from)
    if host.nbytes:
        destinations = [buffer.address + offset for offset in host.offsets]
        _native.copy_host(destinations, host.sources, host.nbytes, HOST_THREADS)
    writes = tuple(
        FileWrite(plan, buffer=buffer, offset=at, ready=_ready(plan, copies, events, weights))
        for plan, at, copies in places
    )
    return Capture(writes, time.perf_counter() - started)


class _Columns:
    """The offsets, source addresses and sizes (bytes) of copies, as the parallel lists that the native calls expect."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.sources: list[int] = []
        self.nbytes: list[int] = []

    def add(self, offsets: Sequence[int], sources: Sequence[int], nbytes: Sequence[int], which: Sequence[bool]) -> None:
        self.offsets += compress(offsets, which)
        self.sources += compress(sources, which)
        self.nbytes += compress(nbytes, which)


class _Located(NamedTuple):
    """The tensors in this rank's range of a file, made contiguous, and their addresses."""

    first: int  # the index of the first of these tensors among all tensors of the file
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]


def _locate(plan: FilePlan, members: FileTensors) -> _Located:
    numbers = plan.parts.tensor
    first, after = (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
    found, addresses = members.tensors[first:after], members.addresses[first:after]
    if not members.in_rows:
        with torch._C.DisableTorchFunction():
            found = [tensor.detach().contiguous() for tensor in found]
            addresses = list(map(torch.Tensor.data_ptr, found))
    return _Located(first, found, addresses)


def _devices(tensors: Sequence[torch.Tensor]) -> tuple[list[bool], list[bool]]:
    """Returns which tensors are on a GPU, and which are in host memory."""
    with torch._C.DisableTorchFunction():
        return [tensor.is_cuda for tensor in tensors], [tensor.is_cpu for tensor in tensors]


def _ready(
    plan: FilePlan,
    copies: Sequence[tuple[int, int]],
    events: Sequence[tuple[int, _native.DeviceEvent]],
    weights: _native.DeviceEvent | None = None,
) -> list[tuple[int, _native.DeviceEvent]]:
    """Lists, for each event, the offset in the file up to which all bytes have arrived once the event has happened.

    Args:
        plan: the file.
        copies: for each copy from the GPU to this file: (the number of the copy, counted from 1 over all files; its
            offset in the file).
        events: for each event: (how many copies are done once the event has happened, the event). The numbers ascend.
        weights: the event after the copies of weights. All copies of weights came before the copies in `copies`.
    """
    if not copies and weights is not None:
        return [(plan.stop, weights)]
    counts = [count for count, _ in copies]
    ready: list[tuple[int, _native.DeviceEvent]] = []
    for done, event in events:
        covered = bisect_right(counts, done)
        if covered:
            ready.append((copies[covered][1] if covered < len(copies) else plan.stop, event))
        if covered == len(copies):
            break
    return ready


class _Place(NamedTuple):
    """The destination of bytes `[low, high)` of a weight: byte n goes to `address + n`."""

    address: int
    low: int
    high: int


class WeightCopies:
    """Copies new weights (`MainWeights.make`) into images of files or, without an image, into the weights' own memory.

    Args:
        weights: the weights; those on the device `meta` have no memory.
        files, tensors: the files that have an image, and the tensors of each.
        buffer: the memory of the images; None without images.
        device: returns the object that copies from the GPU; None if the weights are in host memory.

    Attributes:
        arrived: the event after the last copy from a GPU; None if nothing was copied from a GPU.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        files: Sequence[FilePlan],
        tensors: Sequence[FileTensors],
        buffer: _native.HostBuffer | None,
        device: Callable[[], DeviceCopies] | None,
    ) -> None:
        self._buffer, self._device = buffer, device
        self._places = {id(each): _Place(each.data_ptr(), 0, each.nbytes) for each in weights if not each.is_meta}
        self.arrived: _native.DeviceEvent | None = None
        if buffer is not None:
            for plan, members, at in zip(files, tensors, image_places(files), strict=True):
                self._add_image(plan, members, buffer.address + at - plan.start)

    def _add_image(self, plan: FilePlan, members: FileTensors, address: int) -> None:
        for slot, tensor in zip(plan.pt.slots, members.tensors, strict=True):
            if tensor.is_meta:
                low, high = max(0, plan.start - plan.head - slot.offset), min(slot.nbytes, plan.stop - slot.offset)
                self._places[id(tensor)] = _Place(address + slot.offset, low, high)

    def take(self, fragments: Sequence[Fragment]) -> None:
        """Copies those elements of the fragments that this rank writes. Then the fragments may be overwritten.

        On a GPU, later work of the current stream waits for the copies. The host does not wait.
        """
        copies = sorted(filter(None, map(self._copy, fragments)))
        if not copies:
            return
        destinations, sources, nbytes = map(list, zip(*copies, strict=True))
        if self._device is None:
            _native.copy_host(destinations, sources, nbytes, HOST_THREADS)
            return
        buffer, device = self._buffer, self._device()
        assert buffer is not None, "weights are on a GPU, but there is no buffer of images"
        offsets = [destination - buffer.address for destination in destinations]
        values = [fragment.values for fragment in fragments[:1]]  # all fragments are parts of one tensor
        self.arrived = device.start(buffer, offsets, sources, nbytes, values)[-1][1]
        device.hold()

    def _copy(self, fragment: Fragment) -> tuple[int, int, int] | None:
        """Returns a copy's destination and source (addresses) and its size (bytes).

        Returns None if this rank writes nothing of the fragment.
        """
        place = self._places.get(id(fragment.weight))
        if place is None:
            return None
        start = fragment.start * fragment.values.itemsize
        low, high = max(place.low, start), min(place.high, start + fragment.values.nbytes)
        return (place.address + low, fragment.values.data_ptr() + low - start, high - low) if low < high else None
