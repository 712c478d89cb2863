"""Compares pairs of tensors, several pairs at a time, in batches of elements.

Memory use does not grow with the size of the tensors. A thread has one batch of both tensors of a pair in memory and,
if elements differ, fp64 copies, which take a few times as much memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.io import tuning
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.tools.examine.differences import Differences, Tolerance
from mcore_ckpt.tools.examine.progress import Progress, summed

# The size of a batch in bytes, counted in the wider of the pair's two dtypes.
_BATCH_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two tensors of a pair.

    Several threads call `read` with the position of an element and a flat tensor of the dtype in `info`. `read` fills
    the tensor with that element and the elements after it.
    """

    info: TensorInfo
    read: Callable[[int, torch.Tensor], object]

    @property
    def numel(self) -> int:
        return Region.whole(self.info.shape).numel

    @property
    def nbytes(self) -> int:
        return self.numel * self.info.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Pair:
    """Two tensors of the same shape. `right` is the reference."""

    left: Side
    right: Side


def compare_pairs(
    groups: Sequence[Sequence[Pair]], tolerance: Tolerance, progress: Progress, thread_name: str
) -> list[Differences]:
    """Returns the differences of each group of pairs, added up. A group may be empty.

    `progress` counts bytes of the left tensors. The names of the threads begin with `thread_name`.

    Raises the first error of a `read`. After an error or Ctrl-C, no thread begins another batch.
    """
    count = summed(progress, sum(pair.left.nbytes for pairs in groups for pair in pairs))
    stop = threading.Event()

    def compare_group(pairs: Sequence[Pair]) -> Differences:
        found = Differences()
        for pair in pairs:
            for left, right in _batches(pair, stop):
                found.add(left, right, tolerance)
                count(left.nbytes)
        return found

    with ThreadPoolExecutor(tuning.HOST_THREADS, thread_name_prefix=thread_name) as pool:
        try:
            return list(pool.map(compare_group, groups))
        except BaseException:
            stop.set()  # makes all threads stop before their next batch, instead of finishing their tensors
            raise


def _batches(pair: Pair, stop: threading.Event) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the same elements of both tensors, batch by batch, in memory that the next batch overwrites."""
    sides, numel = (pair.left, pair.right), pair.left.numel
    step = max(1, _BATCH_BYTES // max(side.info.dtype.itemsize for side in sides))
    memory = [torch.empty(min(step, numel), dtype=side.info.dtype) for side in sides]
    for start in range(0, numel, step):
        if stop.is_set():
            return
        left, right = (each[: numel - start] for each in memory)
        pair.left.read(start, left)
        pair.right.read(start, right)
        yield left, right
