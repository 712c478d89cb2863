"""Compares the tensors of which several ranks have the same region, because replicas may have drifted apart.

At each save, every rank computes the CRCs of small parts of a few such tensors, others each time, and sends them with
its report. Rank 0 compares them. With `verify_replicas`, these are all bytes of all such tensors.

Two ranks have the same list of tensors if the names and regions in it are the same (`replica_lists.py`), so no process
group is asked, and states that a DistributedOptimizer cuts at other elements on another stage are not compared. The
save's id chooses the tensors and the bytes. The CRCs travel in the reports of the commit, some 100 bytes for each rank.
Drift nearly always is in all tensors, because a reduction or a broadcast was lost, so one save finds it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import torch

from mcore_ckpt.io import _native
from mcore_ckpt.io.device_waits import wait_before_reading
from mcore_ckpt.save.replica_lists import ReplicatedTensors
from mcore_ckpt.state.offloaded import HostCopies, in_host_memory

logger = logging.getLogger(__name__)

# How many tensors of each list are compared at a save, and how many bytes of each. A rank then reads at most
# 256 KiB for each list, in some 0.1 ms.
_TENSORS, _BYTES = 4, 64 << 10

# At most so many bytes of a GPU's tensor are on the host at a time, if all are compared.
_PIECE_BYTES = 64 << 20


class ReplicaReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a rank tells rank 0 of its replicated tensors at one save.

    Attributes:
        crcs: the CRCs of the chosen tensors of each list, by the list's label; None for what could not be read.
        names: the names of these tensors, if it is this rank that tells them.
        mended: the tensors of which a writer found another one's first bytes different, with both ranks.
    """

    crcs: dict[str, tuple[int | None, ...]] = {}
    names: dict[str, tuple[str, ...]] = {}
    mended: tuple[tuple[str, int, int], ...] = ()


# -- on every rank ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sampled:
    """Parts of the tensors of one list, or their CRCs: on the host already, or on their way. None: not to be had."""

    of: ReplicatedTensors
    numbers: tuple[int, ...]
    parts: tuple[torch.Tensor | int | None, ...]


@dataclass(frozen=True, eq=False)
class ReplicaSamples:
    """What this rank tells rank 0 of its replicated tensors at one save."""

    samples: tuple[_Sampled, ...] = ()

    def report(self, has_arrived: bool, mended: Iterable[tuple[str, int, int]]) -> ReplicaReport:
        """Returns the CRCs, and the names of the tensors as far as it is this rank that tells them.

        Parts that are copied from a GPU count only if the copies have arrived.
        """
        told = (sampled for sampled in self.samples if sampled.of.names_them)
        return ReplicaReport(
            {each.of.label: tuple(_crc_if(part, has_arrived) for part in each.parts) for each in self.samples},
            {each.of.label: tuple(each.of.names[number] for number in each.numbers) for each in told},
            tuple(mended),
        )


def take_samples(
    lists: Sequence[ReplicatedTensors], attempt: str, everything: bool, copies: HostCopies
) -> ReplicaSamples:
    """Reads small parts of a few tensors of each list, the same ones on all ranks, and others at each save.

    Args:
        lists: this rank's replicated tensors.
        attempt: the id of the save, which chooses the tensors and the parts.
        everything: reads all bytes of all tensors instead, and waits for them.
        copies: the host copies of offloaded tensors.
    """
    return ReplicaSamples(tuple(_sample(each, attempt, everything, copies) for each in lists))


def _sample(listed: ReplicatedTensors, attempt: str, everything: bool, copies: HostCopies) -> _Sampled:
    # The generator of the trainer must not be touched.
    chosen = random.Random(attempt + listed.label)
    total = len(listed.tensors)
    first = chosen.randrange(total)
    numbers = tuple((first + n) % total for n in range(total if everything else min(_TENSORS, total)))
    parts: list[torch.Tensor | int | None] = []
    for number in numbers:
        at, tensor = chosen.random(), listed.tensors[number]()
        found = None if tensor is None else in_host_memory([tensor.detach()], copies)[0]
        if found is None or not found.untyped_storage().nbytes():
            parts.append(None)
        elif everything:
            wait_before_reading(found)
            parts.append(_crc_of_all(found.contiguous()))
        elif not found.is_contiguous():
            parts.append(None)  # a part of it cannot be had without a copy of all of it
        else:
            part = _part_at(found.view(-1), at)
            parts.append(part.to("cpu", non_blocking=True) if part.is_cuda else _crc(part))
    return _Sampled(listed, numbers, tuple(parts))


def _crc_if(part: torch.Tensor | int | None, has_arrived: bool) -> int | None:
    if isinstance(part, torch.Tensor):
        return _crc(part) if has_arrived else None
    return part


def _part_at(flat: torch.Tensor, at: float) -> torch.Tensor:
    length = min(flat.numel(), _BYTES // flat.itemsize)
    start = int(at * (flat.numel() - length + 1))
    return flat[start : start + length]


def _crc_of_all(tensor: torch.Tensor) -> int:
    crc = 0
    for part in tensor.view(-1).split(_PIECE_BYTES // tensor.itemsize):
        crc = _crc(part.cpu(), crc)
    return crc


def _crc(part: torch.Tensor, seed: int = 0) -> int:
    return _native.crc32(part.data_ptr(), part.nbytes, seed) if part.nbytes else seed


# -- on rank 0 ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DifferentReplicas:
    """A tensor of which ranks have different bytes, although they are replicas.

    Attributes:
        tensor: the tensor's name.
        ranks: the ranks, one tuple for each version of the bytes; the largest group first.
    """

    tensor: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        groups = " and ".join(f"rank{'s' if len(g) > 1 else ''} {_shown(g)}" for g in self.ranks)
        return f"tensor {self.tensor}: {groups} have different bytes, although they are replicas"


def _shown(ranks: Sequence[int]) -> str:
    most = 8
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more


def compare_replicas(reports: Sequence[ReplicaReport]) -> tuple[DifferentReplicas, ...]:
    """Compares what all ranks have told, in the order of the ranks."""
    by_label: dict[str, dict[int, Sequence[int | None]]] = {}
    names: dict[str, Sequence[str]] = {}
    for rank, report in enumerate(reports):
        names.update(report.names)
        for label, crcs in report.crcs.items():
            by_label.setdefault(label, {})[rank] = crcs
    found = {
        different.tensor: different
        for label, by_rank in by_label.items()
        if len(by_rank) > 1
        for different in _differences(by_rank, names.get(label, ()))
    }
    for tensor, one, other in chain.from_iterable(report.mended for report in reports):
        found.setdefault(tensor, DifferentReplicas(tensor, ((min(one, other),), (max(one, other),))))
    return tuple(found.values())


def _differences(by_rank: Mapping[int, Sequence[int | None]], names: Sequence[str]) -> Iterator[DifferentReplicas]:
    # Nearly always all are equal, and there may be thousands of ranks.
    if len(set(by_rank.values())) == 1:
        return
    for number, every in enumerate(zip(*by_rank.values(), strict=True)):
        versions: dict[int, list[int]] = {}
        for rank, crc in zip(by_rank, every, strict=True):
            if crc is not None:
                versions.setdefault(crc, []).append(rank)
        if len(versions) > 1:
            groups = sorted(map(tuple, versions.values()), key=lambda ranks: (-len(ranks), ranks))
            yield DifferentReplicas(names[number] if number < len(names) else f"number {number}", tuple(groups))


@dataclass(frozen=True, eq=False)
class ReplicaWarnings:
    """Warns of each tensor once, and of at most a few tensors, because drifted replicas differ in all of them."""

    most: int = 8
    _told: set[str] = field(default_factory=set)

    def tell(self, found: Iterable[DifferentReplicas]) -> None:
        """Warns of tensors that no earlier call had."""
        for different in found:
            if different.tensor in self._told or len(self._told) >= self.most:
                continue
            self._told.add(different.tensor)
            last = "; further tensors are only in the reports" if len(self._told) == self.most else ""
            logger.warning(
                "%s. Find out what has changed one of them. A load makes them equal, unless the checkpoint has the "
                "tensor of each tensor-parallel rank, or none (skip_frozen)%s",
                different,
                last,
            )
