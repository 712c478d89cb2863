"""Copies weights that are made from main parameters to their places in host memory, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from mcore_ckpt.formats.native.file_plan import FilePlan
from mcore_ckpt.io import _native
from mcore_ckpt.io.tuning import HOST_THREADS
from mcore_ckpt.save.capture import FileTensors, image_places
from mcore_ckpt.save.device_copies import DeviceCopies
from mcore_ckpt.state.main_weights import Fragment


class _Place(NamedTuple):
    """Where bytes `[low, high)` of a weight go: byte 0, if it is one of them, goes to `address`."""

    address: int
    low: int
    high: int


class WeightCopies:
    """Copies what `MainWeights.make` makes into images of files and, without an image, into the weights' own memory.

    Args:
        weights: the weights that have memory of their own.
        files, tensors: the files that have an image, and the tensors of each.
        buffer: the memory of the images; None if there is none.
        device: returns what makes the copies from the GPU; None if the weights are in host memory.

    Attributes:
        arrived: the event after the last copy from a GPU; None if there was none.
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
        """Copies elements of weights, as far as this rank writes them. The elements may then be overwritten.

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
        assert buffer is not None, "a state on a GPU has images of all files"
        offsets = [destination - buffer.address for destination in destinations]
        values = [fragment.values for fragment in fragments[:1]]  # all are parts of one tensor
        self.arrived = device.start(buffer, offsets, sources, nbytes, values)[-1][1]
        device.hold()

    def _copy(self, fragment: Fragment) -> tuple[int, int, int] | None:
        """Returns the destination, the source and the number of bytes; None if this rank writes none of them."""
        place = self._places.get(id(fragment.weight))
        if place is None:
            return None
        start = fragment.start * fragment.values.itemsize
        low, high = max(place.low, start), min(place.high, start + fragment.values.nbytes)
        return (place.address + low, fragment.values.data_ptr() + low - start, high - low) if low < high else None
