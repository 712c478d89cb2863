"""Loads a HuggingFace model into a live sharded model. Each rank reads its own slices, or gets them from rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_ckpt.config import TIMEOUT_S
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, InvalidArgumentError
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.huggingface.reader import FolderContents, HuggingFaceReader, read_contents
from mcore_ckpt.formats.locate import Locator, Wanted
from mcore_ckpt.load.broadcast import refuse_broadcast
from mcore_ckpt.load.fill import TensorFill, fill_tensors, refuse_freed
from mcore_ckpt.load.scatter import Request, scatter
from mcore_ckpt.load.together import Runs, fill_together, names_left_over, plan_together, positions_taken
from mcore_ckpt.models.mcore_config import check_model
from mcore_ckpt.models.table import MCORE_HEAD
from mcore_ckpt.ranks.meeting import rendezvous
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.ranks.topology import RankCoordinates, Replicas, Topology, read_replicas, read_topology
from mcore_ckpt.sharding.counterparts import Layers
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.sharding.synonyms import synonyms
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, may_be_padded
from mcore_ckpt.state.megatron_versions import check_megatron
from mcore_ckpt.state.model import (
    as_chunks,
    forget_caches,
    model_shards,
    own_layers,
    process_groups_of,
    unwrap,
    whole_layers,
)
from mcore_ckpt.state.optimizer import follow_model
from mcore_ckpt.state.shards import LocalShard
from mcore_ckpt.state.unsupported import refuse_missing_layers, refuse_unsupported_experts, refuse_unsupported_model

logger = logging.getLogger(__name__)

Source = Literal["shared", "rank0"]


@dataclass(frozen=True)
class HfLoadReport:
    """Report of one `load_hf` on this rank.

    Attributes:
        path: the folder that was read.
        model: a description of the model in the folder.
        tensors: the number of this rank's tensors that were filled.
        nbytes: the bytes that this rank read.
        seconds: the time from the call to the last agreement.
    """

    path: Path
    model: str
    tensors: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _Here:
    """This rank's model, its tensors, coordinates and agreement."""

    chunks: tuple[torch.nn.Module, ...]
    shards: tuple[LocalShard, ...]
    coordinates: RankCoordinates
    topology: Topology
    replicas: Replicas
    agreement: Agreement


@dataclass(frozen=True, eq=False)
class _Plan:
    """This rank's plan: the reader of the folder, and the tensors to fill, with their regions."""

    locator: Locator
    reader: HuggingFaceReader
    requests: tuple[Request, ...]

    @property
    def fills(self) -> tuple[TensorFill, ...]:
        return tuple(request.fill for request in self.requests)


def load_hf(
    model: Any,
    path: str | Path,
    *,
    source: Source = "shared",
    ignore: Sequence[str] = (),
    optimizer: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> HfLoadReport:
    """Fills a live megatron-core model with the weights of a HuggingFace folder. Every rank calls it.

    Either initialize megatron's `parallel_state`, or build the model with a `pg_collection`, even in a single process.
    Without one of them megatron neither builds a GPTModel nor knows which part of a tensor a rank holds.

    Each rank reads only the slices that it holds, under any layout, directly into its parameters. Rows that pad the
    vocabulary become zero. Weights of another floating-point dtype are converted through a limited amount of memory.
    transformer-engine's `_extra_state` keeps its value.

    Before a byte changes, all ranks check names and shapes and agree on the result. Each rank looks for NaN only
    afterwards, in the tensors that it has filled, because otherwise it would have to read every file twice.

    The optimizer's main parameters are still copies of the old weights, and its next step would write them over the new
    weights. To prevent this, pass the optimizer here, or call its `reload_model_params()` afterwards.

    Args:
        model: a megatron-core model or the list of its virtual chunks, bare or wrapped in DistributedDataParallel.
        path: the folder, which has `config.json` and one or several `.safetensors` files.
        source: "shared": every rank reads the folder. "rank0": only rank 0 reads the folder, and sends each rank its
            part in messages of limited size. If several replicas need the same part, one of them gets it and broadcasts
            it to the others.
        ignore: regular expressions for names of tensors that may have no counterpart. HuggingFace tensors with such a
            name are not read, and the model's tensors with such a global name keep their values. To start a critic from
            a language model, pass `("lm_head.weight", "output_layer.weight")`.
        optimizer: the object that `get_megatron_optimizer` returned. Its main parameters are copied from the loaded
            model.
        timeout_s: how long this rank waits for other ranks before it gives up, in seconds.

    Returns:
        The report of this rank.

    Raises:
        CheckpointNotFoundError: the folder does not exist, or has no weights.
        CheckpointMismatchError: the folder's tensors or configuration do not fit this model. All ranks raise it, and
            nothing has changed.
        UnsupportedError: the architecture is not supported, the weights are quantized, the model has a part that is
            not supported, or there is no process group.
        InvalidStateError: there is a process group, but the model has no `pg_collection`, and megatron's
            `parallel_state` is not initialized.
        CheckpointCorruptError: a file is incomplete or cannot be read, or a weight is NaN. The message says whether the
            model has changed.

    Example:
        >>> load_hf(model, "Qwen3-8B", optimizer=optimizer)  # doctest: +SKIP
    """
    started = time.monotonic()
    agreement = rendezvous("load_hf", timeout_s, f"loading {path}")
    path = Path(path)
    topic = f"checking {path}"
    try:
        here = _here(model, agreement)
    except BaseException as error:
        agreement.fail_next_round(topic, error)
        raise
    contents, layers = _read_contents_together(here, path, source, ignore)
    plan = _plan_together(here, contents, layers, source, ignore, topic)
    nbytes = _apply_together(here, plan, source)
    if optimizer is not None:
        follow_model(optimizer)
    seconds = time.monotonic() - started
    return HfLoadReport(path, plan.reader.model.describe(), len(plan.requests), nbytes, seconds)


def _here(model: Any, agreement: Agreement) -> _Here:
    chunks = as_chunks(model)
    check_megatron()
    groups = process_groups_of(chunks)
    coordinates, topology = read_topology(groups, len(chunks))
    replicas = read_replicas(groups)
    refuse_unsupported_model(chunks, replicas.groups)
    shards = tuple(model_shards(chunks))
    refuse_unsupported_experts(topology, shards)
    return _Here(chunks, shards, coordinates, topology, replicas, agreement)


def _read_contents_together(
    here: _Here, path: Path, source: str, ignore: Sequence[str]
) -> tuple[FolderContents, Layers]:
    """Reads the folder's headers on rank 0 and sends them to all ranks, so that only rank 0 opens every file.

    Returns the headers and the layers of the whole model.
    """

    def work() -> Record:
        if source not in ("shared", "rank0"):
            raise InvalidArgumentError(f"source is {source!r}: use 'shared' or 'rank0'")
        where = str(path.absolute()) if source == "shared" else None
        arguments = {"path": where, "source": source, "ignore": list(ignore)}
        return {"arguments": arguments, **own_layers(here.shards, here.coordinates)}

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere([record["arguments"] for record in records], "the arguments of load_hf")
        layers = whole_layers(records)
        refuse_missing_layers(here.chunks, layers)
        return {**read_contents(path).to_record(), "layers": list(layers.items())}

    record = decide(here.agreement, f"opening {path}", work, combine)
    return FolderContents.from_record(path, record), whole_layers([record])


# -- plan -------------------------------------------------------------------------------------------------


def _plan_together(
    here: _Here, contents: FolderContents, layers: Layers, source: Source, ignore: Sequence[str], topic: str
) -> _Plan:
    def plan() -> tuple[_Plan, Record]:
        if source == "rank0":
            refuse_broadcast(here.chunks, here.replicas, 'source="rank0"')
        reader = HuggingFaceReader(contents, ignore)
        own = _plan(here, reader, _locator(here, reader, layers), source)
        return own, {"used": positions_taken(own.locator, (shard.key for shard in _taken(here, reader)))}

    def check(own: _Plan, reports: Sequence[Record]) -> Record:
        _check_all_used(own, [report["used"] for report in reports])
        own.reader.check_left_out()
        return {}

    return plan_together(here.agreement, topic, plan, check)[0]


def _locator(here: _Here, reader: HuggingFaceReader, layers: Layers) -> Locator:
    position = RankPosition(here.topology, here.coordinates)
    return Locator(reader, position, reader.model.sizes["vocab"], layers)


def _plan(here: _Here, reader: HuggingFaceReader, locator: Locator, source: Source) -> _Plan:
    _check_config(here, reader)
    requests = [_request(here, shard, locator, reader, source) for shard in _taken(here, reader)]
    if source == "shared":
        reader.check_visible(read.stored.file for request in requests for read in request.fill.reads)
    return _Plan(locator, reader, tuple(requests))


def _taken(here: _Here, reader: HuggingFaceReader) -> Iterator[LocalShard]:
    """Yields the tensors of this rank that are to be filled."""
    for shard in here.shards:
        if shard.key.kind == MODEL and not any(reader.model.ignores(name) for name in synonyms(shard.key.name)):
            yield shard


def _check_config(here: _Here, reader: HuggingFaceReader) -> None:
    """Compares the configurations. Models with equal shapes can differ in the grouping of heads or the activation."""
    for chunk in here.chunks if reader.model.architecture.rules else ():
        check_model(unwrap(chunk), reader.model)


def _request(here: _Here, shard: LocalShard, locator: Locator, reader: HuggingFaceReader, source: Source) -> Request:
    wanted = Wanted(shard.key, shard.region, str(reader.place))
    refuse_freed(shard.key, shard.tensor, "load_hf()")
    found = locator.find(wanted)
    stored = locator.stored_key(shard.key)
    if found is None or stored is None:
        raise CheckpointMismatchError(
            f"{wanted.file}: {reader.model.describe()} has nothing for tensor {shard.key}, "
            f"{shard.region.describe()}{_hint(shard.key.name, reader, locator)}"
        )
    _check_vocabulary(shard, reader, here.topology)
    if not shard.tensor.dtype.is_floating_point:
        raise CheckpointMismatchError(
            f"{wanted.file}: tensor {shard.key}: has dtype {shard.tensor.dtype} in the model, but {found.dtype} in the "
            "folder: only floating-point tensors can be loaded"
        )
    replicas = _replicas(here, shard.expert) if source == "rank0" else ()
    fill = TensorFill(found.reads, found.dtype, lambda: shard.tensor, padded=bool(found.outside), replicas=replicas)
    return Request(stored.name, shard.region, fill)


def _replicas(here: _Here, expert: bool) -> tuple[int, ...]:
    return here.replicas.experts if expert and here.topology.experts_apart else here.replicas.dense


def _hint(name: str, reader: HuggingFaceReader, locator: Locator) -> str:
    ignore = ". List in `ignore` the tensors that may keep their values"
    if locator.unlike is not None and ".layers." in name:
        return f": {locator.unlike}{ignore}"
    if name == MCORE_HEAD and reader.model.is_tied:
        return ": its embeddings are tied: build the model with share_embeddings_and_output_weights=True"
    return ignore


def _check_vocabulary(shard: LocalShard, reader: HuggingFaceReader, topology: Topology) -> None:
    tokens, rows = reader.model.sizes["vocab"], shard.region.global_shape[0] if shard.region.global_shape else 0
    stored = reader.info(shard.key)
    if not has_vocabulary_rows(shard.key.name) or (stored is not None and stored.shape[0] == rows):
        return
    if not may_be_padded(tokens, rows, topology.tp):
        raise CheckpointMismatchError(
            f"{reader.place}: tensor {shard.key}: {reader.model.describe()} has {tokens} tokens, but this model has "
            f"{rows} rows, which padding for tp = {topology.tp} does not explain"
        )


def _check_all_used(plan: _Plan, used: Sequence[Runs]) -> None:
    left = names_left_over(plan.locator, used)
    if left:
        stored = plan.reader.parts_of(left[0])[0]
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        layers = "" if plan.locator.unlike is None else f" ({plan.locator.unlike})"
        raise CheckpointMismatchError(
            f"{plan.reader.place / stored.file}: {plan.reader.model.describe()} has tensor {left[0]}, "
            f"{stored.region.describe()}{more}, which no rank of this model has{layers}. List in `ignore` the "
            "tensors to leave out"
        )


# -- apply ------------------------------------------------------------------------------------------------


def _apply_together(here: _Here, plan: _Plan, source: Source) -> int:
    def fill(fills: Sequence[TensorFill]) -> int:
        if source == "shared":
            return fill_tensors(fills, plan.reader.read)
        own = {id(fill) for fill in fills}
        requests = [request for request in plan.requests if id(request.fill) in own]
        return scatter(plan.reader, requests, here.agreement.rank, here.agreement.world_size)

    def look() -> Record:
        _refuse_nan(plan)
        return {}

    topic = f"loading {plan.reader.place}"
    try:
        nbytes = fill_together(here.agreement, here.replicas, topic, plan.fills, fill)
        forget_caches(here.chunks)
        decide(here.agreement, topic, look, lambda _: {})
    except CheckpointError as error:
        raise type(error)(f"{error}. The model is now undefined: load it again before using it") from error
    return nbytes


def _refuse_nan(plan: _Plan) -> None:
    for request in plan.requests:
        tensor = request.fill.target()
        # max() of a tensor with NaN is NaN. isnan() on the whole tensor would allocate a mask of the tensor's size.
        if tensor.numel() and tensor.max().isnan():
            raise CheckpointCorruptError(
                f"{plan.reader.place}: tensor {request.name}: contains NaN: take the weights from another copy"
            )
