"""Where a rank stands, by megatron's own process groups, in worlds of which this process plays one rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from mcore_ckpt.errors import InvalidStateError, UnsupportedError
from mcore_ckpt.ranks.process_groups import find_process_groups
from mcore_ckpt.ranks.topology import (
    RankCoordinates,
    Replicas,
    Topology,
    coordinates_of,
    is_first_optimizer_instance,
    read_replicas,
    read_topology,
)
from tests.support.absent_ranks import rank_of


def initialize(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, instances: int = 1) -> None:
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_distributed_optimizer_instances=instances,
        create_gloo_process_groups=False,
    )


def model_of(*fields: str, experts: bool = False) -> Any:
    """A model with a collection of these groups, and without parallel_state."""
    collection = ProcessGroupCollection.use_mpu_process_groups(list(fields))
    module = SimpleNamespace(num_local_experts=2)
    for group in list(parallel_state.__dict__):
        if group.endswith("_GROUP"):
            parallel_state.__dict__[group] = None
    assert not parallel_state.model_parallel_is_initialized()
    return SimpleNamespace(pg_collection=collection, modules=lambda: [module] if experts else [])


DENSE = ("tp", "pp", "cp", "dp", "dp_cp")
EXPERTS = ("ep", "expt_tp", "expt_dp")
LAYOUTS: dict[str, tuple[dict[str, int], Topology]] = {
    "plain": ({}, Topology(8, dp=8, edp=8)),
    "dense": ({"tp": 2, "pp": 2, "cp": 2}, Topology(8, tp=2, pp=2, cp=2, dp=1, etp=2, edp=2)),
    "experts": ({"tp": 2, "ep": 2, "etp": 1}, Topology(8, tp=2, dp=4, ep=2, etp=1, edp=4)),
    "etp": ({"ep": 2, "etp": 2, "pp": 2}, Topology(8, pp=2, dp=4, ep=2, etp=2, edp=1)),
    "instances": ({"instances": 2}, Topology(8, dp=8, edp=8, optimizer_instances=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("own", [False, True], ids=["parallel_state", "collection"])
@pytest.mark.parametrize("rank", [0, 3, 6])
def test_a_place_is_that_of_megatrons_groups(rank: int, own: bool, name: str) -> None:
    sizes, topology = LAYOUTS[name]
    with rank_of(8, rank):
        initialize(**sizes)
        more = ("inter_dist_opt",) if name == "instances" else ()
        groups = find_process_groups(model_of(*DENSE, *EXPERTS, *more) if own else None)
        assert read_topology(groups) == (coordinates_of(rank, topology), topology)
        assert is_first_optimizer_instance(groups) == (name != "instances" or rank < 4)


def test_replicas_are_megatrons_groups_in_their_order() -> None:
    """Dense tensors are replicated over data and context parallelism together, experts over their own."""
    with rank_of(8, 5):
        initialize(tp=2, cp=2, ep=2, etp=1)
        groups = find_process_groups()
        replicas = read_replicas(groups)
        assert (replicas.dense, replicas.experts) == ((1, 3, 5, 7), (1, 3, 5, 7))
        initial = read_topology(groups, virtual_stages=3)[1]
        assert (initial.vpp, initial.edp) == (3, 4)
        assert groups is not None
        assert replicas.group_of(replicas.dense) is groups.dp_cp
    with rank_of(8, 5):
        initialize(ep=4)
        replicas = read_replicas(groups := find_process_groups())
        assert (replicas.dense, replicas.experts) == (tuple(range(8)), (1, 5))
        assert groups is not None
        assert replicas.group_of(replicas.experts) is groups.edp


def test_a_model_without_groups_for_experts_has_them_divided_as_the_rest() -> None:
    with rank_of(8, 5):
        initialize(tp=2, pp=2)
        groups = find_process_groups(model_of(*DENSE))
        at, topology = read_topology(groups)
        assert topology == Topology(8, tp=2, pp=2, dp=2, etp=2, edp=2)
        assert (at.ep, at.etp, at.edp) == (0, at.tp, at.dp)
        assert not topology.experts_apart
        assert read_replicas(groups).experts == read_replicas(groups).dense


def test_a_dense_model_may_have_some_groups_for_experts() -> None:
    """megatron asks dense models for `expt_dp`, too (setup_process_groups_for_optimizer)."""
    with rank_of(8, 5):
        initialize(tp=2, ep=2, etp=1)
        topology = read_topology(find_process_groups(model_of(*DENSE, "ep", "expt_dp")))[1]
        assert topology == Topology(8, tp=2, dp=4, etp=2, edp=4)


def test_what_a_collection_lacks_is_taken_from_parallel_state() -> None:
    with rank_of(4, 2):
        initialize(tp=2)
        groups = find_process_groups(
            SimpleNamespace(pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp"]))
        )
        assert groups is not None
        assert groups.dp is parallel_state.get_data_parallel_group()


def test_a_torch_that_knows_no_group_of_none_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 raises KeyError where newer ones take None for the default group."""
    get_ranks = dist.get_process_group_ranks

    def strict(group: Any) -> list[int]:
        if group is None:
            raise KeyError(group)
        return get_ranks(group)

    monkeypatch.setattr(dist, "get_process_group_ranks", strict)
    with rank_of(4, 2):
        initialize(tp=2)
        assert find_process_groups() is not None


def test_data_parallel_ranks_hold_the_same_without_context_parallelism() -> None:
    with rank_of(4, 2):
        initialize(tp=2)
        groups = find_process_groups(model_of("tp", "pp", "cp", "dp"))
        assert groups is not None
        assert groups.dp_cp is groups.dp


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        (("tp", "cp", "dp", "dp_cp"), "pp"),
        (("tp", "pp", "cp", "dp_cp"), "dp"),
        (("tp", "pp", "cp", "dp"), "dp_cp"),
        ((*DENSE, "ep"), "expt_tp, expt_dp"),
    ],
)
def test_a_collection_that_lacks_a_group_is_refused_by_its_name(fields: tuple[str, ...], missing: str) -> None:
    with rank_of(4, 2):
        initialize(cp=2)
        model = model_of(*fields, experts="ep" in fields)
        with pytest.raises(UnsupportedError, match=f"pg_collection lacks {missing}: "):
            find_process_groups(model)


def test_one_process_without_groups_is_all_there_is() -> None:
    assert find_process_groups() is None
    assert read_topology(None, virtual_stages=3) == (RankCoordinates(), Topology(vpp=3))
    assert is_first_optimizer_instance(None)
    assert read_replicas(None) == Replicas(dense=(0,), experts=(0,))
    assert Replicas().group_of((0,)) is None


def test_groups_without_megatrons_are_an_error_that_says_what_to_call() -> None:
    with rank_of(2, 0), pytest.raises(InvalidStateError, match="initialize_model_parallel"):
        find_process_groups(SimpleNamespace())


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
