"""Writes the planned files of a HuggingFace model, streamed from any reader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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
from mcore_ckpt.io.checksums import Progress, crc32
from mcore_ckpt.io.files import write_file
from mcore_ckpt.io.streams import Placed, cuts_of, memory_at, stream

KIND = "huggingface"
"""The kind of these files in a manifest."""

# A sum finds NaN in a tenth of the time of `isnan`, but torch can sum only these dtypes, not narrower ones.
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

    The function needs two buffers of STREAM_BYTES, the reader's memory, and memory for the tensors of one batch that
    are converted to other values or another dtype. The total does not grow with the size of the files.

    Args:
        numbers: the indices, in `plan.files`, of the files to write.
        reader: the reader of the tensors. Its `read` is called on another thread, one call at a time.
        folder: the folder to write to, which must not have any of these files yet.
        progress: a function that is called after each part has been written, with the number of bytes of the part.
        allow_nan: whether to write NaN instead of refusing it.

    Returns:
        The files with their sizes and CRC-32s; `path` is the file's name in the folder.

    Raises:
        CheckpointCorruptError: the source is damaged or has NaN; the message names the tensor.
        CommitError: the writing was stopped.
        OSError: a file could not be written.
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
    """Durably writes the index, which lists the file of each tensor. A single file needs no index.

    Returns None if no index is written. Raises OSError if the index cannot be written.
    """
    if len(plan.files) == 1:
        return None
    files = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
    data = encode_index(files, plan.nbytes)
    write_file(folder / INDEX_FILE, [data])
    return WrittenFile(INDEX_FILE, KIND, len(data), crc32(data))


@dataclass(frozen=True, eq=False)
class _Target:
    """A file that is being written.

    Attributes:
        offsets: the byte offsets of the tensors in the file.
        cuts: the byte offsets at which the parts of the file begin and end.
        crcs: for each part that has been written, the CRC-32s of its blocks.
    """

    file: WeightFile
    layout: _native.FileLayout
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]
    crcs: list[list[int]]

    @staticmethod
    def of(file: WeightFile) -> _Target:
        header = encode_header((tensor.name, tensor.dtype, tensor.shape) for tensor in file.tensors)
        sizes = [tensor.nbytes for tensor in file.tensors]
        *offsets, end = itertools.accumulate(sizes, initial=len(header))
        layout = _native.FileLayout(offsets, sizes, [-1] * len(sizes), [(0, header)], end, BLOCK_BYTES)
        return _Target(file, layout, tuple(offsets), cuts_of(end), [])

    def parts(self) -> list[_Part]:
        return [_Part(self, start, stop) for start, stop in itertools.pairwise(self.cuts)]

    def finished(self) -> WrittenFile:
        crc = self.layout.file_crc(self.layout.slot_crcs(self.layout.join(self.cuts, self.crcs)))
        return WrittenFile(self.file.name, KIND, self.cuts[-1], crc)


@dataclass(frozen=True, eq=False)
class _Part:
    """Bytes `[start, stop)` of a file, which are written in one batch."""

    target: _Target
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.stop == self.target.cuts[-1]

    def tensors(self, buffer: _native.HostBuffer, place: int) -> Iterator[Elements]:
        """Yields the elements of each tensor in this part. The part's first byte is at `place` in the buffer."""
        for tensor, offset in zip(self.target.file.tensors, self.target.offsets, strict=True):
            low, high = max(offset, self.start), min(offset + tensor.nbytes, self.stop)
            if low < high:
                memory = memory_at(buffer, place + low - self.start, high - low, tensor.dtype)
                yield Elements(tensor, (low - offset) // tensor.dtype.itemsize, memory)


def _read(reader: CheckpointReader, batch: Sequence[Placed[_Part]], scratch: Scratch) -> None:
    fill(reader, (wanted for placed in batch for wanted in placed.part.tensors(placed.buffer, placed.offset)), scratch)


def _write(batch: Sequence[Placed[_Part]], folder: Path, allow_nan: bool) -> None:
    job = _native.WriteJob(threads=tuning.IO_THREADS, piece_bytes=tuning.WRITE_BYTES)
    try:
        for placed in batch:
            part = placed.part
            path = str(folder / part.target.file.name)
            job.add_file(path, part.target.layout, part.start, part.stop, buffer=placed.buffer, offset=placed.offset)
        job.start()
        if not allow_nan:
            # Look for NaN while the batch is being written, because the writing threads mostly wait for the disk.
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
    assert crcs is not None, "wait returns None only after a timeout"
    return crcs


def _refuse_nan(placed: Placed[_Part]) -> None:
    for tensor, first, memory in placed.part.tensors(placed.buffer, placed.offset):
        # A sum of infinities of both signs is NaN, too, so a NaN sum does not prove that an element is NaN.
        if tensor.dtype not in _SUMMED or not memory.sum().isnan():
            continue
        for number, part in enumerate(memory.split(_LOOK_CLOSER_ELEMENTS)):
            bad = part.isnan().nonzero()
            if len(bad):
                at = first + number * _LOOK_CLOSER_ELEMENTS + int(bad[0])
                raise CheckpointCorruptError(
                    f"tensor {tensor.name}: element {at} is NaN: either the training had diverged before the save, or "
                    "it had never filled this tensor: use an older checkpoint, or allow NaN to be written"
                )
