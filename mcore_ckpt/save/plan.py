"""Plans a save: which bytes of each tensor this rank writes, and into which file.

`file_contents.py` says which tensors are in which files. A plan is reused as long as the tensors are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from operator import attrgetter, call, eq, is_
from typing import cast
from weakref import ReferenceType, ref

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.native.file_plan import FilePlan, StructureCache, plan_file
from mcore_ckpt.formats.native.write_requests import WriteRequest
from mcore_ckpt.save.capture import FileTensors
from mcore_ckpt.save.file_contents import WritersOf, parameter_states, saves_model, together, weights_of, write_requests
from mcore_ckpt.save.rank_reports import GroupMembers
from mcore_ckpt.save.replica_check import ReplicatedTensors, replicated_tensors
from mcore_ckpt.state.live import LiveObjects
from mcore_ckpt.state.main_weights import NO_WEIGHTS, MainWeights
from mcore_ckpt.state.model import model_shards
from mcore_ckpt.state.offloaded import HostCopies, host_copies, in_host_memory
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.trainer import Trainer

_SHAPE, _DTYPE, _DEVICE = map(attrgetter, ("shape", "dtype", "device"))
# How many tensors `_KeptTensors.find` checks together. The first check brings these tensors into the processor's cache,
# where the other checks find them.
_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class _KeptTensors:
    """Weak references to some of a file's tensors, with parallel tuples of their shapes, dtypes and devices."""

    references: tuple[ReferenceType[torch.Tensor], ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> _KeptTensors:
        kinds = (tuple(map(attribute, tensors)) for attribute in (_SHAPE, _DTYPE, _DEVICE))
        return _KeptTensors(tuple(map(ref, tensors)), *kinds)

    def find(self, instead: Mapping[int, torch.Tensor | None]) -> FileTensors | None:
        """Returns the tensors; None if a tensor is gone or has another shape, dtype or device.

        `instead` overrides some of the tensors, by index.
        """
        tensors = list(map(call, self.references))
        for number, tensor in instead.items():
            tensors[number] = tensor
        if any(map(is_, tensors, repeat(None))):
            return None
        found = cast("list[torch.Tensor]", tensors)
        # Without this context, a TorchFunctionMode, such as a profiler's, would be called for each of thousands of
        # tensors. The checks make no lists, because keeping thousands of new objects at a time would start a garbage
        # collection, which takes longer than all these checks.
        with torch._C.DisableTorchFunction():
            is_alike = (
                all(map(eq, map(_SHAPE, found), self.shapes))
                and all(map(is_, map(_DTYPE, found), self.dtypes))
                and all(map(eq, map(_DEVICE, found), self.devices))
            )
        return FileTensors.of(found) if is_alike else None


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The files that this rank writes completely or in part, and the tensors to write into each file.

    Attributes:
        files: the files, in the order in which they are written.
        tensors: the tensors of each file. The tensors of `weights` have no memory (device `meta`).
        buffers: the (file, tensor) numbers of tensors that may change at any point of a training step.
        on_gpu: whether any tensor is on a GPU.
        on_host: whether any parameter or optimizer state is in host memory.
        weights: the weights that must be made from main parameters before the capture.
        groups: which parameters are in which param groups.
        replicated: the tensors that other ranks have, too.
        copies: the host copies of the buffers that are offloaded.
    """

    files: tuple[FilePlan, ...]
    tensors: tuple[FileTensors, ...]
    buffers: tuple[tuple[int, int], ...]
    on_gpu: bool
    on_host: bool
    weights: MainWeights
    groups: GroupMembers
    replicated: tuple[ReplicatedTensors, ...]
    copies: HostCopies = field(default_factory=dict)

    def with_own_weights(self, files: Iterable[int]) -> SavePlan:
        """Returns the plan with host memory for those weights in `files` that are made from main parameters.

        Files that are written in place need this memory until they are written. In other files, these weights have
        memory only in the file's image.

        Raises MemoryError if the system does not have the memory.
        """
        if not self.weights.by_parameter:
            return self
        new: dict[int, torch.Tensor] = {}
        tensors = list(self.tensors)
        for number in files:
            stand_ins = {id(each): each for each in tensors[number].tensors if each.is_meta}
            new |= {at: torch.empty(each.shape, dtype=each.dtype) for at, each in stand_ins.items()}
            if stand_ins:
                tensors[number] = FileTensors.of([new.get(id(each), each) for each in tensors[number].tensors])
        return replace(self, tensors=tuple(tensors), weights=self.weights.with_tensors(new))


@dataclass(frozen=True, eq=False)
class _PlanBetweenSaves:
    """A plan that is kept from save to save. It keeps no tensor alive, so that a trainer can offload its tensors.

    `without` is the plan without tensors and weights. `from_mains` lists the weights that each save makes from main
    parameters: their (file, tensor) numbers, and the `id` of the parameter. `gathers` says whether this rank takes part
    in making these weights, even if this rank writes none of them.
    """

    live: LiveObjects
    without: SavePlan
    tensors: tuple[tuple[_KeptTensors, ...], ...]
    from_mains: tuple[tuple[int, int, int], ...]
    gathers: bool

    @staticmethod
    def of(plan: SavePlan, live: LiveObjects) -> _PlanBetweenSaves:
        tensors = tuple(
            tuple(
                _KeptTensors.of(members.tensors[at : at + _AT_ONCE]) for at in range(0, len(members.tensors), _AT_ONCE)
            )
            for members in plan.tensors
        )
        parameters = {id(tensor): parameter for parameter, tensor in plan.weights.by_parameter.items()}
        from_mains = tuple(
            (file, number, parameters[id(tensor)])
            for file, members in enumerate(plan.tensors if parameters else ())
            for number, tensor in enumerate(members.tensors)
            if id(tensor) in parameters
        )
        without = replace(plan, tensors=(), weights=NO_WEIGHTS, copies={})
        return _PlanBetweenSaves(live, without, tensors, from_mains, bool(parameters))

    def plan(self, trainer: Trainer) -> SavePlan | None:
        """Returns the plan with the current tensors; None if the plan is no longer valid."""
        if not self.live.are_still_there():
            return None
        weights = weights_of(trainer) if self.gathers else NO_WEIGHTS
        by_file = [self._find(file, weights) for file in range(len(self.tensors))]
        tensors = tuple(members for members in by_file if members is not None)
        if len(tensors) < len(by_file):
            return None
        return replace(self.without, tensors=tensors, weights=weights)

    def _find(self, file: int, weights: MainWeights) -> FileTensors | None:
        refreshed = self._refreshed(file)
        for where, number, parameter in self.from_mains:
            if where == file:
                refreshed[number] = weights.by_parameter.get(parameter)
        parts = []
        for number, kept in enumerate(self.tensors[file]):
            low = number * _AT_ONCE
            found = kept.find({at - low: tensor for at, tensor in refreshed.items() if 0 <= at - low < _AT_ONCE})
            if found is None:
                return None
            parts.append(found)
        return FileTensors(
            list(chain.from_iterable(part.tensors for part in parts)),
            list(chain.from_iterable(part.addresses for part in parts)),
            all(part.in_rows for part in parts),
        )

    def _refreshed(self, file: int) -> dict[int, torch.Tensor | None]:
        """Calls the `refresh` function of each tensor that has one, in one file. Returns the new tensors by index."""
        found: dict[int, torch.Tensor | None] = {}
        for number in (number for where, number in self.without.buffers if where == file):
            refresh = self.without.files[file].request.tensors[number].refresh
            if refresh is not None:
                found[number] = refresh()
        return found


class SavePlanner:
    """Makes plans, and reuses the last plan as long as it is valid."""

    def __init__(self) -> None:
        self._structures = StructureCache()
        self._last_plan: _PlanBetweenSaves | None = None

    def plan(self, trainer: Trainer, writers_of: WritersOf = together) -> SavePlan:
        """Returns this rank's plan. Copies no tensor, and does not communicate.

        `writers_of` says which replicas write a file together (`Destination.writers_of`). It must give the same answer
        at every save, because plans are reused. Raises UnsupportedError if something cannot be saved completely, or if
        a tensor has no memory because the tensor is offloaded.
        """
        plan = None if self._last_plan is None else self._last_plan.plan(trainer)
        if plan is None:
            self._last_plan = None
            live = LiveObjects(trainer.chunks, trainer.optimizer)
            plan = _new_plan(trainer, self._structures, writers_of)
            self._last_plan = _PlanBetweenSaves.of(plan, live)
        plan = _with_host_copies(plan, host_copies(trainer.chunks))
        for file, members in zip(plan.files, plan.tensors, strict=True):
            _refuse_freed_memory(file.request, members)
        return plan


def _with_host_copies(plan: SavePlan, copies: HostCopies) -> SavePlan:
    if not copies:
        return plan
    tensors = tuple(FileTensors.of(in_host_memory(members.tensors, copies)) for members in plan.tensors)
    return replace(plan, tensors=tensors, on_gpu=_on_gpu(tensors, plan.weights), on_host=True, copies=copies)


# On a system whose addresses have 48 bits, no tensor with memory is below this address. On other systems, all tensors
# may be below this address, and then each tensor is checked.
_LEAST_ADDRESS = 1 << 44


def _refuse_freed_memory(request: WriteRequest, members: FileTensors) -> None:
    """Raises UnsupportedError if a tensor is offloaded.

    megatron's `offload_to_cpu` (0.16.1) frees the storage of a tensor, so that the tensor's address is only its offset
    in that storage. If the buffer of a tensor has a host copy, the tensor is not refused: `_with_host_copies` has
    already replaced it by a part of this copy.
    """
    if min(members.addresses, default=_LEAST_ADDRESS) >= _LEAST_ADDRESS:
        return
    for write, tensor, address in zip(request.tensors, members.tensors, members.addresses, strict=True):
        if address < _LEAST_ADDRESS and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise UnsupportedError(
                f"tensor {write.key} has no memory because it is offloaded: bring model and optimizer back to the "
                "device before save()"
            )


def _new_plan(trainer: Trainer, structures: StructureCache, writers_of: WritersOf) -> SavePlan:
    weights = weights_of(trainer)
    model = model_shards(trainer.chunks)
    by_part = parameter_states(trainer, model)
    requests = write_requests(trainer, weights, model, by_part, writers_of)
    for request in requests:
        _refuse_other_devices(request, weights)
    plans = [(plan_file(request, trainer.agreement.rank, structures), request) for request in requests]
    plans = [(plan, request) for plan, request in plans if plan.nbytes]
    tensors = tuple(FileTensors.of([write.tensor for write in request.tensors]) for _, request in plans)
    return SavePlan(
        tuple(plan for plan, _ in plans),
        tensors,
        buffers=tuple(
            (number, position)
            for number, (_, request) in enumerate(plans)
            for position, write in enumerate(request.tensors)
            if write.is_buffer
        ),
        on_gpu=_on_gpu(tensors, weights),
        on_host=_on_host(request for _, request in plans),
        weights=weights,
        groups=GroupMembers.of(by_part),
        replicated=replicated_tensors(
            trainer,
            model if saves_model(trainer) else [],
            [] if "optimizer" not in trainer.config.save_contents else optimizer_parts(trainer.optimizer),
            by_part,
        ),
    )


def _on_gpu(tensors: Iterable[FileTensors], weights: MainWeights) -> bool:
    each = [tensor for members in tensors for tensor in members.tensors]
    return any(tensor.is_cuda for tensor in each) or (weights.is_cuda and any(tensor.is_meta for tensor in each))


def _on_host(requests: Iterable[WriteRequest]) -> bool:
    return any(write.tensor.is_cpu and not write.is_buffer for request in requests for write in request.tensors)


def _refuse_other_devices(request: WriteRequest, weights: MainWeights) -> None:
    made = set(map(id, weights.by_parameter.values()))
    for write in request.tensors:
        if write.tensor.device.type not in ("cpu", "cuda") and id(write.tensor) not in made:
            raise UnsupportedError(
                f"tensor {write.key} is on device {write.tensor.device}: only CPU and CUDA are supported"
            )
