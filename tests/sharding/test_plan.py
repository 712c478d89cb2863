"""The load plan: every wanted element from exactly one place, nothing else read."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.sharding.plan import ShardKey, StoredShard, WantedShard, plan_reads, runs
from mcore_ckpt.sharding.regions import Piece, Region

KEY = ShardKey("decoder.layers.3.mlp.linear_fc1.weight", "exp_avg")
LOCAL = Region((12, 4), (6, 4), (Piece((0, 0), (6, 4), (6, 0)),), (0, 24))


def stored(start: int, stop: int, file: str = "optim/a.pt", region: Region = LOCAL) -> StoredShard:
    return StoredShard(KEY, region.with_flat(start, stop), "float32", file, 640, 4 * (stop - start), (0,))


def wanted(start: int, stop: int, key: ShardKey = KEY) -> WantedShard:
    return WantedShard(key, LOCAL.with_flat(start, stop), "float32", "optim/mine.pt")


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """The local tensor cut among files, empty parts and double ones included, in any order."""
    ends = [0, *sorted(draw(st.lists(st.integers(0, 24), max_size=6))), 24]
    parts = list(pairwise(ends))
    parts += draw(st.lists(st.sampled_from(parts), max_size=2))
    return draw(st.permutations(parts))


ranges = st.lists(st.integers(0, 24), min_size=2, max_size=2).map(sorted)


@given(cuts(), ranges)
def test_each_element_comes_once_and_nothing_else_is_read(parts: list[tuple[int, int]], ends: list[int]) -> None:
    start, stop = ends
    shards = [stored(*part, file=f"optim/{i}.pt") for i, part in enumerate(parts)]
    placed = []
    for read in plan_reads(wanted(start, stop), {KEY: shards}, {}):
        low, high = read.stored.region.flat
        assert 0 <= read.start < read.stop <= high - low, "an empty read, or one beyond the stored range"
        for i in range(read.stop - read.start):
            placed.append((read.destination + i, low + read.start + i))
    assert placed == [(i, start + i) for i in range(stop - start)]


@given(cuts(), ranges, st.data())
def test_a_missing_element_is_corruption_and_said_which(
    parts: list[tuple[int, int]], ends: list[int], data: st.DataObject
) -> None:
    start, stop = ends
    gap = data.draw(st.integers(start, max(stop - 1, start)))
    shards = [stored(*part) for part in parts if not part[0] <= gap < part[1]]
    if not shards or start == stop:
        return
    with pytest.raises(CheckpointCorruptError) as raised:
        plan_reads(wanted(start, stop), {KEY: shards}, {})
    first = next(i for i in range(start, stop) if not any(a <= i < b for a, b in (s.region.flat for s in shards)))
    assert f"elements [{first}, {stop})" in str(raised.value)
    assert f"optim/a.pt: tensor {KEY}" in str(raised.value)


@pytest.mark.parametrize(
    ("shard", "patterns"),
    [
        pytest.param(
            stored(0, 24, region=Region((12, 5), (6, 4), LOCAL.pieces, (0, 24))),
            (r"wanted global shape \[12, 4\]", r"found global shape \[12, 5\]"),
            id="shape",
        ),
        pytest.param(replace(stored(0, 24), dtype="bfloat16"), ("wanted dtype float32", "found bfloat16"), id="dtype"),
        pytest.param(
            stored(0, 24, region=replace(LOCAL, pieces=(Piece((0, 0), (6, 4), (0, 0)),))),
            (r"wanted .*at \[\[6, 0\]\]", r"found .*at \[\[0, 0\]\]", "another parallel layout"),
            id="cut",
        ),
    ],
)
def test_another_tensor_is_a_mismatch(shard: StoredShard, patterns: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointMismatchError) as raised:
        plan_reads(wanted(0, 24), {KEY: [shard]}, {})
    for pattern in (re.escape(f"optim/a.pt: tensor {KEY}"), *patterns):
        assert re.search(pattern, str(raised.value))


def test_an_absent_tensor_is_a_mismatch_that_says_where_it_was_looked_for() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"optim/mine\.pt: tensor .* \(exp_avg\): .*found no such tensor"):
        plan_reads(wanted(0, 24), {ShardKey("other", "exp_avg"): [stored(0, 24)]}, {})


def test_the_ranges_of_another_tensor_parallel_rank_are_passed_over() -> None:
    other = stored(0, 24, file="optim/tp0.pt", region=replace(LOCAL, pieces=(Piece((0, 0), (6, 4), (0, 0)),)))
    reads = plan_reads(wanted(3, 9), {KEY: [other, stored(0, 24, file="optim/tp1.pt")]}, {})
    assert [(read.stored.file, read.start, read.stop, read.destination) for read in reads] == [
        ("optim/tp1.pt", 3, 9, 0)
    ]


def test_an_alias_is_read_where_its_bytes_are() -> None:
    alias = ShardKey(KEY.name, "param")
    (read,) = plan_reads(wanted(8, 16, key=alias), {KEY: [stored(0, 24)]}, {alias: KEY})
    assert (read.start, read.stop, read.destination) == (8, 16, 0)
    with pytest.raises(CheckpointMismatchError):
        plan_reads(wanted(8, 16, key=alias), {KEY: [stored(0, 24)]}, {})


@given(st.lists(st.integers(0, 40)))
def test_runs_are_the_positions_in_as_few_pieces_as_can_be(positions: list[int]) -> None:
    found = runs(positions)
    assert [p for first, last in found for p in range(first, last + 1)] == sorted(set(positions))
    assert all(b[0] > a[1] + 1 for a, b in pairwise(found))
