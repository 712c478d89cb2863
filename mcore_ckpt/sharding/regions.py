"""Describes which part of a global tensor a local tensor, or a flat range of it, holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box in a tensor: `offset` and `shape` are in elements per axis. A box without axes is one element."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Returns the common box, or None if there is none. Both boxes must have the same number of axes."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def within(self, shape: Shape) -> bool:
        """Returns True if the box lies in a tensor of this shape."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offset, self.shape, shape, strict=True)
        )


def flat_to_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Splits elements `[start, stop)` of a row-major tensor into at most `2·ndim − 1` boxes, in order.

    Each box is contiguous in the tensor: along all axes but one, it has either one element or all.

    Raises:
        ValueError: the range is not inside the tensor.

    Example:
        >>> [(b.offset, b.shape) for b in flat_to_boxes((3, 4), 2, 9)]
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) leaves a tensor of shape {shape}")
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


@dataclass(frozen=True)
class Piece:
    """A box of a local tensor and its place in the global tensor."""

    local_offset: Shape
    shape: Shape
    global_offset: Shape


@dataclass(frozen=True)
class Region:
    """A part of a global tensor: a flat range of a local tensor that is made of pieces.

    Most local tensors are one piece. Fused gate/up weights under TP are two: `[gate_r; up_r]` of `[gate; up]`.
    `flat` is the range `[start, stop)` in elements of the row-major local tensor.
    """

    global_shape: Shape
    local_shape: Shape
    pieces: tuple[Piece, ...]
    flat: tuple[int, int]

    @staticmethod
    def whole(shape: Shape) -> Region:
        """Returns the region of a whole tensor that is not cut."""
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
        """Returns another flat range of the same local tensor."""
        return Region(self.global_shape, self.local_shape, self.pieces, (start, stop))

    def same_local(self, other: Region) -> bool:
        """Returns True if both are ranges of the same local tensor. Flat positions then mean the same elements."""
        return (
            self.global_shape == other.global_shape
            and self.local_shape == other.local_shape
            and self.pieces == other.pieces
        )

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yields the boxes that this region covers, each as a pair: in the local tensor and in the global tensor.

        They come in the order of the flat range. A box that several pieces share is cut at the pieces.
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
        """Raises ValueError unless the pieces tile the local tensor and lie in the global one, and the range fits."""
        numel = prod(self.local_shape)
        if not 0 <= self.flat[0] <= self.flat[1] <= numel:
            raise ValueError(f"flat range {self.flat} leaves a local tensor of shape {self.local_shape}")
        local_boxes = [Box(p.local_offset, p.shape) for p in self.pieces]
        for box, piece in zip(local_boxes, self.pieces, strict=True):
            if not box.within(self.local_shape) or not Box(piece.global_offset, piece.shape).within(self.global_shape):
                raise ValueError(f"piece {piece} leaves local shape {self.local_shape} or global {self.global_shape}")
        overlap = any(
            a.intersect(b) for i, a in enumerate(local_boxes) for b in local_boxes[i + 1 :] if a.numel and b.numel
        )
        if overlap or sum(box.numel for box in local_boxes) != numel:
            raise ValueError(f"pieces {self.pieces} do not tile a local tensor of shape {self.local_shape}")

    def describe(self) -> str:
        """Describes the region for an error message: the global shape and, if it is a part, which part."""
        text = f"global shape {list(self.global_shape)}"
        if self.local_shape != self.global_shape:
            text += f", local shape {list(self.local_shape)} at {[list(p.global_offset) for p in self.pieces]}"
        if not self.is_full_local:
            text += f", elements [{self.flat[0]}, {self.flat[1]})"
        return text
