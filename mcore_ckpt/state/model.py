"""Turns model chunks into named shards.

The regions come from megatron's own `sharded_state_dict`, and the names from the modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mcore_ckpt.errors import InvalidTypeError, UnsupportedError
from mcore_ckpt.ranks.process_groups import ProcessGroups, find_process_groups
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.ranks.topology import RankCoordinates
from mcore_ckpt.sharding.adapter_names import (
    PeftMatrix,
    is_adapter,
    is_magnitude,
    peft_matrix,
    permuted_in_bridge,
    without_peft,
)
from mcore_ckpt.sharding.counterparts import Layers, layers_of
from mcore_ckpt.sharding.names import ChunkNames, ExpertNumbers, LayerNumber, expert_of, is_expert
from mcore_ckpt.sharding.pipeline import StageLayers
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, ShardKey
from mcore_ckpt.sharding.regions import Piece, Region
from mcore_ckpt.sharding.towers import LANGUAGE_MODEL, in_tower, split_language_model
from mcore_ckpt.state.shards import LocalShard

EXTRA_STATE = "_extra_state"
_IN_LAYER = re.compile(r"\blayers\.\d+\.")
_EMBEDDING = "embedding.word_embeddings.weight"


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside wrappers that keep it as `module`, such as DistributedDataParallel and Float16Module.

    HuggingFace's `PeftModel` has no `module`, so its model comes from `get_base_model()`. Layers that PEFT has wrapped
    stay wrapped.
    """
    while (inner := _inside(chunk)) is not None:
        chunk = inner
    return chunk


def _inside(wrapper: Any) -> torch.nn.Module | None:
    inner = getattr(wrapper, "module", None)
    if not isinstance(inner, torch.nn.Module) and hasattr(wrapper, "peft_config"):
        # The model inside a PeftModel also has `peft_config`, but no `get_base_model`.
        inner = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else None
    return inner if isinstance(inner, torch.nn.Module) else None


def language_model_of(module: Any) -> Any:
    """Returns the language model inside an unwrapped vision-language model. Returns any other module unchanged.

    Megatron-Bridge and mbridge build a module that has a `vision_model` (or `visual`) and a `language_model`.
    """
    inner = getattr(module, "language_model", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def as_chunks(model: Any) -> tuple[torch.nn.Module, ...]:
    """Returns a model, or a list of chunks, as a tuple of chunks. Raises InvalidTypeError for anything else."""
    chunks = tuple(model) if isinstance(model, (list, tuple, torch.nn.ModuleList)) else (model,)
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module) or not hasattr(unwrap(chunk), "sharded_state_dict"):
            raise InvalidTypeError(
                f"model is or contains a {type(chunk).__name__}: pass a megatron-core model or a list of its chunks"
            )
    if not chunks:
        raise InvalidTypeError("model is an empty list: pass a megatron-core model or a list of its chunks")
    return chunks


def has_weights_on_gpu(chunks: Sequence[torch.nn.Module]) -> bool:
    """Returns True if any parameter is on a GPU."""
    with torch._C.DisableTorchFunction():  # otherwise a TorchFunctionMode would be called for each parameter
        return any(parameter.is_cuda for chunk in chunks for parameter in chunk.parameters())


def process_groups_of(model: Any) -> ProcessGroups | None:
    """Returns the process groups that a model was built with; None if torch.distributed is not initialized.

    Args:
        model: a megatron-core model or the list of its virtual chunks, bare or wrapped.

    Raises:
        InvalidStateError: the model has no `pg_collection`, and megatron's `parallel_state` is not initialized.
        UnsupportedError: the model's `pg_collection` lacks a group.
    """
    return _groups_of(unwrap(as_chunks(model)[0]))


def _groups_of(module: torch.nn.Module) -> ProcessGroups | None:
    # Megatron-Bridge's Qwen25VLModel keeps the collection only in the language model.
    has_own = getattr(module, "pg_collection", None) is not None
    return find_process_groups(module if has_own else language_model_of(module))


def sync_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Completes parameters that are only partly up to date.

    With `overlap_param_gather`, `optimizer.step()` updates only a rank's own shard of each bucket. Hooks of the next
    forward pass gather the other shards (DistributedDataParallel, 0.16.1). This function gathers the other shards
    immediately. All data-parallel ranks must call this function together.
    """
    gather_parameters([c for c in chunks if getattr(getattr(c, "ddp_config", None), "overlap_param_gather", False)])


def gather_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Fills this rank's parameters with the shards that other ranks own.

    All data-parallel ranks must call this function together.
    """
    for chunk in chunks:
        config = getattr(chunk, "ddp_config", None)
        # Since 0.17, layer-wise optimizers without a parameter layout overlap the gathering even without
        # use_distributed_optimizer. In 0.16, all layer-wise optimizers ignore overlap_param_gather, and gather in their
        # step.
        overlaps = getattr(config, "overlap_param_gather", False) and _gathers_layers(chunk)
        if config is not None and (config.use_distributed_optimizer or overlaps):
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def _gathers_layers(chunk: Any) -> bool:
    return any(hasattr(bucket, "layerwise_params_list") for buffer in ddp_buffers(chunk) for bucket in buffer.buckets)


def gradients_share_memory(chunks: Sequence[torch.nn.Module]) -> bool:
    """Returns True if parameters and gradients share memory, so that the next backward pass overwrites parameters.

    DistributedDataParallel (0.16.1) shares this memory if `reuse_grad_buf_for_mxfp8_param_ag` is set.
    """
    for chunk in chunks:
        for buffer in ddp_buffers(chunk):
            if buffer.param_data is not None and _start(buffer.param_data) == _start(buffer.grad_data):
                return True
    return False


def forget_caches(chunks: Sequence[torch.nn.Module]) -> None:
    """Drops values that modules have computed from the old weights, after a load has replaced the weights.

    MambaMixer (0.18) keeps -exp(A_log) for decoding, and computes this value anew only after a call of `train()`.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "_A_neg_exp_cache_stale"):
                vars(module)["_A_neg_exp_cache_stale"] = True


def ddp_buffers(chunk: Any) -> list[Any]:
    """Returns the buffers in which DistributedDataParallel keeps the trainable parameters."""
    return [*_listed(chunk, "buffers"), *_listed(chunk, "expert_parallel_buffers")]


def _listed(chunk: Any, name: str) -> list[Any]:
    # Every torch module has a method `buffers`. DistributedDataParallel has a list of buffers in place of the method.
    # So a module that still has the method has no such list.
    found = getattr(chunk, name, ())
    return [] if callable(found) else list(found)


def _start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def chunk_layers(chunk: torch.nn.Module) -> StageLayers:
    """Reads which layers a chunk holds. The chunk can be bare or wrapped."""
    numbers = chunk_names(unwrap(chunk)).layers
    decoder, mtp = (
        tuple(sorted(layer.number for layer in numbers if split_language_model(layer.list_name)[1] == name))
        for name in ("decoder.layers", "mtp.layers")
    )
    return StageLayers(decoder, mtp)


def chunk_names(module: torch.nn.Module) -> ChunkNames:
    """Reads an unwrapped chunk's layer and expert numbers, which make the names of the chunk's tensors global.

    `layer_number` starts at 1 and counts over the whole model, however megatron splits the layers. The position in the
    ModuleList starts at 0 in each chunk. The layers of a vision tower are numbered by their positions, because the
    pipeline does not divide a tower.
    """
    layers, experts = [], []
    for path, child in module.named_modules():
        list_name, _, position = path.rpartition(".")
        number = getattr(child, "layer_number", None)
        is_in_list = list_name.split(".")[-1] == "layers" and position.isdigit() and not in_tower(path)
        if is_in_list and isinstance(number, int):
            layers.append(LayerNumber(list_name, int(position), number - 1))
        count = getattr(child, "num_local_experts", None)
        if path.endswith(".experts") and isinstance(count, int):
            experts.append(ExpertNumbers(path, child.ep_group.rank() * count, count))
    return ChunkNames(tuple(layers), tuple(experts))


def own_layers(shards: Sequence[LocalShard], coordinates: RankCoordinates) -> Record:
    """Returns which parts this rank's layers have, as JSON values. All ranks of a stage except one return empty lists.

    `whole_layers` joins the records of all ranks. The record also lists the parameters that are in no numbered layer.
    """
    at = coordinates
    if (at.tp, at.cp, at.dp) != (0, 0, 0):
        return {"layers": [], "others": []}
    names = [shard.key.name for shard in shards if not shard.is_buffer and not shard.replica]
    return {
        "layers": list(layers_of(shard.key.name for shard in shards).items()),
        "others": [name for name in names if in_tower(name) or not _IN_LAYER.search(name)],
    }


def whole_layers(records: Iterable[Record]) -> Layers:
    """Returns which parts each layer of the model has, from the `own_layers` of all ranks."""
    return {layer: tuple(parts) for record in records for layer, parts in record["layers"]}


def model_shards(chunks: Sequence[torch.nn.Module]) -> list[LocalShard]:
    """Returns all parameters, persistent buffers and `_extra_state`s of this rank as live tensors.

    Nothing is copied or communicated.

    Raises UnsupportedError: megatron does not provide the place of a tensor in its global tensor, two chunks have the
    same tensor, or an `_extra_state` is not a uint8 tensor.
    """
    shards: list[LocalShard] = []
    seen: dict[ShardKey, str] = {}
    for number, chunk in enumerate(chunks):
        for shard in _read_chunk(unwrap(chunk)):
            # A tied copy of a tensor in another chunk of this rank is allowed: the copy is loaded, but not stored.
            if shard.key in seen and not shard.replica:
                raise UnsupportedError(f"tensor {shard.key} is in chunk {seen[shard.key]} and again in chunk {number}")
            seen.setdefault(shard.key, str(number))
            shards.append(shard)
    return shards


def _read_chunk(module: torch.nn.Module) -> Iterator[LocalShard]:
    names = chunk_names(module)
    # Without this flag, TransformerBlock.sharded_state_dict (0.16.1) turns the layer number into an axis.
    sharded = sharded_state_dict(module, non_homogeneous_layers=True)
    owners = dict(module.named_modules(remove_duplicate=False))
    for local_name, value in module.state_dict(keep_vars=True).items():
        if value is None:
            continue
        try:
            name = names.to_global(without_peft(local_name))
        except ValueError as error:
            raise UnsupportedError(str(error)) from None
        if local_name.endswith(EXTRA_STATE):
            owner = owners[local_name.removesuffix(EXTRA_STATE).rstrip(".")]
            yield _opaque_shard(name, value, _below_adapter(owner))
        else:
            shard = _tensor_shard(name, value, sharded.get(local_name))
            yield _in_order_of_weight(shard, sharded, local_name)


def _in_order_of_weight(shard: LocalShard, sharded: Mapping[str, Any], local_name: str) -> LocalShard:
    """Returns the shard of an adapter's tensor with the region that follows from the layer's weight.

    Any other shard is returned unchanged. Megatron-Bridge and ROLL give some tensors of adapters a region that does not
    match the weight. Megatron-Bridge permutes rows (see `permuted_in_bridge`). ROLL (2026-08) places the rows of B of
    `linear_fc1` as if the weight did not have two halves.
    """
    if (matrix := peft_matrix(local_name)) is not None:
        return _cut_like_weight(shard, sharded, matrix)
    if is_magnitude(local_name):
        return _with_rows_of_weight(shard, sharded, local_name.partition(".adapter.")[0] + ".weight")
    if permuted_in_bridge(local_name) == "component":  # rows of the gate alone or of up alone, in equal parts
        (first, *_), shape = shard.region.pieces, shard.region.local_shape
        start = 2 * first.global_offset[0] if len(shard.region.pieces) > 1 else first.global_offset[0]
        piece = Piece((0, 0), shape, (start, 0))
        return replace(shard, region=Region(shard.region.global_shape, shape, (piece,), shard.region.flat))
    return shard


def _cut_like_weight(shard: LocalShard, sharded: Mapping[str, Any], matrix: PeftMatrix) -> LocalShard:
    """Returns the shard of PEFT's matrix A or B, with a region that matches the layer's weight.

    B has the rows of the layer's weight, and A has the weight's columns.
    """
    weight = _region(matrix.weight, sharded[matrix.weight].data, sharded[matrix.weight])
    axis = 1 if matrix.is_a else 0
    rank = shard.tensor.shape[1 - axis]

    def along(lengths: tuple[int, ...], other: int) -> tuple[int, int]:
        return (other, lengths[1]) if matrix.is_a else (lengths[0], other)

    # The halves of a gated linear unit have the same columns, so A has the same piece for each half. Keep this piece
    # only once.
    pieces = dict.fromkeys(
        Piece(along(piece.local_offset, 0), along(piece.shape, rank), along(piece.global_offset, 0))
        for piece in weight.pieces
    )
    local_shape = along(weight.local_shape, rank)
    if local_shape != tuple(shard.tensor.shape):
        raise UnsupportedError(
            f"tensor {shard.key}: has shape {list(shard.tensor.shape)} on this rank, but its layer's weight has "
            f"{list(weight.local_shape)}: the adapter is not cut as the weight is"
        )
    region = Region(along(weight.global_shape, rank), local_shape, tuple(pieces), Region.whole(local_shape).flat)
    return replace(shard, region=region)


def _with_rows_of_weight(shard: LocalShard, sharded: Mapping[str, Any], weight: str) -> LocalShard:
    """Returns the shard of a magnitude, which has one element for each row of the weight.

    Raises UnsupportedError: tensor parallelism cuts the weight's columns. Megatron-Bridge (0.6) then computes each
    magnitude from this rank's part of a row alone, so the magnitudes differ between ranks.
    """
    rows = _region(weight, sharded[weight].data, sharded[weight])
    if rows.local_shape[1:] != rows.global_shape[1:]:
        raise UnsupportedError(
            f"tensor {shard.key}: DoRA of a row-parallel layer has different magnitudes on each tensor-parallel rank "
            "(Megatron-Bridge): leave linear_proj and linear_fc2 out of target_modules, or use TP = 1"
        )
    pieces = tuple(Piece(p.local_offset[:1], p.shape[:1], p.global_offset[:1]) for p in rows.pieces)
    return replace(shard, region=Region(rows.global_shape[:1], rows.local_shape[:1], pieces, (0, rows.local_shape[0])))


def _below_adapter(owner: torch.nn.Module) -> torch.nn.Module:
    """Returns the layer inside an `AdapterWrapper` of Megatron-Bridge.

    `state_dict` lists the layer's `_extra_state` under the wrapper's name, but only the layer can read and restore it.
    """
    while type(owner).get_extra_state is torch.nn.Module.get_extra_state and hasattr(owner, "to_wrap"):
        owner = owner.to_wrap  # type: ignore[assignment]
    return owner


def sharded_state_dict(module: torch.nn.Module, **flags: Any) -> dict[str, Any]:
    """Returns megatron's ShardedTensors and ShardedTensorFactories of an unwrapped model, by local name.

    `flags` are the `metadata` for megatron's function. Raises UnsupportedError: megatron's own function fails.
    """
    groups = _groups_of(module)
    # Without this group megatron asks parallel_state, which may be uninitialized (ensure_metadata_has_dp_cp_group).
    metadata = {**flags, **({} if groups is None else {"dp_cp_group": groups.dp_cp})}
    if groups is not None:
        _give_missing_groups(module, groups)
    try:
        return module.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    except AssertionError as error:
        try:
            return _of_tied_model(module, metadata)
        except (AssertionError, AttributeError):
            raise UnsupportedError(
                f"megatron's own sharded_state_dict of this {type(module).__name__} fails, so the places of its "
                f"tensors are unknown: {str(error)[:300]}{_hint()}"
            ) from error


def _give_missing_groups(module: torch.nn.Module, groups: ProcessGroups) -> None:
    """Gives the model's tensor-parallel group to modules without a group, if parallel_state is not initialized.

    `MegatronModule.sharded_state_dict` asks parallel_state for the group if a module has no `tp_group`. The constructor
    of MultiTokenPredictionLayer (0.16) sets no `tp_group`.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    if parallel_state.model_parallel_is_initialized():
        return
    for child in module.modules():
        if isinstance(child, MegatronModule) and not hasattr(child, "tp_group"):
            child.tp_group = groups.tp


def _of_tied_model(module: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the correct `sharded_state_dict` of a stage that has a copy of the first stage's embedding.

    `LanguageModule.sharded_state_dict` (0.16 to 0.19) fails on a later stage with tied embeddings if the stage has
    layers of multi-token prediction, or if the model has its own process groups. The modules of this stage still know
    the places of their tensors. With multi-token prediction, the stage has an output layer whose weight nothing uses.
    This weight counts as another copy of the embedding.
    """
    from megatron.core.transformer.module import MegatronModule

    inner = language_model_of(module)
    prefix = "" if inner is module else LANGUAGE_MODEL
    if inner.pre_process or not inner.share_embeddings_and_output_weights:
        raise AssertionError("there is no copy of the embedding")
    found: dict[str, Any] = MegatronModule.sharded_state_dict(inner, prefix=prefix, metadata=metadata)
    found.pop(f"{prefix}output_layer._extra_state", None)
    first = prefix + _EMBEDDING
    for name in (first, f"{prefix}output_layer.weight"):
        if name in found:
            replica = (1, *found[name].replica_id[1:])
            found[name] = replace(found[name], key=first, replica_id=replica, allow_shape_mismatch=True)
    return found


def _hint() -> str:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return ""
    return (
        ". megatron's parallel_state is not initialized: call torch.distributed.init_process_group(...) and "
        "parallel_state.initialize_model_parallel(...) first, even in a single process"
    )


def _opaque_shard(name: str, value: Any, owner: torch.nn.Module) -> LocalShard:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8:
        raise UnsupportedError(
            f"{name} is a {type(value).__name__}: only the uint8 tensors of transformer-engine 2 are supported"
        )
    data = value.detach().reshape(-1)

    def refresh() -> torch.Tensor | None:
        now = owner.get_extra_state()
        return None if now is None else now.detach().reshape(-1)

    return LocalShard(
        ShardKey(name, OPAQUE),
        Region.whole((data.numel(),)),
        data,
        is_expert(name),
        is_buffer=True,
        refresh=refresh,
        restore=owner.set_extra_state,
    )


def _tensor_shard(name: str, tensor: torch.Tensor, sharded: Any) -> LocalShard:
    if sharded is None or sharded.data is not tensor:
        reason = "no entry for it" if sharded is None else "a copy of it"
        raise UnsupportedError(
            f"tensor {name}: the model's sharded_state_dict has {reason}, so its place in the global tensor is unknown"
        )
    replica_id = sharded.replica_id
    replica = bool(replica_id[0] if isinstance(replica_id, tuple) else 0)
    # A copy on a later pipeline stage gets the name of the original. Megatron gives this name as the key of the copy's
    # ShardedTensor.
    key = ShardKey(sharded.key if replica else name, MODEL)
    is_buffer = not isinstance(tensor, torch.nn.Parameter)
    region = _region(name, tensor, sharded)
    is_grouped = is_adapter(name) and is_expert(name) and expert_of(name) is None
    of_all_experts = is_grouped and (_is_shared_by_experts(sharded) or len(region.global_shape) == 3)
    return LocalShard(key, region, tensor, is_expert(name), replica, is_buffer, of_all_experts)


def _is_shared_by_experts(sharded: Any) -> bool:
    """Returns True for an adapter that all experts share. Megatron-Bridge (0.6) keeps this adapter equal on all ranks.

    Bridge's factory (`_apply_expert_axis_factory`) lists the same tensor once for each expert of the rank.
    """
    build = getattr(sharded, "build_fn", None)
    if build is None:
        return False
    parts = _flatten(build(sharded.key, sharded.data, sharded.replica_id, None))
    return bool(parts[0].prepend_axis_num)


def _region(name: str, tensor: torch.Tensor, sharded: Any) -> Region:
    build = getattr(sharded, "build_fn", None)
    if build is not None:
        return _factory_region(name, tuple(tensor.shape), sharded)
    axes = sharded.prepend_axis_num
    shape = tuple(sharded.local_shape)
    piece = Piece((0,) * len(shape), shape, tuple(sharded.global_offset[axes:]))
    return Region(tuple(sharded.global_shape[axes:]), shape, (piece,), Region.whole(shape).flat)


def _factory_region(name: str, shape: tuple[int, ...], factory: Any) -> Region:
    """Finds where a ShardedTensorFactory places the parts of a tensor, by applying the factory to tensors of positions.

    There is one tensor of positions per axis, expanded from a vector. So even the positions of a large weight need
    little memory. Parts with separate keys (Mamba's in_proj) are placed one after the other along the first axis.
    """
    parts_by_axis = [
        _of_first_expert(_flatten(factory.build_fn(factory.key, _positions(shape, axis), factory.replica_id, None)))
        for axis in range(len(shape))
    ]
    pieces: list[Piece] = []
    starts: dict[str, int] = {}
    total = 0
    for parts in zip(*parts_by_axis, strict=True):
        first = parts[0]
        axes = first.prepend_axis_num
        local_offset = tuple(int(part.data[(0,) * len(shape)]) for part in parts)
        last = tuple(int(part.data[(-1,) * len(shape)]) for part in parts)
        part_shape = tuple(first.data.shape)
        if tuple(b - a + 1 for a, b in zip(local_offset, last, strict=True)) != part_shape:
            raise UnsupportedError(f"tensor {name}: its ShardedTensorFactory cuts it into parts that are not boxes")
        if first.key not in starts:
            starts[first.key] = total
            total += first.global_shape[axes]
        offset = list(first.global_offset[axes:])
        offset[0] += starts[first.key]
        pieces.append(Piece(local_offset, part_shape, tuple(offset)))
    region = Region((total, *first.global_shape[axes + 1 :]), shape, tuple(pieces), Region.whole(shape).flat)
    try:
        region.check()
    except ValueError as error:
        raise UnsupportedError(f"tensor {name}: its ShardedTensorFactory is not understood: {error}") from None
    return region


def _of_first_expert(parts: list[Any]) -> list[Any]:
    """Returns the parts that have the first part's indices along the prepended axes."""
    axes = parts[0].prepend_axis_num
    return [part for part in parts if part.global_offset[:axes] == parts[0].global_offset[:axes]]


def _positions(shape: tuple[int, ...], axis: int) -> torch.Tensor:
    vector = torch.arange(shape[axis], device="cpu")
    return vector.view([-1 if i == axis else 1 for i in range(len(shape))]).expand(shape)


def _flatten(parts: Any) -> list[Any]:
    if isinstance(parts, dict):
        parts = list(parts.values())
    if isinstance(parts, (list, tuple)):
        return [leaf for part in parts for leaf in _flatten(part)]
    return [parts]
