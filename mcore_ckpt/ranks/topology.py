"""Where a rank stands in the parallel layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RankCoordinates:
    """One rank's own ranks. (pp, tp, cp, dp) name every rank of the world once; (pp, etp, ep, edp) do so too."""

    tp: int = 0
    pp: int = 0
    cp: int = 0
    dp: int = 0
    ep: int = 0
    etp: int = 0
    edp: int = 0

    @property
    def place(self) -> tuple[int, int, int, int]:
        """(pp, tp, cp, dp), as in the names of files that each rank writes."""
        return (self.pp, self.tp, self.cp, self.dp)


@dataclass(frozen=True)
class Replicas:
    """World ranks that hold the same dense tensors, and the same experts, as this one. The first owns their file."""

    dense: tuple[int, ...] = (0,)
    experts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel layout. `vpp` is 1 without virtual stages."""

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    edp: int = 1
    optimizer_instances: int = 1

    @property
    def experts_apart(self) -> bool:
        """Whether experts have files of their own: dense and expert ranks are cut differently."""
        return self.ep > 1 or self.etp != self.tp

    def has_generators_of(self, other: Topology) -> bool:
        """Whether each rank's random number generators can go on where those of the other layout's ranks were.

        megatron seeds them by these ranks (`model_parallel_cuda_manual_seed`, 0.16.1).
        """
        return all(getattr(self, size) == getattr(other, size) for size in ("pp", "tp", "ep", "etp"))

    def place_in_turn(self, place: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """The place (pp, tp, cp, dp) whose small files in this layout a rank gets that is at a place of another layout.

        Its own, or, where there are fewer, that of the rank it would be in turn.
        """
        pp, tp, cp, dp = place
        return pp % self.pp, tp % self.tp, cp % self.cp, dp % self.dp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp}
        usual = {"vpp": 1, "ep": 1, "etp": self.tp, "optimizer_instances": 1}
        sizes |= {name: size for name, size in asdict(self).items() if name in usual and size != usual[name]}
        return f"{self.world_size} ranks ({', '.join(f'{name}={size}' for name, size in sizes.items())})"


def coordinates_of(rank: int, topology: Topology) -> RankCoordinates:
    """Where a world rank stands in megatron's default order "tp-cp-ep-dp-pp".

    `RankGenerator` (parallel_state, 0.16.1) orders dense ranks tp-cp-dp-pp and, apart from them, experts etp-ep-edp-pp.

    Example:
        >>> coordinates_of(5, Topology(world_size=8, tp=2, pp=2, dp=2, ep=2, etp=1, edp=2))
        RankCoordinates(tp=1, pp=1, cp=0, dp=0, ep=1, etp=0, edp=0)
    """
    dense, tp = divmod(rank, topology.tp)
    dense, cp = divmod(dense, topology.cp)
    pp, dp = divmod(dense, topology.dp)
    experts, etp = divmod(rank, topology.etp)
    experts, ep = divmod(experts, topology.ep)
    return RankCoordinates(tp, pp, cp, dp, ep, etp, experts % topology.edp)


def read_topology(virtual_stages: int) -> tuple[RankCoordinates, Topology]:
    """This process's coordinates and the layout's sizes, from megatron's `parallel_state`.

    Without initialized model parallelism (one process, no megatron groups) everything is 0 of 1.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return RankCoordinates(), Topology(vpp=virtual_stages)
    from megatron.core import parallel_state as ps

    if not ps.model_parallel_is_initialized():
        raise RuntimeError(
            "torch.distributed is initialized but megatron's parallel_state is not: call "
            "parallel_state.initialize_model_parallel(...) first"
        )
    coordinates = RankCoordinates(
        tp=ps.get_tensor_model_parallel_rank(),
        pp=ps.get_pipeline_model_parallel_rank(),
        cp=ps.get_context_parallel_rank(),
        dp=ps.get_data_parallel_rank(),
        ep=ps.get_expert_model_parallel_rank(),
        etp=ps.get_expert_tensor_parallel_rank(),
        edp=ps.get_expert_data_parallel_rank(),
    )
    full_dp = ps.get_data_parallel_group(with_context_parallel=True).size()
    instance_dp = ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True).size()
    topology = Topology(
        world_size=dist.get_world_size(),
        tp=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_world_size(),
        vpp=virtual_stages,
        cp=ps.get_context_parallel_world_size(),
        dp=ps.get_data_parallel_world_size(),
        ep=ps.get_expert_model_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_world_size(),
        edp=ps.get_expert_data_parallel_world_size(),
        optimizer_instances=full_dp // instance_dp,
    )
    return coordinates, topology


def is_first_optimizer_instance(topology: Topology) -> bool:
    """Whether this rank belongs to distributed-optimizer instance 0. With one instance, all do."""
    if topology.optimizer_instances == 1:
        return True
    from megatron.core import parallel_state as ps

    return ps.get_inter_distributed_optimizer_instance_group().rank() == 0


def read_replicas() -> Replicas:
    """Dense tensors are replicated over data and context parallelism, experts over expert data parallelism.

    A group's ranks ascend, so its first has cp = dp = 0 (edp = 0).
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Replicas()
    from megatron.core import parallel_state as ps

    dense = ps.get_data_parallel_group(with_context_parallel=True)
    experts = ps.get_expert_data_parallel_group()
    return Replicas(tuple(dist.get_process_group_ranks(dense)), tuple(dist.get_process_group_ranks(experts)))
