"""Plans which parts of a HuggingFace folder fill which tensors of this rank's live model."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mcore_ckpt.checkpoint.model_facts import described
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.huggingface.adapter_reader import AdapterReader
from mcore_ckpt.formats.huggingface.reader import FolderContents, HuggingFaceReader
from mcore_ckpt.formats.locate import Locator, Wanted
from mcore_ckpt.load.broadcast import refuse_broadcast
from mcore_ckpt.load.fill import Encode, TensorFill, refuse_freed
from mcore_ckpt.load.quantized_weights import Target, quantized_targets
from mcore_ckpt.load.scatter import Request
from mcore_ckpt.load.together import Runs, names_left_over, positions_taken
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HfTensor, hf_tensors_in
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.stated_facts import IN_CONFIG, check_model, check_rows
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.ranks.topology import RankCoordinates, Replicas, Topology
from mcore_ckpt.sharding.adapter_names import is_adapter
from mcore_ckpt.sharding.counterparts import Layers
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.synonyms import synonyms
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, padding_is_plausible
from mcore_ckpt.state.adapter_settings import adapter_settings, own_adapters
from mcore_ckpt.state.live_facts import read_facts
from mcore_ckpt.state.model import unwrap
from mcore_ckpt.state.optimizer import read_optimizer
from mcore_ckpt.state.shards import LocalShard, ParameterState

logger = logging.getLogger(__name__)

Source = Literal["shared", "rank0"]


@dataclass(frozen=True, eq=False)
class LiveModel:
    """This rank's model, its tensors, coordinates and agreement."""

    chunks: tuple[torch.nn.Module, ...]
    optimizer: Any
    shards: tuple[LocalShard, ...]
    coordinates: RankCoordinates
    topology: Topology
    replicas: Replicas
    agreement: Agreement
    strict_model: bool = False


@dataclass(frozen=True)
class OpenedFolder:
    """Information about the folder and the whole model, equal on all ranks.

    Attributes:
        adapters: the global shapes of the whole model's adapter tensors, by name.
        dtype: the dtype in which quantized tensors of the folder are read; None for the dtype that the folder's
            `config.json` states.
        tower: the names of the vision tower's tensors. Empty if the model has no tower.
    """

    contents: FolderContents
    layers: Layers
    adapters: Mapping[str, Shape]
    dtype: torch.dtype | None
    tower: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class HfPlan:
    """This rank's plan: the reader of the folder, and the tensors to fill, with their regions."""

    locator: Locator
    reader: HuggingFaceReader
    requests: tuple[Request, ...]

    @property
    def fills(self) -> tuple[TensorFill, ...]:
        return tuple(request.fill for request in self.requests)


def plan_weights(here: LiveModel, opened: OpenedFolder, source: Source, ignore: Sequence[str]) -> tuple[HfPlan, Record]:
    """Plans which parts of the folder fill this rank's tensors. Changes nothing.

    `source` and `ignore` are as in `load_hf`. Returns the plan, and a record for `check_all_used` on rank 0. The record
    has, for each tensor that this rank takes, its position in the reader's list of names.

    Raises:
        CheckpointMismatchError: the folder's tensors or configuration do not fit this model.
        CheckpointCorruptError: this rank does not see a file of the folder.
        UnsupportedError: with source="rank0", tensors cannot be broadcast to the replicas of this model.
    """
    if source == "rank0":
        refuse_broadcast(here.chunks, here.replicas, 'source="rank0"')
    if opened.contents.adapter is None:
        left_out = [*ignore, *_hf_names(opened.contents, ignore)]
        reader = HuggingFaceReader(opened.contents, left_out, opened.dtype, opened.tower)
    else:
        reader = AdapterReader(opened.contents, opened.adapters, ignore)
    own = _plan(here, reader, _locator(here, reader, opened.layers), source)
    return own, {"used": positions_taken(own.locator, (shard.key for shard in _taken(here, reader)))}


def _hf_names(contents: FolderContents, ignore: Sequence[str]) -> list[str]:
    """Returns patterns for the HuggingFace tensors that are made only of mcore tensors that `ignore` matches."""
    if not ignore:
        return []
    model = model_from_config(contents.config, tuple(ignore))
    wanted = hf_tensors_in(model, {name: stored.shape for name, stored in contents.tensors.items()})
    return [re.escape(tensor.name) for tensor in wanted if _is_ignored(model, tensor)]


def _is_ignored(model: HfModel, tensor: HfTensor) -> bool:
    own = [slab.mcore for slab in tensor.slabs if slab.mcore]
    return bool(own) and all(any(map(model.ignores, synonyms(name))) for name in own)


def _locator(here: LiveModel, reader: HuggingFaceReader, layers: Layers) -> Locator:
    position = RankPosition(here.topology, here.coordinates)
    # The folder of an adapter has only some modules of each layer. So layers cannot be matched by their parts
    # (attention, MLP). With None, the locator matches layers by number. A layer has the same number in the folder and
    # in the model.
    matched = None if isinstance(reader, AdapterReader) else layers
    return Locator(reader, position, reader.model.sizes["vocab"], matched)


def _plan(here: LiveModel, reader: HuggingFaceReader, locator: Locator, source: Source) -> HfPlan:
    _check_config(here, reader)
    taken = list(_taken(here, reader))
    plain = [shard for shard in taken if not shard.is_quantized]
    requests = [_request(here, Target(shard, shard.region, shard.tensor), locator, reader, source) for shard in plain]
    if len(plain) < len(taken):
        targets = quantized_targets([shard for shard in taken if shard.is_quantized], _states(here))
        # Each rank fills only the main parameters that it owns, so nothing is sent to replicas.
        requests += [_request(here, target, locator, reader, "shared") for target in targets]
    if source == "shared":
        reader.check_visible(read.stored.file for request in requests for read in request.fill.reads)
    return HfPlan(locator, reader, tuple(requests))


def _states(here: LiveModel) -> list[ParameterState] | None:
    if here.optimizer is None:
        return None
    parts = read_optimizer(here.optimizer, here.shards, first_instance=True)
    return [state for states in parts for state in states]


def _taken(here: LiveModel, reader: HuggingFaceReader) -> Iterator[LocalShard]:
    """Yields the tensors of this rank that are to be filled."""
    fills_adapters = isinstance(reader, AdapterReader)
    for shard in here.shards:
        # The folder of an adapter can also have modules that were trained as a whole. Fill these modules, too.
        is_beside = fills_adapters and any(name in reader.names for name in synonyms(shard.key.name))
        if is_adapter(shard.key.name) != fills_adapters and not is_beside:
            continue
        if shard.key.kind == MODEL and not any(reader.model.ignores(name) for name in synonyms(shard.key.name)):
            yield shard


def _check_config(here: LiveModel, reader: HuggingFaceReader) -> None:
    """Compares the configurations, because models with equal shapes can differ in head groups or in the activation."""
    if isinstance(reader, AdapterReader):
        _check_scale(here, reader)
    check_rows(read_facts(here.chunks), reader.model, "in the model")
    for chunk in here.chunks if reader.model.architecture.rules else ():
        changed = check_model(unwrap(chunk), reader.model, here.strict_model)
        if changed and chunk is here.chunks[0] and here.agreement.is_coordinator:
            logger.warning(
                "%s: %s. This is right if the model was built for a longer context. Otherwise, build the model with "
                "the values of config.json",
                reader.place,
                described(changed, IN_CONFIG),
            )


def _check_scale(here: LiveModel, reader: AdapterReader) -> None:
    settings = adapter_settings([own_adapters(here.chunks)])
    if settings is not None and not math.isclose(settings.alpha, reader.alpha, rel_tol=1e-6):
        raise CheckpointMismatchError(
            f"{reader.place}: the adapters in it are scaled by {reader.alpha:g} / rank, but the model's adapters by "
            f"{settings.alpha:g} / rank: give the model adapters with alpha={reader.alpha:g}"
        )


def _request(here: LiveModel, target: Target, locator: Locator, reader: HuggingFaceReader, source: Source) -> Request:
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


def _replicas(here: LiveModel, expert: bool) -> tuple[int, ...]:
    return here.replicas.experts if expert and here.topology.experts_apart else here.replicas.dense


def _hint(name: str, reader: HuggingFaceReader, locator: Locator) -> str:
    ignore = ". List in `ignore` the tensors that may keep their values"
    if locator.layer_mismatch is not None and ".layers." in name:
        return f": {locator.layer_mismatch}{ignore}"
    if name == reader.model.mcore_head and reader.model.is_tied:
        return (
            ": its input and output embeddings are tied: build the model with share_embeddings_and_output_weights=True"
        )
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


def check_all_used(plan: HfPlan, used: Sequence[Runs]) -> None:
    """Raises CheckpointMismatchError on rank 0 if the folder has a tensor that no rank takes.

    `used` has, for each rank, the positions of the tensors that the rank takes (`positions_taken`).
    """
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


def refuse_nan(plan: HfPlan) -> None:
    """Raises CheckpointCorruptError if a tensor that was filled has a NaN."""
    for request in plan.requests:
        if request.fill.encode is None:  # otherwise `_checked` has looked for NaN already
            _refuse_nan_in(request.fill.target(), request.name, plan.reader)


def _refuse_nan_in(tensor: torch.Tensor, name: str, reader: HuggingFaceReader) -> None:
    # Use max(), which is NaN if any element is. isnan() on the whole tensor would allocate a mask of the tensor's size.
    if tensor.numel() and tensor.max().isnan():
        raise CheckpointCorruptError(f"{reader.place}: tensor {name}: contains NaN: take the weights from another copy")


def _checked(encode: Encode | None, name: str, reader: HuggingFaceReader) -> Encode | None:
    """Returns a function that looks for NaN before it quantizes, because some quantized forms cannot keep a NaN."""
    if encode is None:
        return None

    def checked(values: torch.Tensor) -> None:
        _refuse_nan_in(values, name, reader)
        encode(values)

    return checked
