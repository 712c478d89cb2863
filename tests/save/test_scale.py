"""What a save costs may not grow faster with the number of ranks than it must: messages, bytes and keys are counted."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.formats.native.replica_shares import Share
from mcore_ckpt.save.rank_reports import TensorNames
from tests.support.rank_threads import on_threads

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORLDS = (8, 64)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What `benchmarks/scale.py` finds in two worlds of simulated ranks, on threads in place of processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import scale
        from simulated import Model
        from simulated_ranks import HOST, Case, Crowd, Rank0

        found = {}
        for world in WORLDS:
            case = Case.of(Model.of_tensors(150, 64, experts=16), world, saves=4)
            host: Any = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            root, barrier = tmp_path_factory.mktemp("root"), threading.Barrier(3, timeout=60)
            rank_0, odd, even = (
                lambda case=case, root=root, port=host.port, barrier=barrier: Rank0(case, root, port, barrier).run(),
                *(Crowd(case, range(first, world, 2), root, host.port, barrier, seconds=0.01).run for first in (1, 2)),
            )
            results = on_threads({0: rank_0, 1: odd, 2: even})
            for result in results.values():
                if isinstance(result, Exception):
                    raise result
            found[world] = scale.figures(results[0], [results[1], results[2]])
        return found


def test_all_tensors_are_found_again(worlds: dict[int, dict[str, Any]]) -> None:
    for found in worlds.values():
        assert found["load"]["left_over"] == [0, 0]
        assert all(found["load"][layout]["tensors"] for layout in ("the same layout", "another layout"))


def test_the_messages_of_a_rank_do_not_grow(worlds: dict[int, dict[str, Any]]) -> None:
    few, many = ([save["other"] for save in worlds[world]["saves"][1:]] for world in WORLDS)
    assert few[-1]["requests"] == many[-1]["requests"] <= 4
    # Numbers of ranks have another digit.
    assert many[-1]["sent"] <= few[-1]["sent"] + 50
    assert many[-1]["received"] == few[-1]["received"]


def test_rank_0_sends_no_message_for_each_rank(worlds: dict[int, dict[str, Any]]) -> None:
    """Rank 0 asks for the reports of 256 ranks at a time, and each rank deletes what it has submitted."""
    for traffic in ("traffic", "commit_traffic"):
        few, many = (worlds[world]["saves"][-1][traffic]["requests"] for world in WORLDS)
        assert few == many <= 8


def test_rank_0_receives_at_most_so_much_of_each_rank(worlds: dict[int, dict[str, Any]]) -> None:
    few, many = (worlds[world]["saves"][-1]["commit_traffic"]["received"] / world for world in WORLDS)
    assert many <= few * 1.1


def test_names_are_told_once(worlds: dict[int, dict[str, Any]]) -> None:
    for found in worlds.values():
        first, second, third, _ = (save["commit_traffic"]["received"] for save in found["saves"])
        assert first > second == third


def test_no_keys_are_left(worlds: dict[int, dict[str, Any]]) -> None:
    """Each agreement keeps the submissions to its last round, and what rank 0 announced in its last two."""
    for world, found in worlds.items():
        keys = [save["keys_before"] for save in found["saves"]]
        assert keys[3] == keys[2] <= 2 * world + 20


def test_a_rank_looks_into_its_own_files_alone(worlds: dict[int, dict[str, Any]]) -> None:
    """Under the layout of the checkpoint: its optimizer file, its model file and its file of experts."""
    assert {found["load"]["the same layout"]["indexes"] for found in worlds.values()} == {3}


class Plan:
    """A file as a plan describes it."""

    def __init__(self, holds: str, *names: str, writers: tuple[int, ...] = (0,)) -> None:
        self.holds, self.names, self.share = holds, names, Share(writers, ())


def test_only_the_owner_sends_the_names() -> None:
    plans: list[Any] = [Plan("a", "é", "b"), Plan("b", "c", writers=(1, 0)), Plan("c", writers=(0, 1))]
    sender, rank_0 = TensorNames(), TensorNames()
    sent = sender.to_send(plans, rank=0)
    assert set(sent) == {"a", "b"}
    rank_0.receive(sent)
    others = TensorNames().to_send(plans, rank=1)
    assert set(others) == {"c"}
    rank_0.receive(others)
    names, holds = rank_0.in_order(["a", "b", "c"])
    assert names == ("b", "c", "é")
    assert {digest: list(runs) for digest, runs in holds.items()} == {"a": [(0, 0), (2, 2)], "b": [(1, 1)], "c": []}
    sender.mark_sent(plans)
    assert sender.to_send(plans, rank=0) == {}


def test_the_benchmark_of_a_commit_follows_the_package() -> None:
    """It stands in for the ranks and calls what a save calls, so a change of a save can break it."""
    command = [sys.executable, str(BENCHMARKS / "commit.py"), "--ranks", "8", "--tensors", "50", "--experts", "16"]
    result = subprocess.run([*command, "--saves", "2", "--repeat", "1", "--json"], check=True, capture_output=True)
    ((first, later),) = json.loads(result.stdout)["runs"]["now"]
    assert first["files"] == later["files"] > 8
    assert {"names", "describe", "check files", "read back", "publish", "all"} <= later["cpu"].keys()
