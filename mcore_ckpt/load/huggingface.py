"""Loads a HuggingFace model into a live sharded model. Each rank reads its own slices, or gets them from rank 0."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_ckpt.checkpoint.model_facts import described
from mcore_ckpt.config import TIMEOUT_S
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    InvalidArgumentError,
    reworded,
)
from mcore_ckpt.field_checks import check_value
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.huggingface.adapter_reader import AdapterReader, is_adapter_folder, read_adapter_contents
from mcore_ckpt.formats.huggingface.hub import find_folder_together
from mcore_ckpt.formats.huggingface.hub_names import with_revision
from mcore_ckpt.formats.huggingface.reader import FolderContents, HuggingFaceReader, read_contents
from mcore_ckpt.formats.locate import Locator, Wanted
from mcore_ckpt.io.disk_watch import DiskWatch
from mcore_ckpt.load.broadcast import refuse_broadcast
from mcore_ckpt.load.fill import Encode, TensorFill, fill_tensors, refuse_freed
from mcore_ckpt.load.quantized_weights import Target, quantized_targets
from mcore_ckpt.load.scatter import Request, scatter
from mcore_ckpt.load.together import Runs, fill_together, names_left_over, plan_together, positions_taken
from mcore_ckpt.models.accounting import LeftOut
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HfTensor, hf_tensors_in
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.stated_facts import IN_CONFIG, check_model, check_rows
from mcore_ckpt.ranks.meeting import rendezvous
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.ranks.topology import RankCoordinates, Replicas, Topology, read_replicas, read_topology
from mcore_ckpt.sharding.adapter_names import is_adapter
from mcore_ckpt.sharding.counterparts import Layers
from mcore_ckpt.sharding.patterns import compiled
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.synonyms import synonyms
from mcore_ckpt.sharding.towers import in_tower
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, padding_is_plausible
from mcore_ckpt.state.adapter_settings import adapter_settings, own_adapters
from mcore_ckpt.state.live_facts import read_facts
from mcore_ckpt.state.main_weights import write_weights
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
from mcore_ckpt.state.optimizer import follow_model, read_optimizer
from mcore_ckpt.state.quantized import has_quantized
from mcore_ckpt.state.shards import LocalShard, ParameterState
from mcore_ckpt.state.thread_settings import gpu_of, settings_for_state, settings_here
from mcore_ckpt.state.unsupported import (
    refuse_missing_layers,
    refuse_quantized_without_mains,
    refuse_unsupported_experts,
    refuse_unsupported_model,
)
from mcore_ckpt.urls import local_path

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
        left_out: what was not read of the folder, by reason.
    """

    path: Path
    model: str
    tensors: int
    nbytes: int
    seconds: float
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, eq=False)
class _Here:
    """This rank's model, its tensors, coordinates and agreement."""

    chunks: tuple[torch.nn.Module, ...]
    optimizer: Any
    shards: tuple[LocalShard, ...]
    coordinates: RankCoordinates
    topology: Topology
    replicas: Replicas
    agreement: Agreement
    strict_model: bool = False


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
    revision: str | None = None,
    source: Source = "shared",
    ignore: Sequence[str] = (),
    optimizer: Any = None,
    base: str | Path | None = None,
    strict_model: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> HfLoadReport:
    """Fills a live megatron-core model with the weights of a HuggingFace folder, or of a model on the HuggingFace hub.

    Every rank calls it.

    Either initialize megatron's `parallel_state`, or build the model with a `pg_collection`, even in a single process.
    Without one of them megatron neither builds a GPTModel nor knows which part of a tensor a rank holds.

    Each rank reads only the slices that it holds, under any layout, directly into its parameters. Rows that pad the
    vocabulary become zero. Weights of another floating-point dtype are converted through a limited amount of memory,
    and so are quantized ones. transformer-engine's `_extra_state` keeps its value.

    In a model with LoRA adapters (Megatron-Bridge's LoRA, CanonicalLoRA, DoRA), the folder of a model fills everything
    but the adapters, which keep their values. The folder of an adapter in PEFT's form (`adapter_config.json`,
    `adapter_model.safetensors`) fills the adapters, and the modules that were trained as a whole beside them.

    Before a byte changes, all ranks check names and shapes and agree on the result. Each rank looks for NaN only
    afterwards, in the tensors that it has filled, because otherwise it would have to read every file twice.

    The optimizer's main parameters are still copies of the old weights, and its next step would write them over the new
    weights. To prevent this, pass the optimizer here, or call its `reload_model_params()` afterwards. With quantized
    weights (FP8), only the former does: their main parameters get the values of the folder.

    Args:
        model: a megatron-core model or the list of its virtual chunks, bare or wrapped in DistributedDataParallel.
        path: the folder, which has `config.json` and one or several `.safetensors` files; or the folder of an adapter.
            If there is no such folder, the name of a model on the HuggingFace hub ("owner/name" or
            "owner/name@revision"), of which one rank of each node downloads what is not in the cache.
        revision: the revision of a model on the hub: a branch, a tag or a commit. None: the main branch.
        source: "shared": every rank reads the folder. "rank0": only rank 0 reads the folder, and sends each rank its
            part in messages of limited size. If several replicas need the same part, one of them gets it and broadcasts
            it to the others. If the model is on the hub, only rank 0 downloads it.
        ignore: regular expressions for names of tensors that may have no counterpart, by HuggingFace's names or by
            megatron's global names. HuggingFace tensors with such a name are not read, and the model's tensors with
            such a name keep their values. To start a critic from a language model, pass `("lm_head.weight",
            "output_layer.weight")`.
        optimizer: the object that `get_megatron_optimizer` returned. Its main parameters are copied from the loaded
            model.
        base: the folder with the `config.json` of an adapter's base model, or the base model's name on the hub. None:
            what `adapter_config.json` names. Not needed for the folder of a model.
        strict_model: whether rotary base and scaling, YaRN among them, which a longer context changes on purpose, must
            be those of `config.json`, too. If not, a difference is named in a warning. Other differences are always
            refused.
        timeout_s: how long this rank waits for other ranks before it gives up, in seconds. A rank that waits for a
            download waits DOWNLOAD_TIMEOUT_S.

    Returns:
        The report of this rank.

    Raises:
        CheckpointNotFoundError: the folder does not exist, or has no weights, or neither the hub nor, without a
            connection to the hub, the cache has the model.
        RemoteError: the hub does not answer, refuses access, or answers with an error.
        CheckpointMismatchError: the folder's tensors or configuration do not fit this model. All ranks raise it, and
            nothing has changed.
        UnsupportedError: the architecture is not supported, the weights are quantized in an unknown form, the model has
            a part that is not supported, or there is no process group.
        InvalidStateError: there is a process group, but the model has no `pg_collection`, and megatron's
            `parallel_state` is not initialized.
        CheckpointCorruptError: a file is incomplete or cannot be read, or a weight is NaN. The message says whether the
            model has changed.

    Example:
        >>> load_hf(model, "Qwen/Qwen3-8B", optimizer=optimizer)  # doctest: +SKIP
    """
    started = time.monotonic()
    check_value("timeout_s", timeout_s, float, {"above": 0})
    topic = f"checking {path}"
    with closing(rendezvous("load_hf", timeout_s, f"loading {path}")) as agreement, agreement.call(topic):
        check_value("strict_model", strict_model, bool)
        compiled(ignore)
        if base is not None:
            local_path(base, "base")
        local_path(path, "path")
        here = replace(_here(model, optimizer, agreement), strict_model=strict_model)
        name = with_revision(path, revision)
        gpu = gpu_of(here.chunks)
        settings = partial(settings_here, gpu, timeout_s)
        agreement.runner = DiskWatch.of_one_call(timeout_s, agreement.rank, settings)
        with settings_for_state(gpu, timeout_s):
            path = find_folder_together(agreement, name, "model", everywhere=source != "rank0")
            # Of a model on the hub each node may have the copy in another place.
            same = str(path.absolute()) if path == Path(name) else name
            arguments = {
                "path": None if source == "rank0" else same,
                "source": source,
                "ignore": list(ignore),
                "base": None if base is None else str(base),
                "strict_model": strict_model,
            }
            base = None if base is None else find_folder_together(agreement, base, "config", everywhere=False)
            opened = _open_together(here, path, arguments, base)
            plan = _plan_together(here, opened, source, ignore, topic)
            nbytes = _apply_together(here, plan, source)
            if optimizer is not None:
                follow_model(optimizer)
                if has_quantized(here.chunks):
                    write_weights(here.chunks, optimizer)
            seconds = time.monotonic() - started
            model_read, left_out = plan.reader.model.describe(), plan.reader.left_out
            return HfLoadReport(path, model_read, len(plan.requests), nbytes, seconds, left_out)


def _here(model: Any, optimizer: Any, agreement: Agreement) -> _Here:
    chunks = as_chunks(model)
    check_megatron()
    groups = process_groups_of(chunks)
    coordinates, topology = read_topology(groups, len(chunks))
    replicas = read_replicas(groups)
    refuse_unsupported_model(chunks, replicas.groups)
    if optimizer is not None:
        refuse_quantized_without_mains(optimizer, chunks)
    shards = tuple(model_shards(chunks))
    refuse_unsupported_experts(topology, shards)
    return _Here(chunks, optimizer, shards, coordinates, topology, replicas, agreement)


@dataclass(frozen=True)
class _Opened:
    """What all ranks know of the folder and of the whole model.

    Attributes:
        contents: the folder's headers.
        layers: the layers of the whole model.
        adapters: the shapes of the tensors of the whole model's adapters.
        dtype: the dtype that quantized tensors of the folder get; None for the one that its `config.json` states.
        tower: the names of the tensors of the model's vision tower. Empty if it has none.
    """

    contents: FolderContents
    layers: Layers
    adapters: Mapping[str, Shape]
    dtype: torch.dtype | None
    tower: tuple[str, ...]


def _open_together(here: _Here, path: Path, arguments: Record, base: Path | None) -> _Opened:
    """Reads the folder's headers on rank 0 and sends them to all ranks, so that only rank 0 opens every file.

    The `arguments` of load_hf must be the same on all ranks.
    """

    def work() -> Record:
        if arguments["source"] not in ("shared", "rank0"):
            raise InvalidArgumentError(f"source is {arguments['source']!r}: use 'shared' or 'rank0'")
        own = own_layers(here.shards, here.coordinates)
        return {"arguments": arguments, "float32": _keeps_float32(here), "adapters": _own_adapters(here), **own}

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere([record["arguments"] for record in records], "the arguments of load_hf")
        layers = whole_layers(records)
        refuse_missing_layers(here.chunks, layers)
        adapters = dict(item for record in records for item in record["adapters"])
        is_adapter_alone = is_adapter_folder(path)
        contents = read_adapter_contents(path, base) if is_adapter_alone else read_contents(path)
        return {
            **contents.to_record(),
            "layers": list(layers.items()),
            "adapters": list(adapters.items()),
            "float32": any(record["float32"] for record in records),
            "tower": [name for record in records for name in record["others"] if in_tower(name)],
        }

    record = decide(here.agreement, f"opening {path}", work, combine)
    adapters = {name: tuple(shape) for name, shape in record["adapters"]}
    dtype = torch.float32 if record["float32"] else None
    contents, tower = FolderContents.from_record(path, record), tuple(record["tower"])
    return _Opened(contents, whole_layers([record]), adapters, dtype, tower)


def _keeps_float32(here: _Here) -> bool:
    """Returns True if values of float32 stay so here: in float32 weights, or in main parameters of quantized ones."""
    dtypes = {parameter.dtype for chunk in here.chunks for parameter in chunk.parameters()}
    return has_quantized(here.chunks) or dtypes == {torch.float32}


def _own_adapters(here: _Here) -> list[tuple[str, Shape]]:
    """Returns the names and the global shapes of the tensors of this rank's adapters. One of their replicas tells."""
    apart, rank = here.topology.experts_apart, here.agreement.rank
    return [
        (shard.key.name, shard.region.global_shape)
        for shard in here.shards
        if is_adapter(shard.key.name)
        and shard.key.kind == MODEL
        and rank == (here.replicas.experts if apart and shard.expert else here.replicas.dense)[0]
    ]


# -- plan -------------------------------------------------------------------------------------------------


def _plan_together(here: _Here, opened: _Opened, source: Source, ignore: Sequence[str], topic: str) -> _Plan:
    def plan() -> tuple[_Plan, Record]:
        if source == "rank0":
            refuse_broadcast(here.chunks, here.replicas, 'source="rank0"')
        if opened.contents.adapter is None:
            left_out = [*ignore, *_hf_names(opened.contents, ignore)]
            reader = HuggingFaceReader(opened.contents, left_out, opened.dtype, opened.tower)
        else:
            reader = AdapterReader(opened.contents, opened.adapters, ignore)
        own = _plan(here, reader, _locator(here, reader, opened.layers), source)
        return own, {"used": positions_taken(own.locator, (shard.key for shard in _taken(here, reader)))}

    def check(own: _Plan, reports: Sequence[Record]) -> Record:
        _check_all_used(own, [report["used"] for report in reports])
        own.reader.check_left_out()
        return {}

    return plan_together(here.agreement, topic, plan, check)[0]


def _hf_names(contents: FolderContents, ignore: Sequence[str]) -> list[str]:
    """Returns the HuggingFace tensors to leave out because megatron's names of all their parts match, as patterns."""
    if not ignore:
        return []
    model = model_from_config(contents.config, tuple(ignore))
    wanted = hf_tensors_in(model, {name: stored.shape for name, stored in contents.tensors.items()})
    return [re.escape(tensor.name) for tensor in wanted if _is_ignored(model, tensor)]


def _is_ignored(model: HfModel, tensor: HfTensor) -> bool:
    own = [slab.mcore for slab in tensor.slabs if slab.mcore]
    return bool(own) and all(any(map(model.ignores, synonyms(name))) for name in own)


def _locator(here: _Here, reader: HuggingFaceReader, layers: Layers) -> Locator:
    position = RankPosition(here.topology, here.coordinates)
    # The layers of a folder with adapters have other parts than those of the model, but the same numbers.
    matched = None if isinstance(reader, AdapterReader) else layers
    return Locator(reader, position, reader.model.sizes["vocab"], matched)


def _plan(here: _Here, reader: HuggingFaceReader, locator: Locator, source: Source) -> _Plan:
    _check_config(here, reader)
    taken = list(_taken(here, reader))
    plain = [shard for shard in taken if not shard.is_quantized]
    requests = [_request(here, Target(shard, shard.region, shard.tensor), locator, reader, source) for shard in plain]
    if len(plain) < len(taken):
        targets = quantized_targets([shard for shard in taken if shard.is_quantized], _states(here))
        # Of main parameters, each rank fills what it owns, and not what replicas own, too.
        requests += [_request(here, target, locator, reader, "shared") for target in targets]
    if source == "shared":
        reader.check_visible(read.stored.file for request in requests for read in request.fill.reads)
    return _Plan(locator, reader, tuple(requests))


def _states(here: _Here) -> list[ParameterState] | None:
    if here.optimizer is None:
        return None
    parts = read_optimizer(here.optimizer, here.shards, first_instance=True)
    return [state for states in parts for state in states]


def _taken(here: _Here, reader: HuggingFaceReader) -> Iterator[LocalShard]:
    """Yields the tensors of this rank that are to be filled."""
    fills_adapters = isinstance(reader, AdapterReader)
    for shard in here.shards:
        # The folder of an adapter can have modules that were trained as a whole.
        is_beside = fills_adapters and any(name in reader.names for name in synonyms(shard.key.name))
        if is_adapter(shard.key.name) != fills_adapters and not is_beside:
            continue
        if shard.key.kind == MODEL and not any(reader.model.ignores(name) for name in synonyms(shard.key.name)):
            yield shard


def _check_config(here: _Here, reader: HuggingFaceReader) -> None:
    """Compares the configurations. Models with equal shapes can differ in the grouping of heads or the activation."""
    if isinstance(reader, AdapterReader):
        _check_scale(here, reader)
    check_rows(read_facts(here.chunks), reader.model, "in the model")
    for chunk in here.chunks if reader.model.architecture.rules else ():
        changed = check_model(unwrap(chunk), reader.model, here.strict_model)
        if changed and chunk is here.chunks[0] and here.agreement.is_coordinator:
            logger.warning(
                "%s: %s. A longer context changes this on purpose; anything else should not",
                reader.place,
                described(changed, IN_CONFIG),
            )


def _check_scale(here: _Here, reader: AdapterReader) -> None:
    settings = adapter_settings([own_adapters(here.chunks)])
    if settings is not None and not math.isclose(settings.alpha, reader.alpha, rel_tol=1e-6):
        raise CheckpointMismatchError(
            f"{reader.place}: its adapters are scaled by {reader.alpha:g} / rank, but those of the model by "
            f"{settings.alpha:g} / rank: give the model adapters with alpha={reader.alpha:g}"
        )


def _request(here: _Here, target: Target, locator: Locator, reader: HuggingFaceReader, source: Source) -> Request:
    shard = target.shard
    wanted = Wanted(shard.key, target.region, str(reader.place))
    if target.encode is None:
        refuse_freed(shard.key, target.tensor, "load_hf()")
    found = locator.find(wanted)
    stored = locator.stored_key(shard.key)
    if found is None or stored is None:
        raise CheckpointMismatchError(
            f"{wanted.file}: {reader.model.describe()} has nothing for tensor {shard.key}, "
            f"{target.region.describe()}{_hint(shard.key.name, reader, locator)}"
        )
    _check_vocabulary(shard, reader, here.topology)
    if not shard.tensor.dtype.is_floating_point:
        raise CheckpointMismatchError(
            f"{wanted.file}: tensor {shard.key}: has dtype {shard.tensor.dtype} in the model, but {found.dtype} in the "
            "folder: only floating-point tensors can be loaded"
        )
    replicas = _replicas(here, shard.expert) if source == "rank0" else ()
    fill = TensorFill(
        found.reads,
        found.dtype,
        lambda: target.tensor,
        padded=bool(found.outside),
        encode=_checked(target.encode, stored.name, reader),
        replicas=replicas,
    )
    return Request(stored.name, target.region, fill)


def _replicas(here: _Here, expert: bool) -> tuple[int, ...]:
    return here.replicas.experts if expert and here.topology.experts_apart else here.replicas.dense


def _hint(name: str, reader: HuggingFaceReader, locator: Locator) -> str:
    ignore = ". List in `ignore` the tensors that may keep their values"
    if locator.layer_mismatch is not None and ".layers." in name:
        return f": {locator.layer_mismatch}{ignore}"
    if name == reader.model.mcore_head and reader.model.is_tied:
        return ": its embeddings are tied: build the model with share_embeddings_and_output_weights=True"
    return ignore


def _check_vocabulary(shard: LocalShard, reader: HuggingFaceReader, topology: Topology) -> None:
    tokens, rows = reader.model.sizes["vocab"], shard.region.global_shape[0] if shard.region.global_shape else 0
    stored = reader.info(shard.key)
    if not has_vocabulary_rows(shard.key.name) or (stored is not None and stored.shape[0] == rows):
        return
    if not padding_is_plausible(tokens, rows, topology.tp):
        raise CheckpointMismatchError(
            f"{reader.place}: tensor {shard.key}: {reader.model.describe()} has {tokens} tokens, but this model has "
            f"{rows} rows, which padding for tp = {topology.tp} does not explain"
        )


def _check_all_used(plan: _Plan, used: Sequence[Runs]) -> None:
    left = names_left_over(plan.locator, used)
    if left:
        stored = plan.reader.parts_of(left[0])[0]
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        layers = "" if plan.locator.layer_mismatch is None else f" ({plan.locator.layer_mismatch})"
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
        raise reworded(error, f"{error}. The model is now undefined: load it again before using it") from error
    return nbytes


def _refuse_nan(plan: _Plan) -> None:
    for request in plan.requests:
        if request.fill.encode is None:  # otherwise `_checked` has looked
            _refuse_nan_in(request.fill.target(), request.name, plan.reader)


def _refuse_nan_in(tensor: torch.Tensor, name: str, reader: HuggingFaceReader) -> None:
    # max() of a tensor with NaN is NaN. isnan() on the whole tensor would allocate a mask of the tensor's size.
    if tensor.numel() and tensor.max().isnan():
        raise CheckpointCorruptError(f"{reader.place}: tensor {name}: contains NaN: take the weights from another copy")


def _checked(encode: Encode | None, name: str, reader: HuggingFaceReader) -> Encode | None:
    """Returns the function that looks for NaN in values before it quantizes them. Not all forms have a NaN."""
    if encode is None:
        return None

    def checked(values: torch.Tensor) -> None:
        _refuse_nan_in(values, name, reader)
        encode(values)

    return checked
