"""Data positions under other numbers of ranks: each sample is taken once, and what cannot be divided is refused."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.errors import CheckpointMismatchError, CommitError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.sharding import sample_share
from mcore_ckpt.sharding.data_position import MARK, ShardedPosition, of_record
from mcore_ckpt.sharding.sample_share import SampleShare, divided_anew
from mcore_ckpt.sharding.stored_positions import check_replicas, digests_of, positions_in, replaced_at, states_at


def loaded(positions: list[ShardedPosition], rank: int, size: int) -> ShardedPosition:
    """What a rank has after a load of what these ranks have saved."""
    own = positions[rank % len(positions)].record
    if len(positions) != size:
        own["ranks"] = [position.record["state"] for position in positions]
    return of_record(own, "extra_state['data']", rank, size)


# How many samples each rank takes before the next division, by rank.
lives = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=7)


@settings(max_examples=300, deadline=None)
@given(lives)
def test_every_sample_is_taken_once(lives: list[list[int]]) -> None:
    """Over any sequence of sizes, some of which are equal, with ranks that are behind."""
    taken: list[int] = []
    positions: list[ShardedPosition] = []
    for counts in lives:
        size = len(counts)
        shares = [
            loaded(positions, rank, size).for_rank() if positions else SampleShare(rank, size) for rank in range(size)
        ]
        for share, count in zip(shares, counts, strict=True):
            taken += islice(share.samples(), count)
        positions = [ShardedPosition.of_share(share.after(count)) for share, count in zip(shares, counts, strict=True)]
    assert len(set(taken)) == len(taken)
    # All that were not taken come next, each once, in order for one rank.
    rest = divided_anew([position.for_rank(rank, len(positions)) for rank, position in bound(positions)], 0, 1)
    missing = [sample for sample in range(max(taken, default=-1) + 1) if sample not in set(taken)]
    assert list(islice(rest.samples(), len(missing) + 3))[: len(missing)] == missing
    assert next(islice(rest.samples(), len(missing), None)) == max(taken, default=-1) + 1


def bound(positions: list[ShardedPosition]) -> list[tuple[int, ShardedPosition]]:
    return [(rank, loaded(positions, rank, len(positions))) for rank in range(len(positions))]


def test_ranks_in_step_need_no_list() -> None:
    shares = [SampleShare(rank, 4).after(1000) for rank in range(4)]
    new = divided_anew(shares, 1, 3)
    assert (new.start, new.left, new.taken) == (4000, (), 0)
    assert list(islice(new.samples(), 2)) == [4001, 4004]


def test_what_a_share_cannot_be() -> None:
    with pytest.raises(InvalidArgumentError, match="below its size"):
        SampleShare(3, 3)
    shares = [SampleShare(0, 2), SampleShare(1, 2)]
    with pytest.raises(InvalidArgumentError, match="not of one division"):
        divided_anew([shares[0], SampleShare(1, 2, start=4)], 0, 1)
    with pytest.raises(InvalidArgumentError, match="not in the order"):
        divided_anew(shares[::-1], 0, 1)
    with pytest.raises(InvalidArgumentError, match="1 shares of 2"):
        divided_anew(shares[:1], 0, 1)


def test_ranks_that_are_too_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_share, "_MOST_LEFT", 10)
    positions = [ShardedPosition.of_share(SampleShare(rank, 2).after(20 * rank)) for rank in range(2)]
    with pytest.raises(
        CheckpointMismatchError, match=r"extra_state\['data'\] \(share\) was saved on 2 .* taken 0 to 20"
    ):
        loaded(positions, 0, 1).for_rank()
    assert loaded(positions, 1, 2).for_rank().taken == 20


# -- Megatron's count, and streams -------------------------------------------------------------------------


def test_consumed_samples_are_one_number() -> None:
    positions = [ShardedPosition.of_consumed(4096)] * 4
    assert [loaded(positions, rank, 3).for_rank() for rank in range(3)] == [4096] * 3
    assert loaded(positions, 2, 4).for_rank() == 4096
    with pytest.raises(CheckpointMismatchError, match="consumed 4096 to 4097 samples"):
        loaded([*positions[:3], ShardedPosition.of_consumed(4097)], 0, 2).for_rank()
    for wrong in (-1, True, 1.5):
        with pytest.raises(InvalidArgumentError, match="samples is"):
            ShardedPosition.of_consumed(wrong)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text("ab01_", min_size=1, max_size=4), st.integers(0, 99), max_size=12), st.data())
def test_every_shard_is_dealt_once_with_its_offset(offsets: dict[str, int], data: st.DataObject) -> None:
    held = offsets
    owners = {shard: data.draw(st.integers(0, 2)) for shard in offsets}
    parts = [{shard: offsets[shard] for shard in offsets if owners[shard] == rank} for rank in range(3)]
    for _ in range(3):
        size = data.draw(st.integers(1, 5))
        positions = list(map(ShardedPosition.of_streams, parts))
        parts = [loaded(positions, rank, size).for_rank() for rank in range(size)]
        assert sorted(shard for part in parts for shard in part) == sorted(offsets)
        held = {shard: offset for part in parts for shard, offset in part.items()}
        assert held == offsets


def test_shards_are_dealt_in_the_order_of_their_numbers() -> None:
    positions = [
        ShardedPosition.of_streams({f"shard_{number}": number for number in range(rank, 12, 2)}) for rank in (0, 1)
    ]
    assert list(loaded(positions, 0, 3).for_rank()) == ["shard_0", "shard_3", "shard_6", "shard_9"]
    assert list(loaded(positions, 1, 3).for_rank()) == ["shard_1", "shard_4", "shard_7", "shard_10"]
    twice = [ShardedPosition.of_streams({"a": 1}), ShardedPosition.of_streams({"a": 2})]
    with pytest.raises(CheckpointMismatchError, match="ranks 0 and 1 both read the shard 'a'"):
        loaded(twice, 0, 1).for_rank()
    with pytest.raises(InvalidArgumentError, match="no strings"):
        ShardedPosition.of_streams({1: 2})  # type: ignore[dict-item]


# -- loaders with states of their own ----------------------------------------------------------------------


def torchdata_state(finished: bool = False, workers: int = 0) -> dict[str, Any]:
    """The parts of a StatefulDataLoader's state (torchdata 0.11) that decide here."""
    if not workers:
        return {"_num_yielded": 3, "_iterator_finished": finished}
    return {"_snapshot": {"_main_snapshot": {"_num_workers": workers}}, "_iterator_finished": finished}


def test_a_dataloader_keeps_its_ranks_within_an_epoch() -> None:
    positions = [ShardedPosition.of_dataloader(torchdata_state() | {"rank": rank}) for rank in range(2)]
    assert loaded(positions, 1, 2).for_rank()["rank"] == 1
    with pytest.raises(CheckpointMismatchError, match="saved on 2 data-parallel ranks, and is wanted on 3: rank 0 is"):
        loaded(positions, 2, 3).for_rank()


def test_a_dataloader_keeps_its_workers_within_an_epoch() -> None:
    positions = [ShardedPosition.of_dataloader(torchdata_state(workers=2))] * 2
    assert loaded(positions, 1, 2).for_rank(workers=2) == torchdata_state(workers=2)
    with pytest.raises(CheckpointMismatchError, match="saved with 2 workers, and is wanted for 0"):
        loaded(positions, 1, 2).for_rank(workers=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_at_the_end_of_an_epoch_the_next_one_begins(workers: int) -> None:
    done = ShardedPosition.of_dataloader(torchdata_state(True, workers))
    assert loaded([done, done], 0, 3).for_rank() is None
    assert loaded([done, done], 0, 2).for_rank(workers=7) is None
    assert loaded([done, done], 0, 2).for_rank() == torchdata_state(True, workers)
    within = ShardedPosition.of_dataloader(torchdata_state(False, workers))
    with pytest.raises(CheckpointMismatchError, match="rank 1 is within an epoch"):
        loaded([done, within], 0, 3).for_rank()


def energon(first: int, count: int, next_worker: int = 0, batch: int = 4) -> ShardedPosition:
    return ShardedPosition.of_energon([{"worker": first + n} for n in range(count)], next_worker, batch)


def test_energons_workers_are_put_together_and_divided() -> None:
    """As `energon checkpoint redist` (7.4) does it: 4 ranks of 3 workers become 6 ranks of 2, or 2 of 6."""
    positions = [energon(3 * rank, 3, next_worker=1) for rank in range(4)]
    assert loaded(positions, 2, 4).for_rank()["next_worker"] == 1
    new = [loaded(positions, rank, 6).for_rank() for rank in range(6)]
    assert [[worker["worker"] for worker in state["workers"]] for state in new] == [
        [2 * n, 2 * n + 1] for n in range(6)
    ]
    assert {(state["next_worker"], state["micro_batch_size"], state["has_workers"]) for state in new} == {(0, 4, True)}
    assert len(loaded(positions, 1, 2).for_rank()["workers"]) == 6
    with pytest.raises(CheckpointMismatchError, match="12 workers of all ranks cannot be divided evenly"):
        loaded(positions, 0, 5).for_rank()


def test_which_energon_loaders_cannot_be_divided() -> None:
    for others, words in (
        ([energon(0, 2), energon(2, 1)], "different numbers of workers"),
        ([energon(0, 2), energon(2, 2, batch=2)], "different micro batch sizes"),
        ([ShardedPosition.of_energon([{}], 0, 4, has_workers=False)] * 2, "without workers"),
    ):
        with pytest.raises(CheckpointMismatchError, match=words):
            loaded(others, 0, 1).for_rank()


# -- what is stored ----------------------------------------------------------------------------------------


def test_other_ranks_are_read_only_under_another_size() -> None:
    own = of_record(ShardedPosition.of_consumed(8).record, "extra_state['data']", 1, 2)
    assert own.for_rank() == own.for_rank(1, 2) == 8
    with pytest.raises(InvalidArgumentError, match=r"extra_state\['data'\]: only .* rank 1 of 2 was loaded"):
        own.for_rank(0, 2)
    with pytest.raises(InvalidArgumentError, match="below its size"):
        own.for_rank(2, 2)


def test_it_is_stored_as_plain_values() -> None:
    record = ShardedPosition.of_share(SampleShare(1, 2, 3)).record
    state = {"rank": 1, "size": 2, "taken": 3, "start": 0, "left": []}
    assert record == {MARK: 1, "kind": "share", "state": state}
    for newer in ({**record, MARK: 2}, {**record, "kind": "tomorrow's"}, {MARK: 1, "kind": "share"}):
        with pytest.raises(ValueError, match="does not know: upgrade it"):
            of_record(newer, "x", 0, 1)


def test_what_is_loaded_can_be_saved_again() -> None:
    positions = [ShardedPosition.of_streams({"a": 1}), ShardedPosition.of_streams({"b": 2})]
    again = of_record(loaded(positions, 0, 3).record, "x", 1, 3)
    assert again.for_rank() == {"b": 2}


def test_positions_are_found_in_nested_dicts() -> None:
    position = ShardedPosition.of_consumed(1)
    extra = {"step": 1, "data": {"train": position, "valid": position.record}}
    assert [keys for keys, _ in positions_in(extra)] == [("data", "train"), ("data", "valid")]
    assert replaced_at(extra, ("data", "train"), 5) == {"step": 1, "data": {"train": 5, "valid": position.record}}
    assert extra["data"]["train"] is position  # type: ignore[index]
    stored = {"data": position.record}
    assert states_at(("data",), [stored, stored]) == (1, 1)
    for other in (None, {}, {"data": ShardedPosition.of_streams({}).record}):
        with pytest.raises(CheckpointMismatchError, match=r"extra_state\['data'\]: saved data-parallel rank 1 has no"):
            states_at(("data",), [stored, other])


def test_a_position_must_be_in_a_dict() -> None:
    from mcore_ckpt.state.typed_values import to_stored

    position = ShardedPosition.of_consumed(1)
    assert to_stored({"data": {"train": position}}, "extra_state") == {"data": {"train": position.record}}
    with pytest.raises(UnsupportedError, match=r"extra_state\['data'\]\[0\] is a data position in a list"):
        to_stored({"data": [position]}, "extra_state")


def test_replicas_have_equal_positions() -> None:
    one, other = ({"data": ShardedPosition.of_consumed(count)} for count in (1, 2))
    digests = [digests_of(extra) for extra in (one, one, other, None, {"step": 1})]
    check_replicas(digests, [0, 0, 1, 0, 1])
    with pytest.raises(CommitError, match=r"extra_state\['data'\]: ranks 0 and 2 are the same data-parallel rank, 0"):
        check_replicas(digests, [0, 0, 0, 0, 0])


def test_loaders_of_replicas_may_have_other_seeds() -> None:
    states = [torchdata_state() | {"_base_seed": seed} for seed in (1, 2)]
    check_replicas([digests_of({"data": ShardedPosition.of_dataloader(state)}) for state in states], [0, 0])
    done = digests_of({"data": ShardedPosition.of_dataloader(torchdata_state(True))})
    with pytest.raises(CommitError, match="the same data-parallel rank"):
        check_replicas([digests_of({"data": ShardedPosition.of_dataloader(states[0])}), done], [0, 0])
