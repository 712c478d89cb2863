"""Plans a save: which tensor is written where in which file.

A plan is reused as long as the tensors are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, repeat
from operator import attrgetter, call, eq, is_
from typing import cast
from weakref import ReferenceType, ref

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.checkpoint.index import SCALE_REGION, Alias
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.native.file_plan import FilePlan, StructureCache, plan_file
from mcore_ckpt.formats.native.replica_shares import share_out
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.io import tuning
from mcore_ckpt.save.capture import FileTensors
from mcore_ckpt.save.group_lists import GroupMembers
from mcore_ckpt.save.replica_check import ReplicatedTensors, may_differ, replicated_tensors
from mcore_ckpt.sharding.plan import MODEL, PARAM, Coding, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.live import LiveObjects
from mcore_ckpt.state.main_weights import NO_WEIGHTS, MainWeights, weights_to_save, without_main
from mcore_ckpt.state.model import model_shards
from mcore_ckpt.state.offloaded import HostCopies, host_copies, in_host_memory
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.shards import LocalShard, ParameterState
from mcore_ckpt.state.trainer import Trainer

_SHAPE, _DTYPE, _DEVICE = map(attrgetter, ("shape", "dtype", "device"))
# How many tensors `_KeptTensors.find` checks together. Its first check brings them into the processor's cache, so that
# its other checks find them there.
_AT_ONCE = 512

# What is appended to a kind for the kind that its values follow from, too.
_SCALE, _UPPER = "_scale", "_upper"


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
        """Returns the tensors; None if one is gone or has another shape, dtype or device.

        `instead` gives, by index, tensors to use in place of those that the references refer to.
        """
        tensors = list(map(call, self.references))
        for number, tensor in instead.items():
            tensors[number] = tensor
        if any(map(is_, tensors, repeat(None))):
            return None
        found = cast("list[torch.Tensor]", tensors)
        # Without this, a TorchFunctionMode, such as a profiler, would be called for each of thousands of tensors. The
        # checks make no lists, because keeping thousands of new objects at a time would start a garbage collection,
        # which takes longer than all these checks.
        with torch._C.DisableTorchFunction():
            is_alike = (
                all(map(eq, map(_SHAPE, found), self.shapes))
                and all(map(is_, map(_DTYPE, found), self.dtypes))
                and all(map(eq, map(_DEVICE, found), self.devices))
            )
        return FileTensors.of(found) if is_alike else None


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The files that this rank writes parts of, and the tensors to write, by file.

    Attributes:
        files: the files, in the order in which they are written.
        tensors: the tensors of each file. Those of `weights` have no memory (device `meta`).
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
        """Gives host memory of its own to each weight of these files that is made from main parameters.

        Files that are written straight from their tensors need it until they are written. In other files, these
        weights have no memory but that of the file's image.

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

    `from_mains` has the (file, tensor) numbers of weights that are made from main parameters for each save, and the
    `id` of the parameter of each. `gathers` says whether there are such weights at all: ranks that write none of them
    take part in making them, too.
    """

    live: LiveObjects
    files: tuple[FilePlan, ...]
    tensors: tuple[tuple[_KeptTensors, ...], ...]
    buffers: tuple[tuple[int, int], ...]
    from_mains: tuple[tuple[int, int, int], ...]
    gathers: bool
    on_gpu: bool
    on_host: bool
    groups: GroupMembers
    replicated: tuple[ReplicatedTensors, ...]

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
        return _PlanBetweenSaves(
            live,
            plan.files,
            tensors,
            plan.buffers,
            from_mains,
            bool(parameters),
            plan.on_gpu,
            plan.on_host,
            plan.groups,
            plan.replicated,
        )

    def plan(self, trainer: Trainer) -> SavePlan | None:
        """Returns the plan with the current tensors; None if the plan is no longer valid."""
        if not self.live.are_still_there():
            return None
        weights = _weights_to_save(trainer) if self.gathers else NO_WEIGHTS
        by_file = [self._find(file, weights) for file in range(len(self.files))]
        tensors = tuple(members for members in by_file if members is not None)
        if len(tensors) < len(by_file):
            return None
        on = (self.on_gpu, self.on_host)
        return SavePlan(self.files, tensors, self.buffers, *on, weights, self.groups, self.replicated)

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
        """Makes anew those tensors of the file that have a `refresh`, and returns them by index."""
        found: dict[int, torch.Tensor | None] = {}
        for number in (number for where, number in self.buffers if where == file):
            refresh = self.files[file].request.tensors[number].refresh
            if refresh is not None:
                found[number] = refresh()
        return found


class SavePlanner:
    """Makes plans, and reuses the last plan as long as it is valid."""

    def __init__(self) -> None:
        self._structures = StructureCache()
        self._last_plan: _PlanBetweenSaves | None = None

    def plan(self, trainer: Trainer) -> SavePlan:
        """Returns this rank's plan. Copies no tensor, and does not communicate.

        Raises:
            UnsupportedError: something cannot be saved completely, or a tensor has no memory because it is offloaded.
        """
        plan = None if self._last_plan is None else self._last_plan.plan(trainer)
        if plan is None:
            self._last_plan = None
            live = LiveObjects(trainer.chunks, trainer.optimizer)
            plan = _new_plan(trainer, self._structures)
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


# Where addresses have 48 bits, no tensor with memory is below this address. On other systems all tensors may be below
# it, and then each of them is checked.
_LEAST_ADDRESS = 1 << 44


def _refuse_freed_memory(request: WriteRequest, members: FileTensors) -> None:
    """Raises UnsupportedError if a tensor is offloaded.

    megatron's `offload_to_cpu` (0.16.1) frees the storage of a tensor, so that the tensor's address is only its offset
    in that storage. Tensors whose buffer has a host copy are not refused, because `_with_host_copies` has already
    replaced them by a part of this copy.
    """
    if min(members.addresses, default=_LEAST_ADDRESS) >= _LEAST_ADDRESS:
        return
    for write, tensor, address in zip(request.tensors, members.tensors, members.addresses, strict=True):
        if address < _LEAST_ADDRESS and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise UnsupportedError(
                f"tensor {write.key} has no memory because it is offloaded: bring model and optimizer back to the "
                "device before save()"
            )


def _new_plan(trainer: Trainer, structures: StructureCache) -> SavePlan:
    weights = _weights_to_save(trainer)
    model = model_shards(trainer.chunks)
    by_part = _parameter_states(trainer, model)
    requests = _write_requests(trainer, weights, model, by_part)
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


def _weights_to_save(trainer: Trainer, has_memory: bool = True) -> MainWeights:
    if not saves_model(trainer):
        return NO_WEIGHTS
    return weights_to_save(trainer.chunks, trainer.optimizer, has_memory)


def saves_model(trainer: Trainer) -> bool:
    """Returns True if a save writes the model's files, from which a HuggingFace model is made, too."""
    return not {"model", "hf_model"}.isdisjoint(trainer.config.save_contents)


def _parameter_states(trainer: Trainer, model: Sequence[LocalShard]) -> list[list[ParameterState]]:
    if "optimizer" not in trainer.config.save_contents:
        return []
    return optimizer_state.read_optimizer(trainer.optimizer, model, trainer.first_instance)


def _write_requests(
    trainer: Trainer,
    weights: MainWeights,
    model: Sequence[LocalShard],
    by_part: Sequence[Sequence[ParameterState]],
) -> list[WriteRequest]:
    """Lists the files that this rank writes completely or in part."""
    requests: list[WriteRequest] = []
    if saves_model(trainer):
        skip_frozen = trainer.config.skip_frozen
        saved = [shard for shard in model if not (skip_frozen and shard.is_frozen)]
        requests += _model_requests(trainer, [_with_weight(shard, weights) for shard in saved])
    if "optimizer" in trainer.config.save_contents:
        requests += _optimizer_requests(trainer, by_part)
    return requests


def estimated_bytes(trainer: Trainer) -> int:
    """Estimates how many bytes this rank's part of a checkpoint will have.

    Before the optimizer's first step there are no moments. Then the estimate adds what this step will make.

    Raises:
        UnsupportedError: something cannot be saved completely.
    """
    parts = [] if trainer.optimizer is None else optimizer_parts(trainer.optimizer)
    to_come = max((part.bytes_of_first_step() for part in parts), default=0)
    model = model_shards(trainer.chunks)
    weights = _weights_to_save(trainer, has_memory=False)
    requests = _write_requests(trainer, weights, model, _parameter_states(trainer, model))
    total = sum(_estimated_request_bytes(request, to_come, trainer.agreement.rank) for request in requests)
    return total + total // _HEADERS_PART


# In a file of large tensors, headers, padding and the index take less than 1 / _HEADERS_PART of the tensors' bytes.
_HEADERS_PART = 100


def _estimated_request_bytes(request: WriteRequest, to_come: int, rank: int) -> int:
    is_new = request.kind == "optimizer" and all(write.key.kind == PARAM for write in request.tensors)
    moments = to_come if is_new else 0
    sizes = [write.tensor.nbytes + moments * write.region.numel for write in request.tensors]
    sizes += [moments * alias.region.numel for alias in request.aliases]
    if len(request.writers) < 2:
        return sum(sizes)
    # Replicas share a file, but not in equal parts: each tensor comes from one of them.
    *starts, end = accumulate(sizes, initial=0)
    start, stop = share_out(request.writers, end, tuning.SHARE_BYTES, starts).range_of(rank)
    return stop - start


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


def _with_weight(shard: LocalShard, weights: MainWeights) -> LocalShard:
    """Returns the shard with the weight that is made from its main parameter, if it needs one."""
    weight = weights.by_parameter.get(id(shard.tensor))
    if weight is not None:
        return replace(shard, tensor=weight)
    if shard.is_quantized:
        raise without_main(shard.key.name)
    return shard


def _model_requests(trainer: Trainer, model: Iterable[LocalShard]) -> Iterator[WriteRequest]:
    at, apart, replicas = trainer.coordinates, trainer.topology.experts_apart, trainer.replicas
    own = [shard for shard in model if not shard.replica]
    dense = [shard for shard in own if not (apart and shard.expert)]
    experts = [shard for shard in own if apart and shard.expert]
    yield from _with_writers(
        trainer, replicas.dense, WriteRequest(file_names.model_file(at.tp, at.pp), "model", _model_writes(dense))
    )
    if experts:
        path = file_names.expert_file(at.etp, at.pp, at.ep)
        yield from _with_writers(trainer, replicas.experts, WriteRequest(path, "experts", _model_writes(experts)))


def _with_writers(trainer: Trainer, ranks: Sequence[int], request: WriteRequest) -> Iterator[WriteRequest]:
    """Assigns the writers of a file of replicated tensors: all replicas (`ranks`) with a part each, or only the first.

    In the fast tier, replicas share a file only within a node. Replicas on other nodes write the file once more, on as
    many nodes as would otherwise get a copy of it.

    Yields nothing on a rank that does not write.
    """
    alike = not any(map(_may_differ, request.tensors))
    for members in _members_by_node(trainer, ranks) if alike else [tuple(ranks[:1])]:
        if trainer.config.shared_writes and alike and trainer.agreement.rank in members:
            yield replace(request, writers=members)
        elif trainer.agreement.rank == members[0]:
            yield request


def _members_by_node(trainer: Trainer, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the replicas that write a file together; one group for each node whose folder gets the file."""
    if trainer.nodes is None or trainer.config.fast is None:
        return [tuple(ranks)]
    by_node = trainer.nodes.by_node(ranks)
    home = trainer.nodes.number_of(ranks[0])
    others = [node for node in trainer.nodes.preferred(home) if node in by_node][: trainer.config.fast.replicas]
    return [by_node[node] for node in (home, *others)]


def _may_differ(write: TensorWrite) -> bool:
    return write.tensor.numel() > 0 and may_differ(write.key.name, write.is_buffer)


def _model_writes(shards: Iterable[LocalShard]) -> tuple[TensorWrite, ...]:
    return tuple(
        TensorWrite((s.key.name,), s.key, s.region, s.tensor, tuple(s.tensor.shape), s.is_buffer, s.refresh)
        for s in shards
    )


def _optimizer_requests(trainer: Trainer, by_part: Sequence[Sequence[ParameterState]]) -> Iterator[WriteRequest]:
    """Yields the request for this rank's own file and, if the optimizer is replicated, for the first replica's file."""
    parts = optimizer_parts(trainer.optimizer)
    states = list(zip(parts, by_part, strict=True))
    rank, dense = trainer.agreement.rank, trainer.replicas.dense
    own = _optimizer_request(trainer, trainer.coordinates.place, states, rank)
    # If experts have replicas of their own, a file has tensors with different replicas, so only one rank writes it.
    replicated = not any(part.is_sharded for part in parts) and not trainer.topology.experts_apart
    if not replicated:
        yield own
        return
    at = trainer.coordinates
    if rank != dense[0]:
        yield own
    yield from _with_writers(trainer, dense, _optimizer_request(trainer, (at.pp, at.tp, 0, 0), states, dense[0]))


def _optimizer_request(
    trainer: Trainer,
    place: tuple[int, int, int, int],
    states: Iterable[tuple[OptimizerPart, Sequence[ParameterState]]],
    writer: int,
) -> WriteRequest:
    """Returns the optimizer file of one place (pp, tp, cp, dp), with the tensors that rank `writer` writes."""
    writes: list[TensorWrite] = []
    aliases: list[Alias] = []
    for part, members in states:
        for state in members:
            if _writes_state(trainer, part, state, writer):
                _add_state(state, "model" in trainer.config.save_contents, writes, aliases)
    return WriteRequest(file_names.optimizer_file(*place), "optimizer", tuple(writes), tuple(aliases), tree=("state",))


def _writes_state(trainer: Trainer, part: OptimizerPart, state: ParameterState, writer: int) -> bool:
    if state.replica:
        return False
    if part.is_sharded:
        return True
    apart = trainer.topology.experts_apart and state.expert
    return writer == (trainer.replicas.experts if apart else trainer.replicas.dense)[0]


def _add_state(state: ParameterState, model_is_saved: bool, writes: list[TensorWrite], aliases: list[Alias]) -> None:
    tensors: Mapping[str, torch.Tensor] = state.moments
    if state.is_model_view and model_is_saved:
        key = ShardKey(state.name, PARAM)
        aliases.append(Alias(key, MODEL, state.region, dtype_name(state.main.dtype)))
    else:
        tensors = {PARAM: state.main, **tensors}
    for kind, tensor in tensors.items():
        writes += _state_writes(state, kind, tensor, model_is_saved)
    for kind, tensor in state.bound.items():
        path, shape = ("state", state.name, kind), tuple(tensor.shape)
        writes.append(TensorWrite(path, ShardKey(state.name, kind), Region.whole(shape), tensor, shape, beside=PARAM))


def _state_writes(
    state: ParameterState, kind: str, tensor: torch.Tensor, model_is_saved: bool
) -> Iterator[TensorWrite]:
    """Yields a main parameter or a moment, and what its values follow from besides its own elements."""
    dtype, scale = dtype_name(tensor.dtype), state.scales.get(kind)
    if scale is not None:
        beside = kind + _SCALE
        yield _state_write(state, kind, tensor, Coding(dtype, scale=beside))
        yield TensorWrite(("state", state.name, beside), ShardKey(state.name, beside), SCALE_REGION, scale, (1,))
    elif kind == PARAM and state.upper is not None:
        # The model's files have the upper halves. Without them, the optimizer's files must have them.
        upper = MODEL if model_is_saved else kind + _UPPER
        yield _state_write(state, kind, tensor, Coding(dtype, upper=upper))
        if not model_is_saved:
            yield _state_write(state, upper, state.upper)
    else:
        yield _state_write(state, kind, tensor)


def _state_write(state: ParameterState, kind: str, tensor: torch.Tensor, coding: Coding | None = None) -> TensorWrite:
    key = ShardKey(state.name, kind)
    return TensorWrite(("state", state.name, kind), key, state.region, tensor, (state.region.numel,), coding=coding)
