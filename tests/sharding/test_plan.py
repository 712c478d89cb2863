"""Tests the plan of reads that fill a region, and runs of positions."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadPlan, ReadRange, ShardKey, StoredShard, plan_reads, runs
from mcore_ckpt.sharding.regions import Piece, Region

KEY = ShardKey("decoder.layers.3.mlp.linear_fc1.weight", "exp_avg")
LOCAL = Region((12, 4), (6, 4), (Piece((0, 0), (6, 4), (6, 0)),), (0, 24))


def stored(start: int, stop: int, file: str) -> StoredShard:
    return StoredShard(KEY, LOCAL.with_flat(start, stop), "float32", file, 640, 4 * (stop - start), (0,))


def test_reads_name_the_shards_they_are_of() -> None:
    unneeded, first, twin, second = (stored(0, 3, "a"), stored(3, 9, "b"), stored(3, 9, "c"), stored(9, 20, "d"))
    assert plan_reads(LOCAL.with_flat(5, 22), [unneeded, first, twin, second]) == ReadPlan(
        (ReadRange(first, Rows(2, 0, 4)), ReadRange(second, Rows(0, 4, 11))), missing=2, outside=0
    )


def test_rows_beyond_the_stored_tensor_are_outside_and_not_missing() -> None:
    wanted = Region((14, 4), (8, 4), (Piece((0, 0), (8, 4), (6, 0)),), (0, 32))
    whole = stored(0, 24, "a")
    assert plan_reads(wanted, [whole]) == ReadPlan((ReadRange(whole, Rows(0, 0, 24)),), missing=0, outside=8)


def test_a_key_says_its_kind_unless_it_is_the_models() -> None:
    assert str(KEY) == f"{KEY.name} (exp_avg)"
    assert str(ShardKey("a", "model")) == "a"


@given(st.lists(st.integers(0, 40)))
def test_runs_are_the_positions_in_as_few_pieces_as_can_be(positions: list[int]) -> None:
    found = runs(positions)
    assert [p for first, last in found for p in range(first, last + 1)] == sorted(set(positions))
    assert all(b[0] > a[1] + 1 for a, b in pairwise(found))
