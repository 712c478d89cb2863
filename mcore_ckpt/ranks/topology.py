"""Describes the parallel layout and each rank's place in it, and reads both from the process groups.

Random number generators differ by pp, tp, ep and etp rank. If the sizes of these dimensions stay the same, each rank
takes its coordinates modulo the saved sizes, and loads the states of the saved rank at that place
(`Topology.place_in_turn`). Otherwise every rank seeds its generators as megatron does, from the saved seed (one for
each data-parallel rank) and the step, and rank 0 logs that the random states are new.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from mcore_ckpt.ranks.process_groups import ProcessGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """A rank's place in every parallel dimension. No two ranks have the same (pp, tp, cp, dp) or (pp, etp, ep, edp)."""

    tp: int = 0
    pp: int = 0
    cp: int = 0
    dp: int = 0
    ep: int = 0
    etp: int = 0
    edp: int = 0

    @property
    def by_axis(self) -> dict[str, int]:
        """All coordinates, by the names of the dimensions."""
        return {axis: getattr(self, axis) for axis in self.__slots__}

    @property
    def place(self) -> tuple[int, int, int, int]:
        """The coordinates (pp, tp, cp, dp), in the order in which the names of a rank's files contain them."""
        return (self.pp, self.tp, self.cp, self.dp)


@dataclass(frozen=True)
class Replicas:
    """The world ranks that hold the same dense tensors as this rank, and the world ranks that hold the same experts.

    The first rank in each tuple owns the file with these tensors. `groups` has the process group of each tuple.
    `groups` is None in a process without process groups.
    """

    dense: tuple[int, ...] = (0,)
    experts: tuple[int, ...] = (0,)
    groups: ProcessGroups | None = field(default=None, compare=False, repr=False)

    def group_of(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Returns the process group of `dense` or of `experts`, for collective calls.

        A result of None means torch's default group.
        """
        if self.groups is None:
            return None
        return self.groups.dp_cp if ranks == self.dense else self.groups.edp


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
        """True if experts have separate files, because they are cut differently from dense tensors."""
        return self.ep > 1 or self.etp != self.tp

    def has_generators_of(self, other: Topology) -> bool:
        """Returns True if this layout's random number generators can continue from the other layout's states.

        megatron seeds the generators by the PP, TP, EP and ETP ranks (`model_parallel_cuda_manual_seed`, 0.16.1).
        """
        return all(getattr(self, size) == getattr(other, size) for size in ("pp", "tp", "ep", "etp"))

    def place_in_turn(self, place: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Returns the place in this layout from which a rank at `place` in another layout loads its small files.

        Both places are (pp, tp, cp, dp). If this layout has `place`, the result is `place`. Otherwise each coordinate
        is taken modulo the size of its dimension in this layout, so that the ranks share this layout's places in turn.
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


def read_topology(groups: ProcessGroups | None, virtual_stages: int = 1) -> tuple[RankCoordinates, Topology]:
    """Reads this process's coordinates and the layout's sizes from its process groups.

    Without process groups this process is the only rank. All its coordinates are 0, and all sizes except `vpp` are 1.
    """
    import torch.distributed as dist

    if groups is None:
        return RankCoordinates(), Topology(vpp=virtual_stages)
    tp, pp, cp, dp = (_place(group) for group in (groups.tp, groups.pp, groups.cp, groups.dp))
    ep, etp, edp = (0, 1), tp, _place(groups.dp_cp)
    if groups.ep is not None and groups.etp is not None and groups.edp is not None:
        ep, etp, edp = _place(groups.ep), _place(groups.etp), _place(groups.edp)
    instances = 1 if groups.instances is None else groups.instances.size()
    return (
        RankCoordinates(tp[0], pp[0], cp[0], dp[0], ep[0], etp[0], edp[0]),
        Topology(
            world_size=dist.get_world_size(),
            tp=tp[1],
            pp=pp[1],
            vpp=virtual_stages,
            cp=cp[1],
            dp=dp[1],
            ep=ep[1],
            etp=etp[1],
            edp=edp[1],
            optimizer_instances=instances,
        ),
    )


def _place(group: ProcessGroup) -> tuple[int, int]:
    return group.rank(), group.size()


def is_first_optimizer_instance(groups: ProcessGroups | None) -> bool:
    """Returns True if this rank belongs to distributed-optimizer instance 0.

    If there is only one instance, all ranks belong to it.
    """
    return groups is None or groups.instances is None or groups.instances.rank() == 0


def read_replicas(groups: ProcessGroups | None) -> Replicas:
    """Reads from the process groups which ranks hold the same tensors as this rank.

    Dense tensors are replicated over data and context parallelism, experts over expert data parallelism. The ranks of a
    group ascend, so the first rank has cp = dp = 0 (or edp = 0).
    """
    import torch.distributed as dist

    if groups is None:
        return Replicas()
    dense, experts = (dist.get_process_group_ranks(group) for group in (groups.dp_cp, groups.edp or groups.dp_cp))
    return Replicas(tuple(dense), tuple(experts), groups)
