"""Describes the parallel layout and each rank's place in it, and reads both from megatron."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mcore_ckpt.errors import InvalidStateError


def has_process_group() -> bool:
    """Returns True if torch.distributed is initialized in this process."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class RankCoordinates:
    """A rank's place in every parallel dimension.

    Each rank of the world has its own (pp, tp, cp, dp), and its own (pp, etp, ep, edp).
    """

    tp: int = 0
    pp: int = 0
    cp: int = 0
    dp: int = 0
    ep: int = 0
    etp: int = 0
    edp: int = 0

    @property
    def place(self) -> tuple[int, int, int, int]:
        """The coordinates (pp, tp, cp, dp), in the order in which the names of a rank's files contain them."""
        return (self.pp, self.tp, self.cp, self.dp)


@dataclass(frozen=True)
class Replicas:
    """The world ranks that hold the same dense tensors as this rank, and those that hold the same experts.

    The first rank in each tuple owns the file with these tensors.
    """

    dense: tuple[int, ...] = (0,)
    experts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Topology:
    """The sizes of the parallel layout. `vpp` is 1 without virtual stages."""

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
        """True if experts have files of their own, because they are cut differently from dense tensors."""
        return self.ep > 1 or self.etp != self.tp

    def has_generators_of(self, other: Topology) -> bool:
        """Returns True if this layout's random number generators can continue from the other layout's states.

        megatron seeds the generators by the PP, TP, EP and ETP ranks (`model_parallel_cuda_manual_seed`, 0.16.1).
        """
        return all(getattr(self, size) == getattr(other, size) for size in ("pp", "tp", "ep", "etp"))

    def place_in_turn(self, place: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Returns the place in this layout from which a rank at `place` in another layout loads its small files.

        Both places are (pp, tp, cp, dp). If this layout has `place`, the result is `place`. Otherwise each coordinate
        is taken modulo the size of this layout, so that the ranks share this layout's places in turn.
        """
        pp, tp, cp, dp = place
        return pp % self.pp, tp % self.tp, cp % self.cp, dp % self.dp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp}
        usual = {"vpp": 1, "ep": 1, "etp": self.tp, "optimizer_instances": 1}
        sizes |= {name: size for name, size in asdict(self).items() if name in usual and size != usual[name]}
        return f"{self.world_size} ranks ({', '.join(f'{name}={size}' for name, size in sizes.items())})"


def coordinates_of(rank: int, topology: Topology) -> RankCoordinates:
    """Returns the coordinates of a world rank in megatron's default order "tp-cp-ep-dp-pp".

    `RankGenerator` (parallel_state, 0.16.1) orders dense ranks as tp-cp-dp-pp, and expert ranks as etp-ep-edp-pp.

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
    """Reads this process's coordinates and the layout's sizes from megatron's `parallel_state`.

    A process without a process group is the only rank. All its coordinates are 0, and all sizes except `vpp` are 1.

    Raises InvalidStateError if there is a process group but megatron's model parallelism is not initialized.
    """
    import torch.distributed as dist

    if not has_process_group():
        return RankCoordinates(), Topology(vpp=virtual_stages)
    from megatron.core import parallel_state as ps

    if not ps.model_parallel_is_initialized():
        raise InvalidStateError(
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
    """Returns True if this rank belongs to distributed-optimizer instance 0. If there is one instance, all ranks do."""
    if topology.optimizer_instances == 1:
        return True
    from megatron.core import parallel_state as ps

    return ps.get_inter_distributed_optimizer_instance_group().rank() == 0


def read_replicas() -> Replicas:
    """Reads from megatron's `parallel_state` which ranks hold the same tensors as this rank.

    Dense tensors are replicated over data and context parallelism, experts over expert data parallelism. The ranks of
    a group ascend, so the first one has cp = dp = 0 (or edp = 0).
    """
    import torch.distributed as dist

    if not has_process_group():
        return Replicas()
    from megatron.core import parallel_state as ps

    dense = ps.get_data_parallel_group(with_context_parallel=True)
    experts = ps.get_expert_data_parallel_group()
    return Replicas(tuple(dist.get_process_group_ranks(dense)), tuple(dist.get_process_group_ranks(experts)))
