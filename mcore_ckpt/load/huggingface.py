"""A HuggingFace model straight into a live sharded one: each rank reads its own slices, or gets them from rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.huggingface.reader import FolderCatalog, FolderContents, read_contents
from mcore_ckpt.formats.locate import Sources, Wanted
from mcore_ckpt.load.broadcast import Batch, batches, broadcast, refuse_broadcast, to_read
from mcore_ckpt.load.fill import TensorFill, fill_tensors
from mcore_ckpt.load.scatter import Request, scatter
from mcore_ckpt.models.mcore_config import check_model
from mcore_ckpt.models.table import MCORE_HEAD
from mcore_ckpt.ranks.rendezvous import rendezvous
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.ranks.topology import RankCoordinates, Replicas, Topology, read_replicas, read_topology
from mcore_ckpt.sharding.plan import MODEL, ShardKey, StoredShard, runs
from mcore_ckpt.sharding.synonyms import synonyms
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, may_be_padded
from mcore_ckpt.state.model import as_chunks, model_shards, unwrap
from mcore_ckpt.state.shards import LocalShard
from mcore_ckpt.state.unsupported import refuse_unsupported_experts, refuse_unsupported_model

logger = logging.getLogger(__name__)

Source = Literal["shared", "rank0"]


@dataclass(frozen=True)
class HfLoadReport:
    """What `load_hf` did.

    Attributes:
        path: the folder.
        model: what it holds, in words.
        tensors: how many of this rank's tensors were filled.
        nbytes: read by this rank.
        seconds: from the call to the last agreement.
    """

    path: Path
    model: str
    tensors: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _Here:
    """This rank: its model, and where it stands."""

    chunks: tuple[torch.nn.Module, ...]
    coordinates: RankCoordinates
    topology: Topology
    replicas: Replicas
    agreement: Agreement


@dataclass(frozen=True, eq=False)
class _Plan:
    catalog: FolderCatalog
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
    timeout_s: float = 600.0,
) -> HfLoadReport:
    """Fills a live megatron-core model with the weights of a HuggingFace folder. Every rank calls it.

    megatron's `parallel_state` must be initialized, in a single process, too: without it megatron (0.16.1) neither
    builds a GPTModel nor says where its tensors belong.

    Each rank reads just the slices that it holds, whatever the layout, into the parameters where they are. Rows that
    pad the vocabulary become zero; what has another floating dtype is cast, through bounded memory. `_extra_state` of
    transformer-engine stays as it is.

    All names and shapes are checked, and agreed by all ranks, before a byte changes. That the numbers are numbers can
    only be seen in the bytes: each rank looks at what it has been given, afterwards, instead of reading everything
    twice.

    The optimizer's main parameters are copies of the old weights, and its next step would write them back: hand it
    over here, or call its `reload_model_params()`.

    Args:
        model: a megatron-core model or the list of its virtual chunks, bare or wrapped in DistributedDataParallel.
        path: the folder: `config.json` and one or several `.safetensors` files.
        source: "shared": every rank reads the folder. "rank0": rank 0 alone sees it, and sends the others their parts
            in bounded pieces; replicas get theirs from one of them.
        ignore: regular expressions of names that may have no counterpart. HuggingFace tensors of such a name are not
            read, the model's (by global names) keep what they have: a critic from a language model takes
            `("lm_head.weight", "output_layer.weight")`.
        optimizer: what `get_megatron_optimizer` returned: its main parameters are taken from the loaded model.
        timeout_s: how long any wait for other ranks may take, in seconds.

    Returns:
        What was done on this rank.

    Raises:
        CheckpointNotFoundError: there is no such folder, or no weights in it.
        CheckpointMismatchError: its tensors, or its configuration, are not this model's; the same on all ranks, and
            nothing has changed.
        UnsupportedError: an architecture without a table, quantized weights, a model that is not supported; or there
            is no process group.
        RuntimeError: there is a process group, and megatron's `parallel_state` is not initialized.
        CheckpointCorruptError: a file is cut or cannot be read, or a weight is not a number; the message says whether
            the model has changed.

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
    contents = _find(here, path, source, ignore)
    plan = _plan_together(here, contents, source, ignore, topic)
    nbytes = _apply_together(here, plan, source)
    if optimizer is not None:
        optimizer.reload_model_params()
    seconds = time.monotonic() - started
    return HfLoadReport(path, plan.catalog.model.describe(), len(plan.requests), nbytes, seconds)


def _here(model: Any, agreement: Agreement) -> _Here:
    chunks = as_chunks(model)
    coordinates, topology = read_topology(len(chunks))
    return _Here(chunks, coordinates, topology, read_replicas(), agreement)


def _find(here: _Here, path: Path, source: str, ignore: Sequence[str]) -> FolderContents:
    """What rank 0 sees in the folder, on all ranks: of thousands, each would open the same hundreds of files."""

    def work() -> Record:
        if source not in ("shared", "rank0"):
            raise ValueError(f"source is {source!r}: use 'shared' or 'rank0'")
        where = str(path.absolute()) if source == "shared" else None
        return {"path": where, "source": source, "ignore": list(ignore)}

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere(records, "the arguments of load_hf")
        return read_contents(path).to_record()

    record = decide(here.agreement, f"opening {path}", work, combine)
    return FolderContents.from_record(path, record)


# -- plan -------------------------------------------------------------------------------------------------


def _plan_together(here: _Here, contents: FolderContents, source: Source, ignore: Sequence[str], topic: str) -> _Plan:
    plans: list[_Plan] = []

    def work() -> Record:
        if source == "rank0":
            refuse_broadcast(here.chunks, here.replicas, 'source="rank0"')
        plans.append(_plan(here, contents, source, ignore))
        positions = plans[0].catalog.positions
        names = (_stored_name(request, positions) for request in plans[0].requests)
        return {"used": runs(positions[name] for name in names)}

    def combine(records: Sequence[Record]) -> Record:
        _check_all_used(plans[0].catalog, [record["used"] for record in records])
        plans[0].catalog.check_left_out()
        return {}

    decide(here.agreement, topic, work, combine)
    return plans[0]


def _plan(here: _Here, contents: FolderContents, source: Source, ignore: Sequence[str]) -> _Plan:
    refuse_unsupported_model(here.chunks)
    shards = model_shards(here.chunks)
    refuse_unsupported_experts(here.topology, shards)
    catalog = FolderCatalog(contents, ignore)
    _check_config(here, catalog)
    sources = Sources(catalog, here.topology, here.coordinates, catalog.model.sizes["vocab"])
    requests = [
        _request(here, shard, sources, source)
        for shard in shards
        if shard.key.kind == MODEL and not any(catalog.model.ignores(name) for name in synonyms(shard.key.name))
    ]
    if source == "shared":
        catalog.check_visible(read.stored.file for request in requests for read in request.fill.reads)
    return _Plan(catalog, tuple(requests))


def _check_config(here: _Here, catalog: FolderCatalog) -> None:
    """Shapes do not tell how heads are grouped, nor what a model does with its weights."""
    for chunk in here.chunks if catalog.model.architecture.rules else ():
        check_model(unwrap(chunk), catalog.model)


def _request(here: _Here, shard: LocalShard, sources: Sources, source: Source) -> Request:
    catalog = sources.catalog
    assert isinstance(catalog, FolderCatalog)
    wanted = Wanted(shard.key, shard.region, shard.expert, str(catalog.contents.folder))
    if shard.tensor.numel() and not shard.tensor.untyped_storage().nbytes():
        raise UnsupportedError(f"tensor {shard.key} has no memory: it is offloaded; bring the model back first")
    found = sources.find(wanted)
    if found is None:
        raise CheckpointMismatchError(
            f"{wanted.file}: {catalog.model.describe()} has nothing for tensor {shard.key}, "
            f"{shard.region.describe()}{_hint(shard.key.name, catalog)}"
        )
    _check_vocabulary(shard, catalog, here.topology)
    dtype = torch_dtype(found.dtype)
    if not shard.tensor.dtype.is_floating_point:
        raise CheckpointMismatchError(f"{wanted.file}: tensor {shard.key}: is {shard.tensor.dtype} here, {dtype} there")
    fill = TensorFill(found.reads, dtype, lambda: shard.tensor, padded=bool(found.outside))
    replicas = _replicas(here, shard.expert) if source == "rank0" else ()
    return Request(shard.key.name, shard.region, replace(fill, replicas=replicas))


def _replicas(here: _Here, expert: bool) -> tuple[int, ...]:
    return here.replicas.experts if expert and here.topology.experts_apart else here.replicas.dense


def _hint(name: str, catalog: FolderCatalog) -> str:
    if name == MCORE_HEAD and catalog.model.is_tied:
        return ": its embeddings are tied: make the model with share_embeddings_and_output_weights=True"
    return ". Say what may keep its values (ignore)"


def _check_vocabulary(shard: LocalShard, catalog: FolderCatalog, topology: Topology) -> None:
    tokens, rows = catalog.model.sizes["vocab"], shard.region.global_shape[0] if shard.region.global_shape else 0
    if not has_vocabulary_rows(shard.key.name):
        return
    if _first_part(catalog, shard.key.name).region.global_shape[0] == rows:
        return
    if not may_be_padded(tokens, rows, topology.tp):
        raise CheckpointMismatchError(
            f"{catalog.contents.folder}: tensor {shard.key}: {catalog.model.describe()} has {tokens} tokens, this "
            f"model has {rows} rows, which is more than padding for tp = {topology.tp}"
        )


def _stored_name(request: Request, positions: Mapping[str, int]) -> str:
    return next(name for name in synonyms(request.name) if name in positions)


def _check_all_used(catalog: FolderCatalog, used: Sequence[Sequence[tuple[int, int]]]) -> None:
    """What the folder holds and no rank takes would be lost without a word."""
    taken = {at for runs_of_rank in used for first, last in runs_of_rank for at in range(first, last + 1)}
    left = [name for name, position in catalog.positions.items() if position not in taken]
    if left:
        stored = _first_part(catalog, left[0])
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise CheckpointMismatchError(
            f"{catalog.contents.folder / stored.file}: {catalog.model.describe()} has tensor {left[0]}, "
            f"{stored.region.describe()}{more}, which no rank of this model wants. Say what to leave out (ignore)"
        )


def _first_part(catalog: FolderCatalog, name: str) -> StoredShard:
    key = ShardKey(name, MODEL)
    return catalog.shards(key, catalog.files(key))[0]


# -- apply ------------------------------------------------------------------------------------------------


def _apply_together(here: _Here, plan: _Plan, source: Source) -> int:
    nbytes: list[int] = []
    shared: list[Batch] = []

    def fill() -> Record:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what still uses the old weights must not meet the new ones
        with torch.no_grad():
            shared.extend(batches(plan.fills))
            nbytes.append(_fill(here, plan, shared, source))
        return {}

    def look() -> Record:
        _refuse_nan(plan)
        return {}

    topic = f"loading {plan.catalog.contents.folder}"
    try:
        decide(here.agreement, topic, fill, lambda _: {})
        broadcast(shared, here.replicas)
        decide(here.agreement, topic, look, lambda _: {})
    except CheckpointError as error:
        raise type(error)(f"{error}. The model is now undefined: load it again before using it") from error
    return nbytes[0]


def _fill(here: _Here, plan: _Plan, shared: Sequence[Batch], source: Source) -> int:
    if source == "shared":
        return fill_tensors(plan.fills, plan.catalog.read)
    own = {id(fill) for fill in to_read(plan.fills, shared, here.agreement.rank)}
    requests = [request for request in plan.requests if id(request.fill) in own]
    return scatter(plan.catalog, requests, here.agreement.rank, here.agreement.world_size)


def _refuse_nan(plan: _Plan) -> None:
    for request in plan.requests:
        tensor = request.fill.target()
        # The largest of numbers is a number; isnan() of a tensor would take a mask of its size.
        if tensor.numel() and tensor.max().isnan():
            raise CheckpointCorruptError(
                f"{plan.catalog.contents.folder}: tensor {request.name}: is not all numbers (NaN)"
            )
