"""Where a rank stands, without and with megatron's groups."""

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_ckpt.ranks.topology import (
    RankCoordinates,
    Replicas,
    Topology,
    is_first_optimizer_instance,
    read_replicas,
    read_topology,
)


def test_one_process_without_groups_is_all_there_is() -> None:
    assert read_topology(virtual_stages=3) == (RankCoordinates(), Topology(vpp=3))
    assert is_first_optimizer_instance(Topology())


def test_groups_without_megatrons_are_an_error_that_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        read_topology(1)


def test_one_process_is_its_only_replica_and_owns_every_file() -> None:
    assert read_replicas() == Replicas(dense=(0,), experts=(0,))


def test_replicas_are_megatrons_groups_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense tensors are replicated over data and context parallelism together, experts over their own."""
    groups = {"dense": [1, 3, 5, 7], "experts": [3, 7]}

    def dense(with_context_parallel: bool = False) -> str:
        assert with_context_parallel
        return "dense"

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", groups.__getitem__)
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", dense)
    monkeypatch.setattr(parallel_state, "get_expert_data_parallel_group", lambda: "experts")
    assert read_replicas() == Replicas(dense=(1, 3, 5, 7), experts=(3, 7))


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
