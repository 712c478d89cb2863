"""Plans megatron's keys for the tensors of a native checkpoint, and reads the tensors.

Megatron-core 0.16 to 0.19 stores each tensor of the model under a key. It stores each kind of the tensor's optimizer
state under `optimizer.state.<kind>.<key>`, in the same shape:

- `DistributedOptimizer.sharded_param_state_fully_reshardable` calls the main parameter `param`.
- `Float16OptimizerWithFloat16Params.sharded_state_dict` calls the main parameter `fp32_param`.
- `FP32Optimizer` stores no main parameter.

A checkpoint of this package does not say which of the three classes it comes from, and a later run may use another
class. So the main parameter is stored under both names, but its bytes are written only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import CheckpointCorruptError, UnsupportedError
from mcore_ckpt.formats.locate import Locator, Wanted
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.torch_dist.contents import KeyRows, Slice, saved_object, slices_of
from mcore_ckpt.formats.torch_dist.keys import Keys
from mcore_ckpt.sharding.cuts import find_cut, has_sections
from mcore_ckpt.sharding.names import expert_of, is_expert
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, PARAM, ReadRange, ShardKey
from mcore_ckpt.sharding.synonyms import in_local_spec
from mcore_ckpt.tools.convert.reshard.saved_tensors import SavedTensor, saved_tensors

_MAIN_KEYS = (PARAM, "fp32_param")
# The sections of a mixer's fused tensors, in order, by the mixer's name in its layer and the number of sections. The
# name is `mixer` for a MambaMixer and `self_attention` for a GatedDeltaNet. Tensors with 3 sections are convolutions.
_SECTIONS = {
    ("mixer", 5): ("z", "x", "B", "C", "dt"),
    ("mixer", 3): ("x", "B", "C"),
    ("self_attention", 6): ("query", "key", "value", "z", "beta", "alpha"),
    ("self_attention", 3): ("query", "key", "value"),
}


@dataclass(frozen=True, eq=False)
class PlannedTensors:
    """Slices of the model, slices of the optimizer's state (if it was saved), and the `_extra_state` objects."""

    model: tuple[Slice, ...]
    optimizer: tuple[Slice, ...]
    states: Mapping[str, bytes]


def plan_tensors(reader: NativeReader) -> PlannedTensors:
    """Plans all tensors of a checkpoint. Reads every index.

    Each layer has its own keys, as in a `sharded_state_dict` whose metadata sets `non_homogeneous_layers`.

    Raises:
        CheckpointCorruptError: an index is missing or damaged.
        UnsupportedError: the model was not saved, or megatron has no form for a part of the optimizer's state.
    """
    if MODEL not in reader.manifest.contents:
        raise UnsupportedError(
            f"{reader.place}: was saved without the model (save_contents), and no trainer can resume from the "
            "optimizer alone: convert a checkpoint that has both"
        )
    _refuse_bound_state(reader)
    tensors = list(saved_tensors(reader))
    keys = _keys(reader, tensors)
    moments = {tensor.moments for tensor in tensors if tensor.main and tensor.moments}
    model: list[Slice] = []
    optimizer: list[Slice] = []
    empty = saved_object(torch.empty(0, dtype=torch.uint8))
    # Always write this object, too, because HybridModel and MambaModel require it. GPTModel ignores the object.
    states = {keys.place("output_layer._extra_state").object_key: empty}
    for tensor in tensors:
        if tensor.model == OPAQUE:
            states |= _opaque_state(reader, keys, tensor)
            continue
        rows = _key_rows(reader, keys, tensor)
        if tensor.model == MODEL:
            model += _slices(reader, tensor, MODEL, rows)
            for place in keys.states(in_local_spec(tensor.name)):
                states.setdefault(place.object_key, empty)
        if tensor.main:
            for kind in (PARAM, *_moments(reader, tensor, moments)):
                optimizer += _slices(reader, tensor, kind, [_of_optimizer(each, kind) for each in rows])
    return PlannedTensors(tuple(model), tuple(optimizer), states)


def read_slice(reader: NativeReader, wanted: Slice) -> torch.Tensor:
    """Reads the elements of a slice.

    Moments that are not stored, because the optimizer has made no step yet, are read as zeros.

    Raises CheckpointCorruptError: a block is damaged, or some elements are in no file.
    """
    found = Locator(reader, None).find(Wanted(wanted.tensor, wanted.region, str(reader.place)))
    if found is None:
        return torch.zeros(wanted.sizes, dtype=torch_dtype(wanted.dtype))
    memory = torch.empty(wanted.sizes, dtype=torch_dtype(wanted.dtype))
    if found.dtype != memory.dtype:
        raise CheckpointCorruptError(f"{reader.place}: tensor {wanted.tensor}: has several dtypes: save it again")
    reader.read([(read, memory.view(-1)) for read in found.reads])
    return memory


def _keys(reader: NativeReader, tensors: Sequence[SavedTensor]) -> Keys:
    names = {in_local_spec(tensor.name) for tensor in tensors}
    experts = 1 + max((expert[1] for name in names if (expert := expert_of(name))), default=0)
    layers = len({layer for stage in reader.manifest.stages for layer in stage.decoder})
    return Keys(names, layers, experts, alike=False)


def _key_rows(reader: NativeReader, keys: Keys, tensor: SavedTensor) -> list[KeyRows]:
    """Returns the keys of a tensor, each with its rows. A mixer's tensor has one key for each section."""
    local = in_local_spec(tensor.name)
    first, *others = keys.places(local)
    # A norm's key depends on the layer spec, so list its keys under all specs. The stored name also gives a key.
    found = [*others, *([keys.place(tensor.name)] if not is_expert(tensor.name) else [])]
    rows = tensor.shape[0] if tensor.shape else 1
    whole = KeyRows(first, 0, rows, tuple(dict.fromkeys(place.key for place in found if place.key != first.key)))
    return list(_sections(reader, tensor, whole)) if has_sections(tensor.name) else [whole]


def _sections(reader: NativeReader, tensor: SavedTensor, whole: KeyRows) -> Iterator[KeyRows]:
    """Divides the rows of a mixer's tensor among its keys (`_split_tensor_factory`, megatron-core 0.16.1)."""
    try:
        cut = find_cut(tensor.name, tensor.seen, reader.tp_size(tensor.expert))
    except ValueError as error:
        raise UnsupportedError(f"{reader.place}: tensor {tensor.name}: {error}") from None
    module = tensor.name.rsplit(".", 3)[-3]
    names = _SECTIONS.get((module, len(cut.sections)))
    if names is None:
        raise UnsupportedError(
            f"{reader.place}: tensor {tensor.name}: has {len(cut.sections)} sections, but no such tensor of a "
            "MambaMixer or a GatedDeltaNet has this number, so their keys are unknown"
        )
    unit = tensor.shape[0] // sum(cut.sections)
    for name, start, section in zip(names, accumulate(cut.sections, initial=0), cut.sections, strict=False):
        place = replace(whole.place, key=f"{whole.place.key}.{name}")
        yield KeyRows(place, start * unit, section * unit)


def _slices(reader: NativeReader, tensor: SavedTensor, kind: str, rows: Iterable[KeyRows]) -> Iterator[Slice]:
    key = ShardKey(tensor.name, kind)
    info = reader.info(key)
    # If the main parameter is the model's own tensor, take the dtype of the model's tensor. Moments that do not exist
    # yet are fp32.
    if info is None and kind == PARAM:
        info = reader.info(ShardKey(tensor.name, MODEL))
    dtype = "float32" if info is None else str(info.dtype).removeprefix("torch.")
    for each in rows:
        yield from slices_of(key, each, tensor.shape, dtype)


def _of_optimizer(rows: KeyRows, kind: str) -> KeyRows:
    kinds = _MAIN_KEYS if kind == PARAM else (kind,)
    first, *others = (f"optimizer.state.{kind}.{key}" for kind in kinds for key in (rows.place.key, *rows.other_keys))
    return replace(rows, place=replace(rows.place, key=first), other_keys=tuple(others))


def _refuse_bound_state(reader: NativeReader) -> None:
    for name in reader.manifest.tensors:
        if kinds := reader.bound_kinds(ShardKey(name, PARAM)):
            raise UnsupportedError(
                f"{reader.place}: tensor {name}: the optimizer state has {', '.join(kinds)}, which do not have the "
                "parameter's shape, so torch_dist cannot store them: take the weights with mcore-ckpt merge"
            )


def _moments(reader: NativeReader, tensor: SavedTensor, common: set[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the kinds of a tensor's moments, including moments that only the first step will make."""
    if tensor.moments:
        return tensor.moments
    if len(common) > 1:
        raise UnsupportedError(
            f"{reader.place}: tensor {tensor.name}: the optimizer has not updated this tensor yet, so it is unknown "
            f"which of the moments {sorted(common)} the tensor will have: convert a checkpoint of a later step"
        )
    return next(iter(common), ("exp_avg", "exp_avg_sq"))


def _opaque_state(reader: NativeReader, keys: Keys, tensor: SavedTensor) -> dict[str, bytes]:
    """Returns the `_extra_state` that transformer-engine keeps for FP8, unchanged."""
    if is_expert(tensor.name):
        # Megatron divides the state of grouped experts by expert. This conversion leaves that state out instead, so the
        # amax history begins anew.
        return {}
    shard = Locator(reader, None).opaque(ShardKey(tensor.name, OPAQUE))
    if shard is None:
        raise CheckpointCorruptError(f"{reader.place}: tensor {tensor.name}: is in none of the files")
    memory = torch.empty(shard.nbytes, dtype=torch.uint8)
    if shard.nbytes:
        reader.read([(ReadRange.whole(shard), memory)])
    return {keys.place(tensor.name).object_key: saved_object(memory)}
