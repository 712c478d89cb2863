"""Lists the files that a rank writes completely or in part, and the tensors in each file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.checkpoint.index import SCALE_REGION, Alias
from mcore_ckpt.formats.native.replica_shares import share_out
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.io import tuning
from mcore_ckpt.save.replica_check import may_differ
from mcore_ckpt.sharding.plan import MODEL, PARAM, Coding, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.main_weights import NO_WEIGHTS, MainWeights, weights_to_save, without_main
from mcore_ckpt.state.model import model_shards
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.shards import LocalShard, ParameterState
from mcore_ckpt.state.trainer import Trainer

# The kind of a coded tensor's scale, or of its upper halves, is the tensor's kind followed by one of these suffixes.
_SCALE, _UPPER = "_scale", "_upper"

# Groups the replicas of a file. Each group writes one copy of the file together.
WritersOf = Callable[[Sequence[int]], Sequence[tuple[int, ...]]]


def together(replicas: Sequence[int]) -> Sequence[tuple[int, ...]]:
    """Lets all replicas write one file, as in a folder that all of them see."""
    return [tuple(replicas)]


def weights_of(trainer: Trainer, has_memory: bool = True) -> MainWeights:
    """Returns the weights that are made from main parameters for a save; none if the model is not saved."""
    if not saves_model(trainer):
        return NO_WEIGHTS
    return weights_to_save(trainer.chunks, trainer.optimizer, has_memory)


def saves_model(trainer: Trainer) -> bool:
    """Returns True if a save writes the model's files. An export of a HuggingFace model needs these files, too."""
    return not {"model", "hf_model"}.isdisjoint(trainer.config.save_contents)


def parameter_states(trainer: Trainer, model: Sequence[LocalShard]) -> list[list[ParameterState]]:
    """Returns the states of each chained optimizer's parameters; none if the optimizer is not saved."""
    if "optimizer" not in trainer.config.save_contents:
        return []
    return optimizer_state.read_optimizer(trainer.optimizer, model, trainer.first_instance)


def write_requests(
    trainer: Trainer,
    weights: MainWeights,
    model: Sequence[LocalShard],
    by_part: Sequence[Sequence[ParameterState]],
    writers_of: WritersOf,
) -> list[WriteRequest]:
    """Lists the files that this rank writes completely or in part.

    The arguments come from `weights_of`, `model_shards` and `parameter_states`. `writers_of` says which replicas write
    a file together (`Destination.writers_of`).
    """
    requests: list[WriteRequest] = []
    if saves_model(trainer):
        skip_frozen = trainer.config.skip_frozen
        saved = [shard for shard in model if not (skip_frozen and shard.is_frozen)]
        requests += _model_requests(trainer, [_with_weight(shard, weights) for shard in saved], writers_of)
    if "optimizer" in trainer.config.save_contents:
        requests += _optimizer_requests(trainer, by_part, writers_of)
    return requests


def estimated_bytes(trainer: Trainer, writers_of: WritersOf = together) -> int:
    """Estimates how many bytes this rank's part of a checkpoint will have. Raises UnsupportedError as a save does.

    Before the optimizer's first step, the estimate adds the moments that this step will make. `writers_of` says which
    replicas write a file together (`Destination.writers_of`).
    """
    parts = [] if trainer.optimizer is None else optimizer_parts(trainer.optimizer)
    to_come = max((part.bytes_of_first_step() for part in parts), default=0)
    model = model_shards(trainer.chunks)
    weights = weights_of(trainer, has_memory=False)
    requests = write_requests(trainer, weights, model, parameter_states(trainer, model), writers_of)
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
    # Replicas share a file, but not in equal parts: each tensor comes from one replica.
    *starts, end = accumulate(sizes, initial=0)
    start, stop = share_out(request.writers, end, tuning.SHARE_BYTES, starts).range_of(rank)
    return stop - start


def _with_weight(shard: LocalShard, weights: MainWeights) -> LocalShard:
    """Returns the shard with the weight that is made from its main parameter; the shard itself if no weight is made."""
    weight = weights.by_parameter.get(id(shard.tensor))
    if weight is not None:
        return replace(shard, tensor=weight)
    if shard.is_quantized:
        raise without_main(shard.key.name)
    return shard


def _model_requests(trainer: Trainer, model: Iterable[LocalShard], writers_of: WritersOf) -> Iterator[WriteRequest]:
    at, apart, replicas = trainer.coordinates, trainer.topology.experts_apart, trainer.replicas
    own = [shard for shard in model if not shard.replica]
    dense = [shard for shard in own if not (apart and shard.expert)]
    experts = [shard for shard in own if apart and shard.expert]
    request = WriteRequest(file_names.model_file(at.tp, at.pp), "model", _model_writes(dense))
    yield from _with_writers(trainer, replicas.dense, request, writers_of)
    if experts:
        path = file_names.expert_file(at.etp, at.pp, at.ep)
        request = WriteRequest(path, "experts", _model_writes(experts))
        yield from _with_writers(trainer, replicas.experts, request, writers_of)


def _with_writers(
    trainer: Trainer, ranks: Sequence[int], request: WriteRequest, writers_of: WritersOf
) -> Iterator[WriteRequest]:
    """Yields the request for a file of replicated tensors, with the file's writers.

    The ranks of each group that `writers_of` returns write one copy of the file together; without `shared_writes`, the
    first rank of the group writes alone. If replicas may differ, only the first of all `ranks` writes. Yields nothing
    on a rank that does not write.
    """
    alike = not any(map(_may_differ, request.tensors))
    for members in writers_of(ranks) if alike else [tuple(ranks[:1])]:
        if trainer.config.shared_writes and alike and trainer.agreement.rank in members:
            yield replace(request, writers=members)
        elif trainer.agreement.rank == members[0]:
            yield request


def _may_differ(write: TensorWrite) -> bool:
    return write.tensor.numel() > 0 and may_differ(write.key.name, write.is_buffer)


def _model_writes(shards: Iterable[LocalShard]) -> tuple[TensorWrite, ...]:
    return tuple(
        TensorWrite((s.key.name,), s.key, s.region, s.tensor, tuple(s.tensor.shape), s.is_buffer, s.refresh)
        for s in shards
    )


def _optimizer_requests(
    trainer: Trainer, by_part: Sequence[Sequence[ParameterState]], writers_of: WritersOf
) -> Iterator[WriteRequest]:
    """Yields the request for this rank's own file and, if the optimizer is replicated, for the first replica's file."""
    parts = optimizer_parts(trainer.optimizer)
    states = list(zip(parts, by_part, strict=True))
    rank, dense = trainer.agreement.rank, trainer.replicas.dense
    own = _optimizer_request(trainer, trainer.coordinates.place, states, rank)
    # If experts and dense parameters have different replicas, no two ranks have the same tensors of both kinds, so each
    # rank writes its own file.
    replicated = not any(part.is_sharded for part in parts) and not trainer.topology.experts_apart
    if not replicated:
        yield own
        return
    at = trainer.coordinates
    if rank != dense[0]:
        yield own
    request = _optimizer_request(trainer, (at.pp, at.tp, 0, 0), states, dense[0])
    yield from _with_writers(trainer, dense, request, writers_of)


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
    """Yields a main parameter or a moment and, if it is coded, its scale or its upper halves."""
    dtype, scale = dtype_name(tensor.dtype), state.scales.get(kind)
    if scale is not None:
        beside = kind + _SCALE
        yield _state_write(state, kind, tensor, Coding(dtype, scale=beside))
        yield TensorWrite(("state", state.name, beside), ShardKey(state.name, beside), SCALE_REGION, scale, (1,))
    elif kind == PARAM and state.upper is not None:
        # The model's files have the upper halves. If the model is not saved, the optimizer's files must have them.
        upper = MODEL if model_is_saved else kind + _UPPER
        yield _state_write(state, kind, tensor, Coding(dtype, upper=upper))
        if not model_is_saved:
            yield _state_write(state, upper, state.upper)
    else:
        yield _state_write(state, kind, tensor)


def _state_write(state: ParameterState, kind: str, tensor: torch.Tensor, coding: Coding | None = None) -> TensorWrite:
    key = ShardKey(state.name, kind)
    return TensorWrite(("state", state.name, kind), key, state.region, tensor, (state.region.numel,), coding=coding)
