"""The planned files of a HuggingFace model, streamed from wherever the tensors are."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt import _native, knobs
from mcore_ckpt.errors import CheckpointCorruptError, CommitError
from mcore_ckpt.hf.export import ExportPlan, FileTensor, WeightFile
from mcore_ckpt.hf.mapping import Slab
from mcore_ckpt.hf.safetensors_files import INDEX_FILE, encode_header, encode_index
from mcore_ckpt.hf.source import PartRead, TensorSource
from mcore_ckpt.staging.arena import Arena
from mcore_ckpt.storage.files import write_file
from mcore_ckpt.storage.index import BLOCK_BYTES
from mcore_ckpt.storage.requests import WrittenFile
from mcore_ckpt.streaming import Placed, cuts_of, memory_at, stream

Progress = Callable[[int], None]

KIND = "huggingface"
"""Of these files in a manifest."""

# What a sum says of NaN costs a tenth of what `isnan` does; it has no kernel for narrower dtypes.
_SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LOOK_CLOSER_ELEMENTS = 1 << 20


def write_files(
    plan: ExportPlan,
    numbers: Sequence[int],
    source: TensorSource,
    folder: Path,
    progress: Progress = lambda nbytes: None,
    *,
    allow_nan: bool = False,
) -> list[WrittenFile]:
    """Writes some of the planned files, durably.

    Takes two buffers of STREAM_BYTES, what reading takes, and, where values or dtypes change, as much as is changed at
    a time; whatever the sizes of the files.

    Args:
        plan: what is written.
        numbers: of the files to write.
        source: where the bytes are. Read on a thread of its own, one call at a time.
        folder: where the files go; none of them is there.
        progress: told of bytes that have been written.
        allow_nan: write what is not a number, too.

    Returns:
        The files with their sizes and CRC-32s, `path` being the name in the folder.

    Raises:
        CheckpointCorruptError: the source is damaged, or has NaN; names the tensor.
        CommitError, OSError: writing failed.
    """
    scratch = _Scratch()
    written = []
    targets = [_Target.of(plan.files[number]) for number in numbers]
    for batch in stream((target.parts() for target in targets), lambda batch: _read(source, batch, scratch)):
        _write(batch, folder, allow_nan)
        for part in (placed.part for placed in batch):
            progress(part.nbytes)
            if part.is_last:
                written.append(part.target.finished())
    return written


def write_index(plan: ExportPlan, folder: Path) -> WrittenFile | None:
    """Writes which file has which tensor, durably; None where one file needs no index. Raises OSError."""
    if len(plan.files) == 1:
        return None
    files = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
    data = encode_index(files, plan.nbytes)
    write_file(folder / INDEX_FILE, [data])
    return WrittenFile(INDEX_FILE, KIND, len(data), zlib.crc32(data))


@dataclass(frozen=True, eq=False)
class _Target:
    """A file under way.

    Attributes:
        offsets: of its tensors, in bytes.
        cuts: where its parts meet.
        crcs: those of the parts that are written.
    """

    file: WeightFile
    image: _native.FileImage
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]
    crcs: list[list[int]]

    @staticmethod
    def of(file: WeightFile) -> _Target:
        header = encode_header((tensor.name, tensor.dtype, tensor.tensor.shape) for tensor in file.tensors)
        sizes = [tensor.nbytes for tensor in file.tensors]
        *offsets, end = itertools.accumulate(sizes, initial=len(header))
        image = _native.FileImage(offsets, sizes, [-1] * len(sizes), [(0, header)], end, BLOCK_BYTES)
        return _Target(file, image, tuple(offsets), cuts_of(end), [])

    def parts(self) -> list[_Part]:
        return [_Part(self, start, stop) for start, stop in itertools.pairwise(self.cuts)]

    def finished(self) -> WrittenFile:
        crc = self.image.file_crc(self.image.slot_crcs(self.image.join(self.cuts, self.crcs)))
        return WrittenFile(self.file.name, KIND, self.cuts[-1], crc)


@dataclass(frozen=True, eq=False)
class _Part:
    """Bytes `[start, stop)` of a file."""

    target: _Target
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.stop == self.target.cuts[-1]

    def tensors(self, address: int) -> Iterator[tuple[FileTensor, int, torch.Tensor]]:
        """Each tensor that has elements here: number of the first, and the memory of all of them."""
        for tensor, offset in zip(self.target.file.tensors, self.target.offsets, strict=True):
            low, high = max(offset, self.start), min(offset + tensor.nbytes, self.stop)
            if low < high:
                memory = memory_at(address + low - self.start, high - low, tensor.dtype)
                yield tensor, (low - offset) // tensor.dtype.itemsize, memory


# -- reading -----------------------------------------------------------------------------------------------


class _Scratch:
    """Memory for what is not read to where it is written from; it serves again for the next batch."""

    def __init__(self) -> None:
        self._arena = Arena()

    def reserve(self, changes: Iterable[_Change]) -> list[torch.Tensor]:
        sizes = [change.nbytes for change in changes]
        # Each on a multiple of what any dtype's elements take.
        *offsets, end = itertools.accumulate((-(-size // 16) * 16 for size in sizes), initial=0)
        if not end:
            return []
        address = self._arena.take(end)
        return [memory_at(address + at, size, torch.uint8) for at, size in zip(offsets, sizes, strict=True)]


@dataclass(frozen=True, eq=False)
class _Change:
    """Elements that are read to other memory first: `[start, stop)` of a slab, which go to `memory`.

    `stored`: their dtype there. Where the values change, the slab is read whole.
    """

    slab: Slab
    start: int
    stop: int
    stored: torch.dtype
    memory: torch.Tensor

    @property
    def read(self) -> tuple[int, int]:
        return (self.start, self.stop) if self.slab.change is None else (0, self.slab.numel)

    @property
    def nbytes(self) -> int:
        start, stop = self.read
        return (stop - start) * self.stored.itemsize

    def apply(self, values: torch.Tensor) -> None:
        if self.slab.change is not None:
            changed = self.slab.change.to_hf(values.view(self.slab.region.local_shape))
            values = changed.reshape(-1)[self.start : self.stop]
        self.memory.copy_(values)


def _read(source: TensorSource, batch: Sequence[Placed[_Part]], scratch: _Scratch) -> None:
    reads: list[PartRead] = []
    changes: list[_Change] = []
    dtypes = source.tensors()
    for placed in batch:
        for tensor, first, memory in placed.part.tensors(placed.address):
            for slab, start, stop, its_memory in _slabs(tensor, first, memory):
                if not slab.mcore:
                    its_memory.zero_()
                    continue
                stored = dtypes[slab.mcore].dtype
                if slab.change is None and stored == tensor.dtype:
                    reads.append(_part(slab, start, stop, its_memory))
                else:
                    changes.append(_Change(slab, start, stop, stored, its_memory))
    read_first = [memory.view(change.stored) for change, memory in zip(changes, scratch.reserve(changes), strict=False)]
    for change, memory in zip(changes, read_first, strict=True):
        reads.append(_part(change.slab, *change.read, memory))
    source.read(reads)
    for change, memory in zip(changes, read_first, strict=True):
        change.apply(memory)


def _slabs(tensor: FileTensor, first: int, memory: torch.Tensor) -> Iterator[tuple[Slab, int, int, torch.Tensor]]:
    """What slabs have of the elements from `first` on: which of theirs, and the memory."""
    stop = first + memory.numel()
    for slab in tensor.tensor.slabs:
        low, high = max(slab.start, first), min(slab.start + slab.numel, stop)
        if low < high:
            yield slab, low - slab.start, high - slab.start, memory[low - first : high - first]


def _part(slab: Slab, start: int, stop: int, memory: torch.Tensor) -> PartRead:
    first = slab.region.flat[0]
    return PartRead(slab.mcore, slab.region.with_flat(first + start, first + stop), memory)


# -- writing -----------------------------------------------------------------------------------------------


def _write(batch: Sequence[Placed[_Part]], folder: Path, allow_nan: bool) -> None:
    job = _native.WriteJob(threads=knobs.IO_THREADS, piece_bytes=knobs.WRITE_BYTES)
    try:
        for placed in batch:
            part = placed.part
            path = str(folder / part.target.file.name)
            job.add_file(path, part.target.image, part.start, part.stop, None, placed.address)
        job.start()
        if not allow_nan:
            # While it is being written: threads that wait for the disk leave the cores to this.
            for placed in batch:
                _refuse_nan(placed)
        for number, placed in enumerate(batch):
            placed.part.target.crcs.append(_crcs(job, number, folder))
            job.finish(number, b"" if placed.part.is_last else None)
    finally:
        job.close()


def _crcs(job: _native.WriteJob, number: int, folder: Path) -> list[int]:
    try:
        crcs = job.wait(number)
    except RuntimeError as error:
        raise CommitError(f"{folder}: writing was stopped: {error}") from None
    assert crcs is not None, "without a timeout there is an end"
    return crcs


def _refuse_nan(placed: Placed[_Part]) -> None:
    for tensor, first, memory in placed.part.tensors(placed.address):
        # Infinities of both signs sum up to NaN, too.
        if tensor.dtype not in _SUMMED or not memory.sum().isnan():
            continue
        for number, part in enumerate(memory.split(_LOOK_CLOSER_ELEMENTS)):
            bad = part.isnan().nonzero()
            if len(bad):
                at = first + number * _LOOK_CLOSER_ELEMENTS + int(bad[0])
                raise CheckpointCorruptError(
                    f"tensor {tensor.name}: element {at} is NaN: the training had diverged when this was saved, or "
                    "never filled it: use an older checkpoint, or ask for NaN to be written as it is"
                )
