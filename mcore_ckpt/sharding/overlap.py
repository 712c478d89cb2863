"""Computes which rows of stored regions make up a wanted region.

The stored regions are intersected with the wanted region in the global tensor. The result is a list of strided copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from mcore_ckpt.sharding.regions import Box, Region, Shape


class Rows(NamedTuple):
    """A strided copy of `rows` rows of `row` elements each, from a stored region to the wanted region.

    Row k begins at element `start + k * source_stride` of the stored region, and is copied to element
    `destination + k * destination_stride` of the wanted region. The strides of a single row are 0.
    """

    start: int
    destination: int
    row: int
    rows: int = 1
    source_stride: int = 0
    destination_stride: int = 0

    @property
    def numel(self) -> int:
        return self.row * self.rows


@dataclass(frozen=True)
class Overlap:
    """The copies that make up a wanted region.

    Attributes:
        rows: pairs (index of a stored region, rows of this region), sorted by destination.
        missing: how many wanted elements lie within the stored global shape, but in none of the stored regions.
        outside: how many wanted elements lie beyond the stored global shape.
    """

    rows: tuple[tuple[int, Rows], ...]
    missing: int
    outside: int


@dataclass(frozen=True)
class _Placed:
    """A box of the global tensor, and its place in a flat range of a local tensor.

    `position` is the place of the box's first element in the flat range, and `strides` are the strides of the local
    tensor, both in elements.
    """

    box: Box
    position: int
    strides: Shape

    def position_of(self, offset: Shape) -> int:
        return self.position + sum(
            (at - start) * stride for at, start, stride in zip(offset, self.box.offset, self.strides, strict=True)
        )

    def part(self, box: Box) -> _Placed:
        return _Placed(box, self.position_of(box.offset), self.strides)


def overlap(wanted: Region, stored: Sequence[Region]) -> Overlap:
    """Finds the rows of the `stored` regions that make up `wanted`, a region of the same tensor.

    Each element is taken from the first stored region that has it. The global shapes can differ in length along an axis
    (a padded vocabulary). Wanted elements beyond the stored tensor are left out. The time is proportional to the number
    of stored regions, so pass only regions that can have wanted elements.

    Example:
        >>> overlap(Region.whole((2, 4)), [Region.whole((2, 4)).with_flat(0, 3), Region.whole((2, 4))]).rows
        ((0, Rows(start=0, destination=0, row=3, rows=1, source_stride=0, destination_stride=0)), \
(1, Rows(start=3, destination=3, row=5, rows=1, source_stride=0, destination_stride=0)))
    """
    remaining = list(_placed(wanted))
    outside = 0
    if stored:
        extent = Box((0,) * len(stored[0].global_shape), stored[0].global_shape)
        inside = [want.part(box) for want in remaining if (box := want.box.intersect(extent)) is not None]
        outside = sum(want.box.numel for want in remaining) - sum(want.box.numel for want in inside)
        remaining = inside
    found: list[tuple[int, Rows]] = []
    for number, region in enumerate(stored):
        if not remaining:
            break
        for have in _placed(region):
            remaining = list(_take(have, remaining, number, found))
    return Overlap(tuple(_joined(found)), sum(want.box.numel for want in remaining), outside)


# The result is cached, because the shards of a parameter, its moments and its main parameter have the same region.
@lru_cache(maxsize=1 << 14)
def _placed(region: Region) -> tuple[_Placed, ...]:
    strides = _strides(region.local_shape)
    return tuple(
        _Placed(box, sum(map(int.__mul__, local.offset, strides)) - region.flat[0], strides)
        for local, box in region.boxes()
    )


def _strides(shape: Shape) -> Shape:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


def _take(have: _Placed, remaining: list[_Placed], number: int, found: list[tuple[int, Rows]]) -> Iterator[_Placed]:
    """Extends `found` by the rows that `have` supplies. Yields the boxes that are still missing."""
    for want in remaining:
        common = want.box.intersect(have.box)
        if common is None:
            yield want
            continue
        found.extend((number, rows) for rows in _rows(common, have, want))
        yield from (want.part(rest) for rest in _without(want.box, common))


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """Yields the parts of a box that lie outside a hole in the box, as at most two boxes per axis."""
    offset, shape = list(box.offset), list(box.shape)
    for axis in range(len(shape)):
        before = hole.offset[axis] - offset[axis]
        after = shape[axis] - before - hole.shape[axis]
        if before:
            yield Box(tuple(offset), (*shape[:axis], before, *shape[axis + 1 :]))
        if after:
            start = hole.offset[axis] + hole.shape[axis]
            yield Box((*offset[:axis], start, *offset[axis + 1 :]), (*shape[:axis], after, *shape[axis + 1 :]))
        offset[axis], shape[axis] = hole.offset[axis], hole.shape[axis]


def _rows(common: Box, have: _Placed, want: _Placed) -> Iterator[Rows]:
    """Yields the copies of a box's elements. Makes the fewest and longest rows that the strides of both sides allow."""
    start, destination = have.position_of(common.offset), want.position_of(common.offset)
    axes = [axis for axis in zip(common.shape, have.strides, want.strides, strict=True) if axis[0] != 1]
    row = 1
    while axes and axes[-1][1:] == (row, row):
        row *= axes.pop()[0]
    while len(axes) > 1 and axes[-2][1:] == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):
        count, source_stride, destination_stride = axes.pop()
        axes[-1] = (axes[-1][0] * count, source_stride, destination_stride)
    if not axes:
        yield Rows(start, destination, row)
        return
    rows, source_stride, destination_stride = axes.pop()
    for index in product(*(range(count) for count, _, _ in axes)):
        yield Rows(
            start + sum(at * stride for at, (_, stride, _) in zip(index, axes, strict=True)),
            destination + sum(at * stride for at, (_, _, stride) in zip(index, axes, strict=True)),
            row,
            rows,
            source_stride,
            destination_stride,
        )


def _joined(found: list[tuple[int, Rows]]) -> Iterator[tuple[int, Rows]]:
    """Joins single rows that are contiguous on both sides. Such rows exist because a flat range is cut into boxes."""
    last: tuple[int, Rows] | None = None
    for number, rows in sorted(found, key=lambda item: item[1].destination):
        if last is not None and last[0] == number and last[1].rows == rows.rows == 1:
            before = last[1]
            if (before.start + before.row, before.destination + before.row) == rows[:2]:
                last = (number, Rows(before.start, before.destination, before.row + rows.row))
                continue
        if last is not None:
            yield last
        last = (number, rows)
    if last is not None:
        yield last


def rows_from(rows: Rows, first: int, last: int) -> Iterator[Rows]:
    """Yields the parts of rows that lie in elements `[first, last)` of the stored region.

    All rows that lie entirely in these elements are yielded together. Each row that is cut is yielded separately.
    """
    stride = rows.source_stride or rows.row
    # Rows `[low, high)` lie entirely in elements `[first, last)`.
    low = min(max(0, -(-(first - rows.start) // stride)), rows.rows)
    high = min(max(low, (last - rows.start - rows.row) // stride + 1), rows.rows)
    if high > low:
        yield rows._replace(
            start=rows.start + low * rows.source_stride,
            destination=rows.destination + low * rows.destination_stride,
            rows=high - low,
        )
    for number in {low - 1, high}:
        if 0 <= number < rows.rows:
            start = rows.start + number * rows.source_stride
            begin, end = max(start, first), min(start + rows.row, last)
            if begin < end:
                there = rows.destination + number * rows.destination_stride + begin - start
                yield Rows(begin, there, end - begin)


def rows_into(rows: Rows, first: int, last: int) -> Iterator[Rows]:
    """Yields the parts of rows that are copied to elements `[first, last)` of the wanted region.

    The destinations of these parts are relative to `first`.

    Example:
        >>> list(rows_into(Rows(10, 0, 8), 2, 5))
        [Rows(start=12, destination=0, row=3, rows=1, source_stride=0, destination_stride=0)]
    """
    for part in rows_from(_mirrored(rows), first, last):
        yield _mirrored(part._replace(start=part.start - first))


def _mirrored(rows: Rows) -> Rows:
    """Returns the same copies, with the stored and the wanted region exchanged."""
    return Rows(rows.destination, rows.start, rows.row, rows.rows, rows.destination_stride, rows.source_stride)
