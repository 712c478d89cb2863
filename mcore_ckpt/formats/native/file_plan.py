"""Plans one indexed file: its structure, which is reused from save to save, and the range that each rank writes."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.checkpoint.index import BLOCK_BYTES, FileIndex, IndexTemplate
from mcore_ckpt.checkpoint.pt_skeleton import PayloadSlot, PtSkeleton, build_skeleton
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.native.replica_shares import Share, share_out
from mcore_ckpt.formats.native.write_requests import WriteRequest
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.sharding.plan import StoredShard


class TensorParts(NamedTuple):
    """Byte ranges of tensors, as parallel tuples.

    Bytes `[skip[i], skip[i] + nbytes[i])` of tensor number `tensor[i]` are written at byte `at[i]` of the file.
    """

    tensor: tuple[int, ...]
    skip: tuple[int, ...]
    at: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FilePlan:
    """The plan of one file, and of this rank's range in the file.

    Attributes:
        request: the write request. Its tensors are on the `meta` device, so that a plan keeps no training state alive.
        layout: the file layout of `pt`, for the native writer.
        index: the file's index without CRCs.
        share: all writers of the file, with their ranges.
        start: the first byte of this rank's range.
        stop: the end of this rank's range, exclusive.
        head: the number of bytes before `start` that belong to a tensor with bytes on both sides of `start`; 0 if there
            is no such tensor. The number is smaller than a page. The writer of the previous range writes its own copy
            of these bytes. If the copy differs from this rank's bytes, the owner replaces the copy by this rank's
            bytes.
    """

    request: WriteRequest
    pt: PtSkeleton
    layout: _native.FileLayout
    index: IndexTemplate
    share: Share
    start: int
    stop: int
    head: int = 0

    @property
    def path(self) -> str:
        return self.request.path

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @cached_property
    def least_size(self) -> int:
        """The least size of the file in bytes.

        The CRC of each block, which is not known yet, can make the file up to 9 bytes larger.
        """
        return self.pt.records_end + len(self.pt.tail([0] * len(self.pt.slots), b"", 0)) + self.index.least_bytes

    @cached_property
    def parts(self) -> TensorParts:
        """The byte ranges of tensors in `head` and in this rank's range, in ascending order.

        No range is larger than COPY_GROUP_BYTES.
        """
        rows = []
        for number, slot in enumerate(self.pt.slots):
            low, high = max(slot.offset, self.start - self.head), min(slot.offset + slot.nbytes, self.stop)
            for at in range(low, high, tuning.COPY_GROUP_BYTES):
                rows.append((number, at - slot.offset, at, min(tuning.COPY_GROUP_BYTES, high - at)))
        return TensorParts(*zip(*rows, strict=True)) if rows else TensorParts((), (), (), ())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the global tensors that the file holds, aliases included."""
        keys = [*(write.key for write in self.request.tensors), *(alias.key for alias in self.request.aliases)]
        return tuple(dict.fromkeys(key.name for key in keys))

    @cached_property
    def holds(self) -> str:
        """A digest of `names`. At every save, the ranks send this digest instead of thousands of names."""
        return _digest(self.names)

    @cached_property
    def structure(self) -> str:
        """A digest of everything that must be the same on all writers of the file for their ranges to fit together."""
        tensors = [[*write.path, list(write.shape), dtype_name(write.tensor.dtype)] for write in self.request.tensors]
        return _digest([tensors, self.pt.records_end, self.share.writers, self.share.cuts])


def _digest(value: Any) -> str:
    return hashlib.sha256(fields.encode({"value": value})).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class FileStructure:
    """The structure of a file, which does not depend on the file's writers. See FilePlan for the attributes."""

    pt: PtSkeleton
    layout: _native.FileLayout
    index: IndexTemplate


class StructureCache:
    """Keeps the last structure of each file. Building a structure takes long, and most saves need the same structure.

    A structure is reused if the tensors' names, regions, shapes and dtypes are the same. The tensor objects may differ,
    because a trainer that offloads its optimizer has new tensor objects at each save.
    """

    def __init__(self) -> None:
        self._structures: dict[str, tuple[object, FileStructure]] = {}

    def get(self, request: WriteRequest) -> FileStructure:
        tensors = [(t.path, t.shape, t.tensor.dtype, t.key, t.region, t.coding, t.beside) for t in request.tensors]
        structure = (tensors, request.aliases)
        cached = self._structures.get(request.path)
        if cached is None or cached[0] != structure:
            _refuse_names(request)
            pt = _new_skeleton(request)
            cached = (structure, FileStructure(pt, _file_layout(pt), _index_template(request, pt)))
            self._structures[request.path] = cached
        return cached[1]


@dataclass(frozen=True, eq=False)
class FileWrite:
    """This rank's range of a file, and the place of the range's bytes in memory.

    Attributes:
        plan: the file, and this rank's range in it.
        sources: the address of each tensor's bytes; None if `buffer` is given.
        owner: the object that keeps the memory at these addresses alive. If the plan has a `head`, `owner` has the
            contiguous tensors, beginning with the first that has bytes in the range.
        device: the GPU that some of the tensors are on; None if all are in host memory.
        on_device: for each tensor, whether the tensor is on that GPU; empty if `device` is None.
        buffer: the host memory that the bytes are copied to; None if `sources` is given.
        offset: the offset of the range's first byte in the buffer, a multiple of the page size. The bytes of the plan's
            `head` are directly before this offset.
        ready: pairs `(file offset, event)`. Once the event has happened, all bytes before the file offset are in
            `buffer`. Empty if all bytes are in `buffer` already.
    """

    plan: FilePlan
    sources: Sequence[int] | None = None
    owner: Any = None
    device: int | None = None
    on_device: Sequence[bool] = ()
    buffer: _native.HostBuffer | None = None
    offset: int = 0
    ready: Sequence[tuple[int, _native.DeviceEvent]] = ()

    def head(self) -> bytes:
        """Returns the bytes of the plan's `head`. Copies from a GPU into `buffer` must have ended before."""
        if not self.plan.head:
            return b""
        if self.buffer is not None:
            return ctypes.string_at(self.buffer.address + self.offset - self.plan.head, self.plan.head)
        if self.device is None:
            assert self.sources is not None
            return ctypes.string_at(self.sources[self.plan.parts.tensor[0]], self.plan.head)
        return bytes(self.owner[0].view(-1).view(torch.uint8)[: self.plan.head].cpu().numpy())


def plan_file(request: WriteRequest, rank: int, structures: StructureCache) -> FilePlan:
    """Plans a file for world rank `rank`, which is one of the ranks that can write the file.

    Raises:
        ValueError: the tensors are not listed in the order of the file's nested dict.
        UnsupportedError: a reader would refuse a tensor's name.
    """
    structure = structures.get(request)
    slots = structure.pt.slots
    writers = request.writers or (rank,)
    share = share_out(writers, structure.pt.records_end, tuning.SHARE_BYTES, [slot.offset for slot in slots])
    start, stop = share.range_of(rank)
    cut = slot_across(slots, start)
    head = 0 if cut is None else start - slots[cut].offset
    stand_ins = (replace(write, tensor=torch.empty_like(write.tensor, device="meta")) for write in request.tensors)
    request = replace(request, tensors=tuple(stand_ins))
    return FilePlan(request, structure.pt, structure.layout, structure.index, share, start, stop, head)


def slot_across(slots: Sequence[PayloadSlot], offset: int) -> int | None:
    """Returns the number of the slot that has bytes on both sides of an offset of the file; None if no slot does."""
    number = bisect_left(slots, offset, key=lambda slot: slot.offset) - 1
    while number >= 0 and not slots[number].nbytes:
        number -= 1
    return number if number >= 0 and slots[number].offset + slots[number].nbytes > offset else None


def _refuse_names(request: WriteRequest) -> None:
    """Refuses names that the index reader would refuse, so that no unreadable checkpoint is written."""
    for write in request.tensors:
        try:
            fields.as_name(write.key.name, "name")
        except fields.FieldError as error:
            raise UnsupportedError(
                f"{request.path}: a tensor cannot be saved: {error}: use names of at most {fields.MAX_NAME} printable "
                "characters"
            ) from None


def _file_layout(pt: PtSkeleton) -> _native.FileLayout:
    return _native.FileLayout(
        [slot.offset for slot in pt.slots],
        [slot.nbytes for slot in pt.slots],
        [-1 if slot.descriptor_crc_at is None else slot.descriptor_crc_at for slot in pt.slots],
        list(pt.gaps),
        pt.records_end,
        BLOCK_BYTES,
    )


def _index_template(request: WriteRequest, pt: PtSkeleton) -> IndexTemplate:
    shards = (
        StoredShard(
            write.key,
            write.region,
            dtype_name(write.tensor.dtype),
            request.path,
            slot.offset,
            slot.nbytes,
            (),
            write.coding,
            write.beside,
        )
        for write, slot in zip(request.tensors, pt.slots, strict=True)
    )
    return IndexTemplate(FileIndex(tuple(shards), request.aliases))


def _new_skeleton(request: WriteRequest) -> PtSkeleton:
    # Use empty copies, each with its own storage, because a live parameter is a view of its bucket, and torch.save
    # would write the whole bucket.
    copies = [torch.empty(write.shape, dtype=write.tensor.dtype) for write in request.tensors]
    tree: dict[str, Any] = {}
    for name in request.tree:
        tree[name] = {}
    for write, copy in zip(request.tensors, copies, strict=True):
        branch = tree
        # Pickle recognizes a repeated string only if it is the same object. A name that was loaded from a file and an
        # equal name in the code are two objects. Without interning, a resumed run would write other bytes for the same
        # state.
        *parents, leaf = map(sys.intern, write.path)
        for part in parents:
            branch = branch.setdefault(part, {})
        branch[leaf] = copy
    if [id(leaf) for leaf in _leaves(tree)] != [id(copy) for copy in copies]:
        # torch numbers its records in the order of the tree. In another order, slots would be assigned to the wrong
        # tensors.
        raise ValueError(f"{request.path}: the tensors are not listed in the order of their tree")
    return build_skeleton(tree, copies)


def _leaves(tree: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value
