"""Compares boxes and regions with brute force: numpy numbers every element, and slicing tells where it is."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.sharding.regions import Box, Piece, Region, flat_to_boxes

Range = tuple[tuple[int, ...], int, int]

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def flat_ranges(draw: st.DrawFn) -> Range:
    shape = draw(shapes)
    start, stop = sorted(draw(st.lists(st.integers(0, prod(shape)), min_size=2, max_size=2)))
    return shape, start, stop


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """A local tensor of one piece, or of two pieces along axis 0 as in fused gate/up, anywhere in the global tensor."""
    local = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple))
    margin = draw(st.tuples(*[st.integers(0, 4) for _ in local]))
    whole = tuple(n + r for n, r in zip(local, margin, strict=True))
    cuts = draw(st.sampled_from([[0, local[0]], [0, local[0] // 2, local[0]]]))
    pieces = []
    for low, high in pairwise(cuts):
        shape = (high - low, *local[1:])
        offset = tuple(draw(st.integers(0, n - s)) for n, s in zip(whole, shape, strict=True))
        pieces.append(Piece((low, *[0] * (len(local) - 1)), shape, offset))
    start, stop = sorted(draw(st.lists(st.integers(0, prod(local)), min_size=2, max_size=2)))
    return Region(whole, local, tuple(pieces), (start, stop))


def positions(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape)


def slices(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    return positions(shape)[slices(box.offset, box.shape)].reshape(-1).tolist()


@given(flat_ranges())
def test_boxes_are_the_range_in_order(flat: Range) -> None:
    shape, start, stop = flat
    boxes = flat_to_boxes(shape, start, stop)
    runs = [elements(box, shape) for box in boxes]
    assert [position for run in runs for position in run] == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(run and run == list(range(run[0], run[-1] + 1)) for run in runs), "a box is not contiguous"


@given(shapes, st.integers(-3, 700), st.integers(-3, 700))
def test_a_range_outside_the_tensor_is_refused(shape: tuple[int, ...], start: int, stop: int) -> None:
    if 0 <= start <= stop <= prod(shape):
        flat_to_boxes(shape, start, stop)
    else:
        with pytest.raises(ValueError, match="not within a tensor"):
            flat_to_boxes(shape, start, stop)


@given(st.data(), shapes)
def test_intersection(data: st.DataObject, shape: tuple[int, ...]) -> None:
    first, second = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = first.intersect(second)
    expected = sorted(set(elements(first, shape)) & set(elements(second, shape)))
    assert ([] if common is None else elements(common, shape)) == expected
    assert common == second.intersect(first)
    assert first.within(shape)
    assert not Box(tuple(n + 1 for n in shape), first.shape).within(shape) or not shape


@given(regions())
def test_global_boxes_are_where_the_pieces_put_the_elements(region: Region) -> None:
    region.check()
    in_global = np.full(region.local_shape, -1)
    for piece in region.pieces:
        moved = positions(region.global_shape)[slices(piece.global_offset, piece.shape)]
        in_global[slices(piece.local_offset, piece.shape)] = moved
    covered = [position for _, box in region.boxes() for position in elements(box, region.global_shape)]
    assert covered == in_global.reshape(-1)[slice(*region.flat)].tolist()
    assert region.numel == len(covered)
    assert region.is_full_local == (region.numel == prod(region.local_shape))


def test_global_boxes_are_cut_where_pieces_stand_side_by_side() -> None:
    # Pieces side by side are not contiguous in memory: each row of each piece is a box of its own.
    pieces = (Piece((0, 0), (2, 1), (0, 0)), Piece((0, 1), (2, 1), (0, 5)))
    region = Region((2, 6), (2, 2), pieces, (0, 4))
    region.check()
    covered = [position for _, box in region.boxes() for position in elements(box, (2, 6))]
    assert sorted(covered) == [0, 5, 6, 11]


GATE, UP = Piece((0, 0), (2, 3), (2, 0)), Piece((2, 0), (2, 3), (6, 0))


@pytest.mark.parametrize(
    ("region", "reason"),
    [
        pytest.param(Region((8, 3), (4, 3), (GATE,), (0, 12)), "do not tile", id="hole"),
        pytest.param(Region((8, 3), (4, 3), (), (0, 12)), "do not tile", id="none"),
        pytest.param(Region((8, 3), (4, 3), (GATE, UP, GATE), (0, 12)), "do not tile", id="twice"),
        pytest.param(
            Region((8, 3), (4, 3), (GATE, Piece((1, 0), (2, 3), (6, 0))), (0, 12)), "do not tile", id="overlap-and-hole"
        ),
        pytest.param(
            Region((8, 3), (4, 3), (GATE, Piece((3, 0), (2, 3), (6, 0))), (0, 12)), "not within", id="leaves-local"
        ),
        pytest.param(
            Region((8, 3), (4, 3), (GATE, Piece((2, 0), (2, 3), (7, 0))), (0, 12)), "not within", id="leaves-global"
        ),
        pytest.param(Region((8, 3), (4, 3), (GATE, Piece((2,), (2,), (6,))), (0, 12)), "not within", id="axes"),
        pytest.param(
            Region((8, 3), (4, 3), (Piece((-1, 0), (2, 3), (0, 0)), UP), (0, 12)), "not within local", id="negative"
        ),
        pytest.param(Region((8, 3), (4, 3), (GATE, UP), (0, 13)), "flat range", id="range-too-long"),
        pytest.param(Region((8, 3), (4, 3), (GATE, UP), (5, 4)), "flat range", id="range-backwards"),
    ],
)
def test_check_refuses(region: Region, reason: str) -> None:
    Region((8, 3), (4, 3), (GATE, UP), (0, 12)).check()
    with pytest.raises(ValueError, match=reason):
        region.check()


def test_check_accepts_a_tensor_of_no_elements_and_of_no_axes() -> None:
    Region.whole(()).check()
    Region.whole((0, 3)).check()


def test_a_message_says_shape_place_and_range() -> None:
    region = Region((8, 3), (4, 3), (GATE, UP), (2, 7))
    assert region.describe() == "global shape [8, 3], local shape [4, 3] at [[2, 0], [6, 0]], elements [2, 7)"
    assert Region.whole((8, 3)).describe() == "global shape [8, 3]"
