"""Where a rank stands, without and with megatron's groups."""

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_ckpt.topology import RankCoordinates, Topology, is_first_optimizer_instance, read_topology


def test_one_process_without_groups_is_all_there_is() -> None:
    assert read_topology(virtual_stages=3) == (0, RankCoordinates(), Topology(vpp=3))
    assert is_first_optimizer_instance(Topology())


def test_groups_without_megatrons_are_an_error_that_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        read_topology(1)


@pytest.mark.parametrize(("cp", "dp", "writes"), [(0, 0, True), (1, 0, False), (0, 1, False), (1, 1, False)])
def test_the_first_replica_writes_dense_tensors(cp: int, dp: int, writes: bool) -> None:
    assert RankCoordinates(cp=cp, dp=dp, edp=cp + dp).writes_dense == writes
    assert RankCoordinates(cp=cp, dp=dp, edp=cp + dp).writes_experts == writes


@pytest.mark.parametrize(
    ("topology", "apart"),
    [
        (Topology(), False),
        (Topology(tp=2, etp=2), False),
        (Topology(tp=2, etp=1), True),
        (Topology(ep=2), True),
    ],
)
def test_experts_have_files_of_their_own_if_they_are_cut_otherwise(topology: Topology, apart: bool) -> None:
    assert topology.experts_apart == apart


def test_a_layout_is_named_by_what_is_unusual_in_it() -> None:
    assert str(Topology(world_size=4, tp=2, etp=2, dp=2)) == "4 ranks (tp=2, pp=1, cp=1, dp=2)"
    assert str(Topology(world_size=8, tp=2, pp=2, vpp=3, dp=2, ep=2, etp=1, optimizer_instances=2)) == (
        "8 ranks (tp=2, pp=2, cp=1, dp=2, vpp=3, ep=2, etp=1, optimizer_instances=2)"
    )
