"""Boxes, flat ranges, and where a local tensor lies in its global tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box in a tensor: `offset` and `shape` in elements per axis. A 0-dim box is one element."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None if there is none. Both must have the same number of axes."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def within(self, shape: Shape) -> bool:
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offset, self.shape, shape, strict=True)
        )


def flat_to_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Boxes of elements `[start, stop)` of a row-major tensor, in order, at most `2·ndim − 1` of them.

    Each box is contiguous in the row-major tensor: all axes but one of it are either single or whole.

    Raises:
        ValueError: the range leaves the tensor.

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
    """A box of a local tensor and where it lies in the global one."""

    local_offset: Shape
    shape: Shape
    global_offset: Shape


@dataclass(frozen=True)
class Region:
    """What part of a global tensor is meant: a local tensor made of pieces, and a flat range of it.

    Most local tensors are one piece. Fused gate/up weights under TP are two: `[gate_r; up_r]` of `[gate; up]`.
    `flat` is `[start, stop)` in elements of the row-major local tensor.
    """

    global_shape: Shape
    local_shape: Shape
    pieces: tuple[Piece, ...]
    flat: tuple[int, int]

    @staticmethod
    def whole(shape: Shape) -> Region:
        """A tensor that is not cut at all."""
        zero = (0,) * len(shape)
        return Region(shape, shape, (Piece(zero, shape, zero),), (0, prod(shape)))

    @property
    def numel(self) -> int:
        return self.flat[1] - self.flat[0]

    @property
    def is_full_local(self) -> bool:
        return self.flat == (0, prod(self.local_shape))

    def with_flat(self, start: int, stop: int) -> Region:
        return Region(self.global_shape, self.local_shape, self.pieces, (start, stop))

    def same_local(self, other: Region) -> bool:
        """Whether both are ranges of the same local tensor, so that flat positions mean the same elements."""
        return (
            self.global_shape == other.global_shape
            and self.local_shape == other.local_shape
            and self.pieces == other.pieces
        )

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """The boxes this region covers, of the local tensor and of the global one, in the order of the flat range cut
        by pieces."""
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
        """Raises ValueError unless the pieces tile the local tensor, lie in the global one, and the range fits."""
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
        """For error messages: global shape and, if it is a part, which."""
        text = f"global shape {list(self.global_shape)}"
        if self.local_shape != self.global_shape:
            text += f", local shape {list(self.local_shape)} at {[list(p.global_offset) for p in self.pieces]}"
        if not self.is_full_local:
            text += f", elements [{self.flat[0]}, {self.flat[1]})"
        return text
