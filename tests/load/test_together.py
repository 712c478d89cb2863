"""The phases of a load on several ranks: nothing is filled before all have planned, and all raise the same."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.errors import AgreementError, CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.load import together
from mcore_ckpt.load.fill import TensorFill
from mcore_ckpt.load.together import fill_together, names_left_over, plan_together, positions_taken
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.ranks.topology import Replicas
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from tests.support.rank_threads import on_threads
from tests.support.stored_tensors import MODEL_FILE, checkpoint, locator_of, shard

RANKS = 3


def on_ranks(part: Callable[[Agreement], Any], world: int = RANKS) -> Mapping[int, Any]:
    """What each rank's part returned or raised."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    agreements = [Agreement(store, rank, world, "test", 20.0) for rank in range(world)]
    return on_threads({each.rank: lambda each=each: part(each) for each in agreements})  # type: ignore[misc]


def test_each_rank_gets_its_own_plan_and_the_outcome_of_all() -> None:
    def part(agreement: Agreement) -> Any:
        def check(own: str, reports: Any) -> Record:
            assert own == "plan of 0"
            return {"all": [report["rank"] for report in reports]}

        return plan_together(
            agreement, "checking", lambda: (f"plan of {agreement.rank}", {"rank": agreement.rank}), check
        )

    assert on_ranks(part) == {rank: (f"plan of {rank}", {"all": [0, 1, 2]}) for rank in range(RANKS)}


@pytest.mark.parametrize("failing", range(RANKS))
@pytest.mark.parametrize("error", [CheckpointMismatchError, CheckpointCorruptError])
def test_a_plan_that_fails_on_one_rank_fails_on_all_before_anything_changes(
    failing: int, error: type[CheckpointError]
) -> None:
    """Rank 0 does not check plans that are not all there."""
    checked: list[int] = []

    def part(agreement: Agreement) -> Any:
        def plan() -> tuple[int, Record]:
            if agreement.rank == failing:
                raise error("file: tensor a: does not fit")
            return agreement.rank, {}

        def check(own: int, reports: Any) -> Record:
            checked.append(own)
            return {}

        return plan_together(agreement, "checking", plan, check)

    found = on_ranks(part)
    assert [type(each) for each in found.values()] == [error] * RANKS
    assert all("file: tensor a: does not fit" in str(each) for each in found.values())
    assert not checked


def test_a_check_that_fails_on_rank_0_fails_on_all() -> None:
    def part(agreement: Agreement) -> Any:
        def check(own: int, reports: Any) -> Record:
            raise CheckpointMismatchError("nobody takes tensor a")

        return plan_together(agreement, "checking", lambda: (agreement.rank, {}), check)

    found = on_ranks(part)
    assert {(type(each), str(each).count("nobody takes tensor a")) for each in found.values()} == {
        (CheckpointMismatchError, 1)
    }


def fills() -> list[TensorFill]:
    tensors = [torch.zeros(2), torch.zeros(2)]
    return [TensorFill((), torch.float32, lambda tensor=tensor: tensor) for tensor in tensors]  # type: ignore[misc]


def test_all_tensors_are_filled_before_the_small_state_is_applied() -> None:
    done: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
    grads: list[bool] = []

    def part(agreement: Agreement) -> int:
        def fill(wanted: Any) -> int:
            done[agreement.rank].append(f"fill {len(wanted)}")
            grads.append(torch.is_grad_enabled())
            return 10 + agreement.rank

        return fill_together(
            agreement, Replicas(), "loading", fills(), fill, lambda: done[agreement.rank].append("apply")
        )

    assert on_ranks(part) == {0: 10, 1: 11, 2: 12}
    assert list(done.values()) == [["fill 2", "apply"]] * RANKS
    assert grads == [False] * RANKS


@pytest.mark.parametrize("failing", range(RANKS))
@pytest.mark.parametrize(
    ("raised", "wanted"), [(CheckpointCorruptError, CheckpointCorruptError), (ValueError, AgreementError)]
)
def test_a_fill_that_fails_on_one_rank_fails_on_all(
    failing: int, raised: type[Exception], wanted: type[CheckpointError]
) -> None:
    """The ranks that are done have applied theirs: the state is undefined afterwards, as the caller says."""
    applied: list[int] = []

    def part(agreement: Agreement) -> int:
        def fill(wanted: Any) -> int:
            if agreement.rank == failing:
                raise raised("a block has a wrong CRC")
            return 1

        return fill_together(agreement, Replicas(), "loading it", fills(), fill, lambda: applied.append(agreement.rank))

    found = on_ranks(part)
    assert [type(each) for each in found.values()] == [wanted] * RANKS
    assert all("a block has a wrong CRC" in str(each) for each in found.values())
    assert sorted(applied) == [rank for rank in range(RANKS) if rank != failing]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_read_is_sent_once_all_ranks_have_read(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that are replicated on ranks 0 and 1, each reads a share. After a failure nothing is sent."""
    monkeypatch.setattr(tuning, "BROADCAST_BYTES", 8)
    sent: list[list[int]] = []
    monkeypatch.setattr(together, "broadcast", lambda shared, _: sent.append([batch.reader for batch in shared]))
    read: dict[int, int] = {}

    def part(agreement: Agreement) -> int:
        def fill(wanted: Any) -> int:
            assert not sent
            read[agreement.rank] = len(wanted)
            if fails and agreement.rank == 1:
                raise CheckpointCorruptError("torn")
            return 1

        replicated = [replace(each, replicas=(0, 1)) for each in fills()]
        return fill_together(agreement, Replicas((0, 1)), "loading", [*replicated, *fills()[:1]], fill)

    found = on_ranks(part, 2)
    assert read == {0: 2, 1: 2}, "one of the replicated ones, and its own"
    assert sent == ([] if fails else [[0, 1], [0, 1]])
    assert [isinstance(each, CheckpointError) for each in found.values()] == [fails] * 2


def test_buffers_are_freed_even_if_a_fill_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(_native, "free_idle_buffers", lambda: freed.append(1))

    def fail(wanted: Any) -> int:
        raise CheckpointCorruptError("torn")

    def part(agreement: Agreement) -> int:
        return fill_together(agreement, Replicas(), "loading", fills(), fail)

    assert isinstance(on_ranks(part, 1)[0], CheckpointCorruptError)
    assert freed == [1]


# -- what nobody takes


NAMES = [f"decoder.layers.{number}.mlp.linear_fc2.weight" for number in range(6)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "actor"
    return checkpoint(folder, {MODEL_FILE: [shard(name, torch.zeros(1)) for name in NAMES]})


@given(st.lists(st.sets(st.integers(0, len(NAMES) + 1)), max_size=4))
def test_the_tensors_that_no_rank_takes_are_left_over(stored: Path, taken: list[set[int]]) -> None:
    """Whatever the ranks take, and although a model may have tensors that the checkpoint lacks."""
    locator = locator_of(stored)
    wanted = [*NAMES, "decoder.final_layernorm.weight", "output_layer.weight"]
    runs = [positions_taken(locator, [ShardKey(wanted[number], MODEL) for number in each]) for each in taken]
    assert all(first <= last for each in runs for first, last in each)
    everything = set().union(*taken)
    assert names_left_over(locator, runs) == [name for n, name in enumerate(NAMES) if n not in everything]


def test_runs_are_short(stored: Path) -> None:
    """They go to rank 0 from each of thousands of ranks."""
    keys = [ShardKey(name, MODEL) for name in (*NAMES[:3], *NAMES[4:], NAMES[0])]
    assert positions_taken(locator_of(stored), keys) == [(0, 2), (4, 5)]
    assert positions_taken(locator_of(stored), keys[:1]) == [(0, 0)]
