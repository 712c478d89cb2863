"""Compares overlaps between any two layouts with brute force: numpy numbers every element of the global tensor."""

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.sharding.overlap import Overlap, Rows, overlap
from mcore_ckpt.sharding.regions import Piece, Region, Shape

shapes = st.lists(st.sampled_from([1, 1, 2, 3, 4, 6, 8]), min_size=1, max_size=4).map(tuple)


def positions(region: Region) -> list[int]:
    """The position in the global tensor of each element of a region, in the region's order."""
    numbers = np.arange(prod(region.global_shape)).reshape(region.global_shape)
    local = np.full(region.local_shape, -1)
    for piece in region.pieces:
        to = tuple(slice(o, o + n) for o, n in zip(piece.local_offset, piece.shape, strict=True))
        local[to] = numbers[tuple(slice(o, o + n) for o, n in zip(piece.global_offset, piece.shape, strict=True))]
    return local.reshape(-1)[slice(*region.flat)].tolist()


def places(rows: Rows) -> list[tuple[int, int]]:
    """The (source, destination) pair of every element."""
    return [
        (rows.start + k * rows.source_stride + i, rows.destination + k * rows.destination_stride + i)
        for k in range(rows.rows)
        for i in range(rows.row)
    ]


def one_piece(whole: Shape, offset: Shape, shape: Shape) -> Region:
    return Region(whole, shape, (Piece((0,) * len(shape), shape, offset),), (0, prod(shape)))


def axis_cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    ends = [0, *sorted(draw(st.lists(st.integers(0, length), max_size=2))), length]
    return [(a, b) for a, b in pairwise(ends) if a < b]


@st.composite
def grids(draw: st.DrawFn, whole: Shape) -> list[Region]:
    """The regions of a tensor whose axes are cut at arbitrary places."""
    boxes = product(*(axis_cuts(draw, length) for length in whole))
    return [one_piece(whole, tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes]


@st.composite
def equal_parts(draw: st.DrawFn, whole: Shape) -> list[Region]:
    """The regions of a tensor that is cut along one axis into equal parts, as tensor parallelism does."""
    axis = draw(st.integers(0, len(whole) - 1))
    size = draw(st.sampled_from([n for n in range(1, whole[axis] + 1) if whole[axis] % n == 0]))
    length = whole[axis] // size
    shape = (*whole[:axis], length, *whole[axis + 1 :])
    return [
        one_piece(whole, tuple(r * length if a == axis else 0 for a in range(len(whole))), shape) for r in range(size)
    ]


@st.composite
def fused_parts(draw: st.DrawFn, whole: Shape) -> list[Region]:
    """Gate and up, each cut into equal parts along axis 0: rank r has [gate_r; up_r]. Axis 0 has an even length."""
    half = whole[0] // 2
    size = draw(st.sampled_from([n for n in range(1, half + 1) if half % n == 0]))
    length, rest = half // size, whole[1:]
    zero, shape = (0,) * len(rest), (half // size, *rest)
    return [
        Region(
            whole,
            (2 * length, *rest),
            (Piece((0, *zero), shape, (r * length, *zero)), Piece((length, *zero), shape, (half + r * length, *zero))),
            (0, 2 * length * prod(rest)),
        )
        for r in range(size)
    ]


@st.composite
def layouts(draw: st.DrawFn, whole: Shape) -> list[Region]:
    """All regions of a tensor under an arbitrary layout, in any order, some of them twice."""
    kinds = [grids(whole), equal_parts(whole), *([fused_parts(whole)] if whole[0] % 2 == 0 else [])]
    regions = []
    for local in draw(st.one_of(kinds)):
        ends = [0, *sorted(draw(st.lists(st.integers(0, local.numel), max_size=3))), local.numel]
        regions += [local.with_flat(a, b) for a, b in pairwise(ends)]
    regions += draw(st.lists(st.sampled_from(regions), max_size=2))
    return draw(st.permutations(regions))


def check(wanted: Region, stored: list[Region], found: Overlap) -> None:
    """Checks that each wanted element that is stored comes once, from the first region that has it."""
    in_stored = [positions(region) for region in stored]
    # A longer or shorter axis 0 does not change the number of an element.
    target = positions(wanted)
    first = {at: number for number in reversed(range(len(stored))) for at in in_stored[number]}
    placed: dict[int, int] = {}
    for number, rows in found.rows:
        assert rows.row > 0
        assert rows.rows > 0
        if rows.rows == 1:
            assert (rows.source_stride, rows.destination_stride) == (0, 0)
        else:
            assert min(rows.source_stride, rows.destination_stride) >= rows.row
        assert rows.numel == len(places(rows))
        for source, destination in places(rows):
            assert 0 <= source < len(in_stored[number]), "a row leaves the stored range"
            assert 0 <= destination < len(target), "a row leaves the wanted range"
            assert in_stored[number][source] == target[destination], "another element of the global tensor"
            assert number == first[target[destination]], "an earlier region has it"
            assert destination not in placed, "written twice"
            placed[destination] = number
    assert sorted(placed) == [i for i, at in enumerate(target) if at in first]
    starts = [rows.destination for _, rows in found.rows]
    assert starts == sorted(starts)
    extent = prod(stored[0].global_shape) if stored else prod(wanted.global_shape)
    assert found.outside == sum(at >= extent for at in target)
    assert found.missing == len(target) - len(placed) - found.outside


@settings(deadline=None, max_examples=300)
@given(st.data(), shapes)
def test_any_layout_from_any_other(data: st.DataObject, whole: Shape) -> None:
    stored = data.draw(layouts(whole))
    for wanted in data.draw(layouts(whole)):
        found = overlap(wanted, stored)
        check(wanted, stored, found)
        assert (found.missing, found.outside) == (0, 0)


@settings(deadline=None, max_examples=200)
@given(st.data(), shapes)
def test_what_is_not_stored_is_counted(data: st.DataObject, whole: Shape) -> None:
    stored = [region for region in data.draw(layouts(whole)) if data.draw(st.booleans())]
    for wanted in data.draw(layouts(whole)):
        check(wanted, stored, overlap(wanted, stored))


@settings(deadline=None, max_examples=200)
@given(st.data(), shapes, st.integers(1, 9))
def test_another_length_of_axis_0_is_padding(data: st.DataObject, whole: Shape, rows: int) -> None:
    stored = data.draw(layouts((rows, *whole[1:])))
    for wanted in data.draw(layouts(whole)):
        found = overlap(wanted, stored)
        check(wanted, stored, found)
        assert found.missing == 0


def test_without_stored_regions_all_is_missing() -> None:
    assert overlap(Region.whole((3, 4)), []) == Overlap((), 12, 0)


def test_tensors_of_no_axes_and_of_no_elements() -> None:
    scalar, empty = Region.whole(()), Region.whole((0, 3))
    assert overlap(scalar, [scalar]) == Overlap(((0, Rows(0, 0, 1)),), 0, 0)
    assert overlap(scalar, []) == Overlap((), 1, 0)
    assert overlap(scalar, [scalar.with_flat(0, 0)]) == Overlap((), 1, 0)
    assert overlap(scalar.with_flat(1, 1), [scalar]) == Overlap((), 0, 0)
    assert overlap(empty, [empty]) == overlap(empty, []) == Overlap((), 0, 0)


@settings(deadline=None)
@given(st.data(), shapes)
def test_a_range_of_the_same_local_tensor_is_one_row(data: st.DataObject, whole: Shape) -> None:
    local = data.draw(layouts(whole))[0]
    numel = prod(local.local_shape)
    ends = data.draw(st.lists(st.integers(0, numel), min_size=4, max_size=4))
    start, stop = sorted(ends[:2])
    low, high = sorted(ends[2:])
    found = overlap(local.with_flat(start, stop), [local.with_flat(low, high)])
    begin, end = max(start, low), min(stop, high)
    expected = ((0, Rows(begin - low, begin - start, end - begin)),) if begin < end else ()
    assert found.rows == expected
    assert found.missing == stop - start - max(end - begin, 0)


def test_two_halves_of_a_flat_cut_are_two_rows_and_a_column_cut_is_one_strided_read() -> None:
    whole = Region.whole((64, 96))
    halves = [whole.with_flat(0, 1000), whole.with_flat(1000, 6144)]
    assert overlap(whole, halves).rows == ((0, Rows(0, 0, 1000)), (1, Rows(0, 1000, 5144)))
    columns = one_piece((64, 96), (0, 48), (64, 48))
    assert overlap(columns, [whole]).rows == ((0, Rows(48, 0, 48, 64, 96, 48)),)
    assert overlap(whole, [columns]).rows == ((0, Rows(0, 48, 48, 64, 48, 96)),)


@pytest.mark.parametrize(("tp", "rank"), [(2, 0), (2, 1), (4, 3)])
def test_fused_gate_and_up_of_two_ranks_are_two_rows_of_each(tp: int, rank: int) -> None:
    def part(size: int, rank: int) -> Region:
        length = 16 // size
        pieces = tuple(Piece((k * length, 0), (length, 8), (16 * k + rank * length, 0)) for k in range(2))
        return Region((32, 8), (2 * length, 8), pieces, (0, 16 * length))

    found = overlap(part(tp, rank), [part(1, 0)])
    length = 16 // tp * 8
    assert found.rows == tuple((0, Rows(128 * k + rank * length, k * length, length)) for k in range(2))
    gathered = overlap(part(1, 0), [part(tp, r) for r in range(tp)])
    assert len(gathered.rows) == 2 * tp
    assert gathered.missing == 0
