"""A save is opened by all ranks or by none: busy ranks, failures that nobody was told yet, too little space."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import BusyError, CheckpointCorruptError, NoRoomError, to_record
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.steps.space_watch import Saving, SpaceWatch
from mcore_ckpt.steps.transaction import Attempt, EarlierSaveError, open_together
from tests.support.checkpoints import remains
from tests.support.small_disks import tmpfs

WORLD = 3
LONG_S = 30.0
FAILURE = to_record(CheckpointCorruptError("x.pt: is bad"), 1)


class Ranks:
    def __init__(self, timeout_s: float = LONG_S) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.agreements = [Agreement(store, rank, WORLD, "test", timeout_s) for rank in range(WORLD)]

    def open(self, role_dir: Path, ranks: Sequence[int] = range(WORLD), **by_rank: dict[int, Any]) -> list[Any]:
        """What each of these ranks gets, or what it raises."""
        results: list[Any] = [None] * WORLD

        def part(rank: int) -> None:
            own = {name: values[rank] for name, values in by_rank.items() if rank in values}
            try:
                results[rank] = open_together(self.agreements[rank], "saving step 7", role_dir, **own)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=part, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LONG_S)
            assert not thread.is_alive()
        return results


def test_all_ranks_get_the_same_attempt_and_its_folder_is_there(role_dir: Path) -> None:
    attempts = Ranks().open(role_dir)
    assert attempts == [Attempt(attempts[0].number, attempts[0].staging, role_dir)] * WORLD
    assert attempts[0].staging.is_dir()
    assert attempts[0].staging.parent == role_dir.parent


def test_a_rank_that_has_missed_a_save_with_an_id_takes_part_in_the_next_one(role_dir: Path) -> None:
    """A copy to the root has the id of the step on the nodes, of which a rank may not know."""
    ranks = Ranks(timeout_s=0.4)
    missed = ranks.open(role_dir, [0, 2], number=dict.fromkeys(range(WORLD), "a" * 32))
    assert "no word from rank 1" in str(missed[0])
    assert not role_dir.parent.exists()
    attempts = ranks.open(role_dir, number=dict.fromkeys(range(WORLD), "b" * 32))
    assert [attempt.number for attempt in attempts] == ["b" * 32] * WORLD


@pytest.mark.parametrize("busy", [(0,), (2,), (1, 2)])
def test_a_busy_rank_refuses_for_all_and_nothing_is_done(role_dir: Path, busy: tuple[int, ...]) -> None:
    ranks = Ranks()
    results = ranks.open(role_dir, busy=dict.fromkeys(busy, True))
    for error in results:
        assert type(error) is BusyError
        assert f"still under way on rank {busy[0]}" in str(error)
    assert not role_dir.parent.exists()
    assert remains(role_dir.parent.parent) == []
    assert isinstance(ranks.open(role_dir)[2], Attempt)


@pytest.mark.parametrize("failed", [(0,), (2,), (1, 2)])
def test_a_failure_of_one_rank_is_told_to_all_and_nothing_is_done(role_dir: Path, failed: tuple[int, ...]) -> None:
    ranks = Ranks()
    for result in ranks.open(role_dir, failure=dict.fromkeys(failed, FAILURE)):
        assert type(result) is EarlierSaveError
        assert type(result.error) is CheckpointCorruptError
        assert str(result.error) == "rank 1: x.pt: is bad"
    assert not role_dir.parent.exists()
    assert isinstance(ranks.open(role_dir)[2], Attempt)


def test_a_busy_rank_comes_before_a_failure_which_is_told_later(role_dir: Path) -> None:
    ranks = Ranks()
    results = ranks.open(role_dir, busy={0: True}, failure={1: FAILURE})
    assert [type(error) for error in results] == [BusyError] * WORLD
    assert type(ranks.open(role_dir, failure={1: FAILURE})[0]) is EarlierSaveError


def test_the_files_of_all_ranks_must_fit_together(tmp_path: Path) -> None:
    """Each rank has other files. Those of each rank alone would fit, those of all do not, and all ranks are told."""
    with tmpfs(tmp_path / "disk", "1m") as disk:
        watch = SpaceWatch(disk, lambda: False)
        role_dir = disk / "global_steps_7" / "actor"
        saving = Saving(role_dir, 7, None)
        needs = {rank: Need.of([(f"optim/{rank}.pt", (rank + 1) * 200_000)]) for rank in range(WORLD)}
        prepare = dict.fromkeys(range(WORLD), lambda need: watch.check(saving, need, 0.0))
        ranks = Ranks()
        for error in ranks.open(role_dir, need=needs, prepare=prepare):
            assert type(error) is NoRoomError
            # 49, 98 and 147 pages, owner file and manifest.
            assert f"{(49 + 98 + 147 + 2) * 4096:,} bytes are needed, but only 1,048,576 bytes are free" in str(error)
        assert list(disk.iterdir()) == []
        less = {**needs, 2: Need.of([("optim/2.pt", 100_000)])}
        assert isinstance(ranks.open(role_dir, need=less, prepare=prepare)[2], Attempt)
