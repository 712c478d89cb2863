"""Decodes coded shards: computes their values from the stored elements and from scales or upper halves.

docs/format.md says how shards are coded. The values are float32. The elements are read into temporary memory.

A load that fills exactly the stored range, in the stored form, uses the stored elements and the scale without decoding.
Any other load decodes. Remainders are valid only with the weights that they were saved with. So a load that must decode
remainders fills each weight together with the weight's remainder, and then the ranks gather the weights from their
owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.halves import join_halves
from mcore_ckpt.formats.contract import Read, ReadTarget
from mcore_ckpt.io import tuning
from mcore_ckpt.io.batches import batches
from mcore_ckpt.sharding.overlap import Rows, rows_into
from mcore_ckpt.sharding.plan import ReadRange, StoredShard


@dataclass(frozen=True)
class Partners:
    """The data that, together with a coded shard's elements, gives the shard's values.

    Attributes:
        scale: the shard of the scale; None if the coded shard has no scale.
        upper: the ranges with the upper halves of all elements of the coded shard, in the order of these elements;
            empty if the shard has a scale instead.
    """

    scale: StoredShard | None = None
    upper: tuple[ReadRange, ...] = ()


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of a coded shard, the memory that they are read into, and the tensor that gets their values."""

    rows: Rows
    target: torch.Tensor
    stored: torch.Tensor
    scale: torch.Tensor | None
    upper: torch.Tensor | None

    def decode(self) -> None:
        values = decoded(self.stored, self.scale, self.upper)
        shape, start = (self.rows.rows, self.rows.row), int(self.target.storage_offset()) + self.rows.destination
        there = self.target.view(-1).as_strided(shape, (self.rows.destination_stride, 1), start)
        there.copy_(values.view(shape))


def decoded(stored: torch.Tensor, scale: torch.Tensor | None, upper: torch.Tensor | None) -> torch.Tensor:
    """Returns the float32 values of stored elements.

    With a scale, the value is the element as float32, times the scale, as transformer-engine's
    `FusedAdam.get_unscaled_state` computes it. With upper halves, the value is the upper half joined with the stored
    lower half.

    Args:
        stored: the elements: float16 or uint8 (bits of float8_e4m3fn) with a scale, int16 with upper halves.
        scale: one float32, or None.
        upper: a bfloat16 tensor of the shape of `stored`, or None.
    """
    if upper is not None:
        return join_halves(upper, stored)
    assert scale is not None
    elements = stored.view(torch.float8_e4m3fn) if stored.dtype == torch.uint8 else stored
    return elements.to(torch.float32).mul_(scale)


def read_coded(ranges: Sequence[ReadTarget], read: Read, partners: Callable[[StoredShard], Partners]) -> int:
    """Fills float32 tensors with values of coded shards, and returns the number of bytes read.

    The temporary memory is at most CONVERT_BYTES, unless a single range needs more. `read` reads ranges of stored
    elements, and `partners` finds the partners of a shard.
    """
    nbytes = 0
    for batch in batches(ranges, lambda one: one[0].rows.numel * one[1].element_size(), tuning.CONVERT_BYTES):
        reads: list[ReadTarget] = []
        parts = [_part(range_, target, partners(range_.stored), reads) for range_, target in batch]
        nbytes += read(reads)
        for part in parts:
            part.decode()
    return nbytes


def _part(range_: ReadRange, target: torch.Tensor, partners: Partners, reads: list[ReadTarget]) -> _Part:
    """Makes the memory for one range, and extends `reads` by the reads that fill this memory."""
    rows, shard = range_.rows, range_.stored.as_stored
    # The rows are read into memory without gaps, even if they are apart in the tensor.
    stored = torch.empty(rows.numel, dtype=torch_dtype(shard.dtype), device=target.device)
    reads.append((ReadRange(shard, rows._replace(destination=0, destination_stride=rows.row)), stored))
    scale = upper = None
    if partners.scale is not None:
        scale = torch.empty(1, dtype=torch.float32, device=target.device)
        reads.append((ReadRange.whole(partners.scale), scale))
    if partners.upper:
        upper = torch.empty(rows.numel, dtype=torch.bfloat16, device=target.device)
        reads += [(part, upper) for part in _same_rows(rows, partners.upper)]
    return _Part(rows, target, stored, scale, upper)


def _same_rows(rows: Rows, upper: Sequence[ReadRange]) -> Iterator[ReadRange]:
    """Yields the ranges with the upper halves of the elements in `rows`, to be read into memory without gaps."""
    for number in range(rows.rows):
        start = rows.start + number * rows.source_stride
        for range_ in upper:
            for part in rows_into(range_.rows, start, start + rows.row):
                moved = part._replace(destination=part.destination + number * rows.row)
                yield ReadRange(range_.stored, moved)
