"""Streams files that are larger than memory, in batches of parts: one batch is read while another is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.io.pages import PAGE_BYTES, even_cuts, page_ceil


class FilePart(Protocol):
    """A range of a file, of `nbytes` bytes."""

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=FilePart)


@dataclass(frozen=True, eq=False)
class Placed(Generic[P]):
    """A part and its place in a buffer. The part begins at `offset`, a multiple of the page size."""

    part: P
    buffer: _native.HostBuffer
    offset: int


def stream(files: Iterable[Sequence[P]], read: Callable[[Sequence[Placed[P]]], object]) -> Iterator[list[Placed[P]]]:
    """Yields batches of parts that have been read, in order. Raises the exceptions of `read`.

    The memory of a batch is valid until the next batch is requested. Memory use is two buffers of STREAM_BYTES,
    whatever the sizes of the files.

    Args:
        files: the parts of each file (see `cuts_of`). Small files share a batch. Each part of a larger file is a
            separate batch.
        read: fills the memory of all parts of a batch. It is called on another thread, one call at a time.
    """
    batches = _batches(files)
    buffers = (HostMemory(), HostMemory())

    def next_batch(number: int) -> list[Placed[P]] | None:
        parts = next(batches, None)
        if parts is None:
            return None
        placed = _place(parts, buffers[number % 2])
        read(placed)
        return placed

    with ThreadPoolExecutor(1, thread_name_prefix="stream-read") as pool:
        number, reading = 0, pool.submit(next_batch, 0)
        while (batch := reading.result()) is not None:
            number += 1
            reading = pool.submit(next_batch, number)
            yield batch


def cuts_of(end: int) -> tuple[int, ...]:
    """Returns the cuts `(0, ..., end)` that divide a file of `end` bytes into parts for `stream`.

    All cuts except the last are page-aligned.
    """
    return even_cuts(end, max(1, min(-(-end // tuning.STREAM_BYTES), end // PAGE_BYTES)))


def memory_at(buffer: _native.HostBuffer, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns bytes of a buffer as a flat tensor, which keeps the buffer alive."""
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset).view(dtype)


def _batches(files: Iterable[Sequence[P]]) -> Iterator[list[P]]:
    """Groups parts into batches. Small files share a batch; each part of a larger file is a separate batch."""
    waiting: list[P] = []
    nbytes = 0
    for parts in files:
        if len(parts) == 1 and nbytes + page_ceil(parts[0].nbytes) <= tuning.STREAM_BYTES:
            waiting += parts
            nbytes += page_ceil(parts[0].nbytes)
            continue
        if waiting:
            yield waiting
        waiting, nbytes = [], 0
        if len(parts) == 1:
            waiting, nbytes = [*parts], page_ceil(parts[0].nbytes)
        else:
            yield from ([part] for part in parts)
    if waiting:
        yield waiting


def _place(parts: Sequence[P], memory: HostMemory) -> list[Placed[P]]:
    sizes = [page_ceil(part.nbytes) for part in parts]
    buffer = memory.take(max(tuning.STREAM_BYTES + PAGE_BYTES, sum(sizes)))
    return [Placed(part, buffer, sum(sizes[:number])) for number, part in enumerate(parts)]
