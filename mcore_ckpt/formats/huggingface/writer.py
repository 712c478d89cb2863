"""The planned files of a HuggingFace model, streamed from wherever the tensors are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import CheckpointCorruptError, CommitError
from mcore_ckpt.formats.contract import CheckpointReader
from mcore_ckpt.formats.huggingface.elements import Elements, Scratch, fill
from mcore_ckpt.formats.huggingface.export_plan import ExportPlan, WeightFile
from mcore_ckpt.formats.huggingface.safetensors_files import INDEX_FILE, encode_header, encode_index
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import write_file
from mcore_ckpt.io.streams import Placed, cuts_of, memory_at, stream

Progress = Callable[[int], None]

KIND = "huggingface"
"""Of these files in a manifest."""

# What a sum says of NaN costs a tenth of what `isnan` does; it has no kernel for narrower dtypes.
_SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LOOK_CLOSER_ELEMENTS = 1 << 20


def write_weights(
    plan: ExportPlan,
    numbers: Sequence[int],
    reader: CheckpointReader,
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
        reader: where the bytes are. Read on a thread of its own, one call at a time.
        folder: where the files go; none of them is there.
        progress: told of bytes that have been written.
        allow_nan: write what is not a number, too.

    Returns:
        The files with their sizes and CRC-32s, `path` being the name in the folder.

    Raises:
        CheckpointCorruptError: the source is damaged, or has NaN; names the tensor.
        CommitError, OSError: writing failed.
    """
    scratch = Scratch()
    written = []
    targets = [_Target.of(plan.files[number]) for number in numbers]
    for batch in stream((target.parts() for target in targets), lambda batch: _read(reader, batch, scratch)):
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
    return WrittenFile(INDEX_FILE, KIND, len(data), crc32(data))


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

    def tensors(self, address: int) -> Iterator[Elements]:
        """Each tensor that has elements here: number of the first, and the memory of all of them."""
        for tensor, offset in zip(self.target.file.tensors, self.target.offsets, strict=True):
            low, high = max(offset, self.start), min(offset + tensor.nbytes, self.stop)
            if low < high:
                memory = memory_at(address + low - self.start, high - low, tensor.dtype)
                yield Elements(tensor, (low - offset) // tensor.dtype.itemsize, memory)


def _read(reader: CheckpointReader, batch: Sequence[Placed[_Part]], scratch: Scratch) -> None:
    fill(reader, (wanted for placed in batch for wanted in placed.part.tensors(placed.address)), scratch)


# -- writing -----------------------------------------------------------------------------------------------


def _write(batch: Sequence[Placed[_Part]], folder: Path, allow_nan: bool) -> None:
    job = _native.WriteJob(threads=tuning.IO_THREADS, piece_bytes=tuning.WRITE_BYTES)
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
