"""Describes which part of a global tensor a local tensor, or a flat range of that tensor, holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor. `offset` and `shape` are in elements. A box without axes is one element."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Returns the box in which both boxes overlap; None if they do not overlap.

        Both boxes must have the same number of axes.
        """
        starts = tuple(map(max, self.offset, other.offset))
        stops = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def within(self, shape: Shape) -> bool:
        """Returns True if the box lies within a tensor of this shape."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offset, self.shape, shape, strict=True)
        )


def flat_to_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Splits elements `[start, stop)` of a row-major tensor into at most `2·ndim − 1` boxes, in order.

    Each box is contiguous in the tensor. Along every axis except one, a box has either one element or all elements.
    Raises ValueError if the range is not within the tensor.

    Example:
        >>> [(b.offset, b.shape) for b in flat_to_boxes((3, 4), 2, 9)]
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) is not within a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    return list(_cut_axis(shape, start, stop))


def _cut_axis(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        yield from _in_row(first, shape[1:], start - first * row, stop - first * row)
        return
    if start % row:
        yield from _in_row(first, shape[1:], start - first * row, row)
        first += 1
    whole = stop // row
    if whole > first:
        rest = (0,) * (len(shape) - 1)
        yield Box((first, *rest), (whole - first, *shape[1:]))
    if stop % row:
        yield from _in_row(whole, shape[1:], 0, stop - whole * row)


def _in_row(index: int, shape: Shape, start: int, stop: int) -> Iterator[Box]:
    for box in _cut_axis(shape, start, stop):
        yield Box((index, *box.offset), (1, *box.shape))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a local tensor and its place in the global tensor."""

    local_offset: Shape
    shape: Shape
    global_offset: Shape


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a global tensor: a flat range of a local tensor that consists of pieces of the global tensor.

    Most local tensors consist of one piece. Fused gate/up weights under TP consist of two pieces: rank r holds
    `[gate_r; up_r]` of `[gate; up]`. `flat` is the range `[start, stop)` in elements of the row-major local tensor.
    """

    global_shape: Shape
    local_shape: Shape
    pieces: tuple[Piece, ...]
    flat: tuple[int, int]

    @staticmethod
    def whole(shape: Shape) -> Region:
        """Returns the region that covers a whole global tensor."""
        zero = (0,) * len(shape)
        return Region(shape, shape, (Piece(zero, shape, zero),), (0, prod(shape)))

    @property
    def numel(self) -> int:
        return self.flat[1] - self.flat[0]

    @property
    def is_full_local(self) -> bool:
        """True if the range covers the whole local tensor."""
        return self.flat == (0, prod(self.local_shape))

    def with_flat(self, start: int, stop: int) -> Region:
        """Returns the region for another flat range of the same local tensor."""
        return Region(self.global_shape, self.local_shape, self.pieces, (start, stop))

    def same_local(self, other: Region) -> bool:
        """Returns True if both regions are of the same local tensor.

        Then equal flat positions mean the same elements.
        """
        mine, theirs = ((each.global_shape, each.local_shape, each.pieces) for each in (self, other))
        return mine == theirs

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yields the boxes of this region as pairs: a box in the local tensor and its place in the global tensor.

        The pairs follow the order of the flat range. A box that covers several pieces is cut at their borders.
        """
        for cut in flat_to_boxes(self.local_shape, *self.flat):
            for piece in self.pieces:
                common = cut.intersect(Box(piece.local_offset, piece.shape))
                if common is not None:
                    moved = (
                        at - low + start
                        for at, low, start in zip(common.offset, piece.local_offset, piece.global_offset, strict=True)
                    )
                    yield common, Box(tuple(moved), common.shape)

    def check(self) -> None:
        """Raises ValueError if the region is not consistent.

        The pieces must tile the local tensor and lie within the global tensor. `flat` must lie within the local tensor.
        """
        numel = prod(self.local_shape)
        if not 0 <= self.flat[0] <= self.flat[1] <= numel:
            raise ValueError(f"flat range {self.flat} is not within a local tensor of shape {self.local_shape}")
        local_boxes = [Box(p.local_offset, p.shape) for p in self.pieces]
        for box, piece in zip(local_boxes, self.pieces, strict=True):
            if not box.within(self.local_shape) or not Box(piece.global_offset, piece.shape).within(self.global_shape):
                raise ValueError(
                    f"piece {piece} is not within local shape {self.local_shape} and global shape {self.global_shape}"
                )
        overlap = any(
            a.intersect(b) for i, a in enumerate(local_boxes) for b in local_boxes[i + 1 :] if a.numel and b.numel
        )
        if overlap or sum(box.numel for box in local_boxes) != numel:
            raise ValueError(f"pieces {self.pieces} do not tile a local tensor of shape {self.local_shape}")

    def describe(self) -> str:
        """Describes the region for error messages: the global shape and, unless the region is whole, its place."""
        text = f"global shape {list(self.global_shape)}"
        if self.local_shape != self.global_shape:
            text += f", local shape {list(self.local_shape)} at {[list(p.global_offset) for p in self.pieces]}"
        if not self.is_full_local:
            text += f", elements [{self.flat[0]}, {self.flat[1]})"
        return text
