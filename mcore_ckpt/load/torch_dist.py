"""Loads torch_dist checkpoints, which megatron's trainer and verl write, into a live trainer.

megatron's `sharded_state_dict` describes which part of which tensor a rank holds, but this package reads the files
itself. It does not call `dist_checkpointing.load` (0.16.1), for two reasons. First, that function executes the pickles
in `.metadata` and in every sharded object (`FileSystemReader.read_metadata` and `DefaultLoadPlanner.load_bytes` of
torch 2.13). Second, loading the optimizer in this way fails with torch's Adam: `sharded_state_dict(is_loading=True)`
fails an assertion before the optimizer's first step, and `load_parameter_state_from_fully_reshardable` looks for a
`step` of each parameter (`_set_main_param_and_optimizer_states`), but the checkpoint stores it in the param groups.

Rows that pad the vocabulary here and have no counterpart there keep their fresh values. Other optimizers than
DistributedOptimizer (replicated Adam, Muon and its kin, with or without owners) are stored tensor by tensor, in the
model's shapes, and load under any layout and into a DistributedOptimizer of the same kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.step_folders import step_of
from mcore_ckpt.formats.torch_dist.arguments import arguments_in, facts_of_arguments
from mcore_ckpt.formats.torch_dist.files import OPTIMIZER_KEY, TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.kind import torch_dist_folders
from mcore_ckpt.formats.torch_dist.stored_keys import StoredKeys
from mcore_ckpt.load.foreign_state import (
    KINDS,
    BucketRange,
    ForeignLoad,
    ForeignState,
    LoadedModelTensor,
    LoadedParameter,
    OwnedParameter,
    bucket_ranges,
    load_together,
    owned_parameters,
    rng_from_megatron,
    step_missing,
)
from mcore_ckpt.load.fresh_adapters import choice_of
from mcore_ckpt.models.stated_facts import facts_of_folder
from mcore_ckpt.ranks.rounds import Record, same_everywhere
from mcore_ckpt.sharding.plan import PARAM
from mcore_ckpt.sharding.synonyms import synonyms
from mcore_ckpt.state.model import sharded_state_dict, unwrap
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.hybrid_device import ARGUMENTS
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.param_groups import SavedPart
from mcore_ckpt.state.quantized import is_quantized
from mcore_ckpt.state.trainer import Trainer

_FULLY_RESHARDABLE = "fully_reshardable"
_DP_RESHARDABLE = "dp_reshardable"
# The default until 0.15, gone in 0.16. Each tensor of the state can be read in the model's shape, too.
_MODEL_SPACE = "fully_sharded_model_space"
# megatron names no form for optimizers beside DistributedOptimizer. Each tensor of the state has the model's shape.
_BY_PARAMETER = "None"
# `fully_reshardable` calls main parameters by the first name, Float16OptimizerWithFloat16Params by the second one.
_MAIN_NAMES = (PARAM, "fp32_param")
_INNER = "master_param"


@dataclass(frozen=True, eq=False)
class _Source:
    """The checkpoint: its files, and the keys under which they have the model's tensors."""

    files: TorchDistFiles
    keys: StoredKeys

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Says in an error of the block which layers the checkpoint and the model have, if they differ."""
        try:
            yield
        except CheckpointMismatchError as error:
            if self.keys.layer_mismatch is None:
                raise
            raise CheckpointMismatchError(f"{error} ({self.keys.layer_mismatch})") from error


@dataclass(frozen=True, eq=False)
class _Entry:
    """A live tensor of the model, with megatron's ShardedTensor or ShardedTensorFactory for it."""

    name: str
    live: torch.Tensor
    sharded: Any

    @property
    def is_frozen(self) -> bool:
        return isinstance(self.live, torch.nn.Parameter) and not self.live.requires_grad


def load_torch_dist(trainer: Trainer, path: Path) -> ForeignLoad:
    """Loads a torch_dist folder, or the `dist_ckpt` folders that verl writes below it. Every rank calls it.

    The model, a `fully_reshardable` or `fully_sharded_model_space` optimizer, and optimizers beside
    DistributedOptimizer can be loaded under any layout (`fully_sharded_model_space`: with the same padding of the
    vocabulary). For a `dp_reshardable` optimizer, only the data-parallel size
    may differ from the saved one. For random states, the tensor-parallel and pipeline-parallel sizes must be the saved
    ones. The step is the checkpoint's `iteration`. Without one, it is the number in the folder's name, or 0.

    Raises:
        CheckpointMismatchError: the checkpoint does not fit, lacks something that `load_contents` names, or has an
            optimizer state that does not belong to the weights. Nothing has changed.
        CheckpointCorruptError: a file is missing, is damaged, or contains something other than data. Nothing has
            changed.
        UnsupportedError: the optimizer state is stored in an unsupported form. Nothing has changed.
    """
    opened: list[_Source] = []

    def read() -> ForeignState:
        files = TorchDistFiles(path, torch_dist_folders(path))
        source = _Source(files, StoredKeys(files, trainer.layers))
        opened.append(source)
        return _read(trainer, source)

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere([{"names": record["names"]} for record in records], f"{path}: the tensors seen there")
        with opened[0].explained():
            _check_leftovers(trainer, opened[0].files, [record["read"] for record in records])
        return {}

    return load_together(trainer, path, read, combine)


def _read(trainer: Trainer, source: _Source) -> ForeignState:
    contents, files = trainer.config.load_contents, source.files
    entries = _entries(trainer, source)
    is_taken = choice_of(trainer, files.path, (entry.name for entry in entries), files.names)
    entries = [entry for entry in entries if is_taken(entry.name, entry.is_frozen)]
    weights: tuple[LoadedModelTensor, ...] = ()
    # The optimizer state is checked against the weights, so read the weights even if only the optimizer is loaded.
    if "model" in contents or ("optimizer" in contents and _missing(source, entries) < len(entries)):
        with source.explained():
            weights = tuple(_read_weight(source, entry) for entry in entries)
    step = files.common.get("iteration")
    step = step if isinstance(step, int) else step_of(files.path)
    facts = facts_of_arguments(arguments_in(files.common)) or facts_of_folder(files.path)
    state = ForeignState(step, 0, weights, was_quantized=_was_quantized(files), model=facts)
    if "optimizer" in contents:
        state = _with_optimizer(trainer, source, entries, state)
    if "extra" in contents:
        state = replace(state, rng=_read_rng(trainer, files))
    return replace(state, nbytes=files.nbytes, report={"names": files.digest(), "read": files.positions_read()})


def _was_quantized(files: TorchDistFiles) -> bool:
    """Returns True if the arguments of megatron's trainer say that weights were quantized."""
    args = arguments_in(files.common)
    return any(bool(args.get(name)) for name in ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param"))


def _check_leftovers(trainer: Trainer, files: TorchDistFiles, positions: Sequence[str]) -> None:
    """Refuses a checkpoint with a tensor that no rank reads, because this tensor would be lost silently."""
    contents = trainer.config.load_contents
    left = files.names_not_in(positions)
    read = {_numbered(name) for name in set(files.names) - set(left)}
    for name in left:
        if any(synonym in read for synonym in synonyms(_numbered(name))):
            # `convert` writes a norm under several names, one for each layer spec, and a main parameter under both of
            # megatron's. It is enough if one of them is read.
            continue
        kind = "optimizer" if OPTIMIZER_KEY.match(name) else "model"
        if kind in contents:
            why = " (is the parameter frozen now?)" if kind == "optimizer" else ""
            raise CheckpointMismatchError(f"{files.path}: tensor {name}: wanted no such tensor{why}, found one")


def _numbered(name: str) -> str:
    """Makes keys of the same tensor comparable: by one name of main parameters, and with layer numbers for `synonyms`.

    A key that all layers share gets the number 0.
    """
    main, other = _MAIN_NAMES
    name = re.sub(rf"\boptimizer\.state\.{other}\.", f"optimizer.state.{main}.", name)
    return re.sub(r"\blayers\.(?!\d)", "layers.0.", name)


# -- model -------------------------------------------------------------------------------------------------


def _entries(trainer: Trainer, source: _Source) -> list[_Entry]:
    """Lists the model's tensors under the names that the checkpoint uses.

    The names depend on flags that newer megatron versions store in the checkpoint (`content_metadata`), and on whether
    the layers were homogeneous, which not every checkpoint records. So this tries the names of both cases, and returns
    those of which fewer are missing.
    """
    saved = source.files.common.get("content_metadata")
    flags = {key: value for key, value in saved.items() if isinstance(value, bool)} if isinstance(saved, dict) else {}
    choices: list[dict[str, Any]] = [flags, {**flags, "non_homogeneous_layers": True}]
    found = [
        [entry for chunk in trainer.chunks for entry in _chunk_entries(unwrap(chunk), choice)] for choice in choices
    ]
    return min(found, key=lambda entries: _missing(source, entries))


def _missing(source: _Source, entries: Sequence[_Entry]) -> int:
    return sum(not source.keys.has(entry.sharded.key) for entry in entries)


def _chunk_entries(module: Any, metadata: dict[str, Any]) -> Iterator[_Entry]:
    sharded = sharded_state_dict(module, **metadata)
    for name, live in module.state_dict(keep_vars=True).items():
        # transformer-engine's _extra_state is a pickle. Delayed scaling alone needs it, and begins its history anew.
        if live is None or name.endswith("_extra_state"):
            continue
        entry = sharded.get(name)
        if entry is None or entry.data is not live:
            raise UnsupportedError(
                f"tensor {name}: the model's sharded_state_dict has no entry for it (metadata {metadata}), so its "
                "region is unknown: give its module a sharded_state_dict that lists it"
            )
        yield _Entry(name, live, entry)


def _read_weight(source: _Source, entry: _Entry) -> LoadedModelTensor:
    # Rows that pad the vocabulary and have no counterpart in the checkpoint keep their values.
    memory = torch.empty(entry.live.shape, dtype=entry.live.dtype, device="cpu")
    if not is_quantized(entry.live):
        memory.copy_(entry.live.detach())
    return LoadedModelTensor(entry.name, entry.live, _fill(source, entry.sharded, entry.sharded.key, memory))


def _fill(source: _Source, sharded: Any, key: str, memory: torch.Tensor) -> torch.Tensor:
    """Reads the tensor that `sharded` describes and that has the key `key` in the live model.

    Returns:
        The filled tensor. It is `memory` itself or, if `sharded` is a factory, what the factory's `merge_fn` returns.
    """
    if not isinstance(sharded, ShardedTensorFactory):
        _fill_part(source, replace(sharded, key=key, data=memory, dtype=memory.dtype))
        return memory
    built = replace(sharded, key=key, data=memory).build()
    # A factory's parts can be copies of parts of `memory`. Only the factory's merge_fn can put them together again.
    loaded = dict_list_map_outplace(lambda part: _fill_part(source, part), built)
    merged: torch.Tensor = sharded.merge_fn(loaded)
    return merged


def _fill_part(source: _Source, part: Any) -> torch.Tensor:
    data: torch.Tensor = part.data
    place = source.keys.place(part.key)
    axes = part.prepend_axis_num + len(place.index)
    memory = data[(None,) * axes] if axes else data
    shape, offset = (*place.lengths, *part.global_shape), (*place.index, *part.global_offset)
    source.files.read(WantedPart(place.key, shape, offset, memory, part.allow_shape_mismatch))
    return data


# -- optimizer ---------------------------------------------------------------------------------------------


def _with_optimizer(trainer: Trainer, source: _Source, entries: Sequence[_Entry], state: ForeignState) -> ForeignState:
    files = source.files
    saved = _saved_parts(files.path, files.common.get("optimizer"))
    form = _sharding_type(files, saved)
    owned = owned_parameters(trainer, only_distributed=form == _DP_RESHARDABLE)
    if form == _DP_RESHARDABLE and source.keys.are_other_layers:
        raise CheckpointMismatchError(
            f"{files.path}: the model has the checkpoint's parts in other layers (GPTModel and HybridModel), but a "
            f"{_DP_RESHARDABLE} optimizer state can be loaded only into the same layers: save it as "
            f"{_FULLY_RESHARDABLE}, or leave 'optimizer' out of load_contents"
        )
    weights = {id(tensor.live): tensor.loaded for tensor in state.weights}
    sharded = {id(entry.live): entry.sharded for entry in entries}
    parameters: list[LoadedParameter] = []
    loaded: list[SavedPart] = []
    parts = optimizer_parts(trainer.optimizer)
    for number, part in enumerate(parts):
        mine = [parameter for parameter in owned if parameter.part.megatron is part.megatron]
        if form != _DP_RESHARDABLE:
            prefixes = _prefixes(len(saved))
            parameters += [_read_parameter(source, prefixes, sharded[id(p.parameter)], p, weights) for p in mine]
            loaded.append(_shared_by_all(trainer, files, _of_the_same_kind(part, saved), part))
        else:
            chained = _ChainedState(files, f"chained_{number}." if len(parts) > 1 else "", part)
            ranges = bucket_ranges(part)
            parameters += [_read_range(chained, ranges[id(p.parameter)], p) for p in mine]
            loaded.append(_shared_by_group(trainer, chained))
    scheduler = files.common.get("opt_param_scheduler", files.common.get("lr_scheduler"))
    return replace(state, parameters=tuple(parameters), parts=tuple(loaded), scheduler=scheduler)


def _of_the_same_kind(part: OptimizerPart, saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the saved parts whose param groups have the settings of this part's kind of optimizer.

    A chain may have parts of several kinds, whose groups look alike otherwise.
    """
    own = _kind_settings(part.param_groups)
    alike = [state for state in saved if _kind_settings((state.get("optimizer") or {}).get("param_groups", ())) == own]
    return alike or list(saved)


# Adam's are the first two, Lion's the first, Muon's the third; SGD, AdaptiveMuon and SOAP have more of them.
_KIND_SETTINGS = {"betas", "eps", "momentum", "beta2", "nesterov", "dampening", "shampoo_beta"}


def _kind_settings(groups: Sequence[Mapping[str, Any]]) -> set[str]:
    return {key for group in groups for key in group if key in _KIND_SETTINGS}


def _prefixes(number: int) -> list[str]:
    """Returns what the names of a part's tensors may begin with.

    `ChainedOptimizer.sharded_state_dict` (0.16.1) puts the number of the part into the name if there are several parts.
    Another layout can have other parts, so a tensor may be under every number.
    """
    return ["", *(f"chained_{part}." for part in range(number))]


def _saved_parts(path: Path, saved: Any) -> list[Mapping[str, Any]]:
    """Returns the state of each chained optimizer.

    What all ranks share has the state itself if there is one optimizer, or a dict or list of states if there are
    several. Chains may nest.
    """
    if isinstance(saved, Mapping) and saved and set(saved) == set(range(len(saved))):
        saved = [saved[number] for number in range(len(saved))]
    if isinstance(saved, (list, tuple)) and saved:
        return [state for each in saved for state in _saved_parts(path, each)]
    if not isinstance(saved, Mapping):
        raise CheckpointMismatchError(
            f"{path}: has no optimizer state: leave 'optimizer' out of load_contents if it was not saved"
        )
    # That of FP32Optimizer is the state of the optimizer in it. Our own conversion (`for_trainers`) writes both.
    return [saved if "param_groups" not in saved or "optimizer" in saved else {"optimizer": saved}]


def _sharding_type(files: TorchDistFiles, saved: Sequence[Mapping[str, Any]]) -> str:
    found = {str(state.get("param_state_sharding_type")) for state in saved}
    if found <= {_FULLY_RESHARDABLE, _MODEL_SPACE, _BY_PARAMETER}:
        return _BY_PARAMETER if _BY_PARAMETER in found else _FULLY_RESHARDABLE
    if found == {_DP_RESHARDABLE}:
        return _DP_RESHARDABLE
    raise UnsupportedError(
        f"{files.path}: the optimizer state is stored as {', '.join(sorted(found - {_BY_PARAMETER}))}; of a "
        f"DistributedOptimizer only {_FULLY_RESHARDABLE} can be read, or {_DP_RESHARDABLE} if it is alone. Save it "
        "again in one of these forms, or leave 'optimizer' out of load_contents"
    )


def _read_parameter(
    source: _Source,
    prefixes: Sequence[str],
    sharded: Any,
    owned: OwnedParameter,
    weights: Mapping[int, torch.Tensor],
) -> LoadedParameter:
    """Reads a parameter's state, which has the model's shape, and keeps the range that this rank owns."""
    kinds = _kinds_of(owned)
    weight = weights.get(id(owned.parameter), owned.parameter.detach()).cpu()
    tensors = {}
    for kind in kinds:
        stored_as = _MAIN_NAMES if kind == PARAM else (kind,)
        names = [f"{prefix}optimizer.state.{name}.{sharded.key}" for name in stored_as for prefix in prefixes]
        name = next((name for name in names if _is_stored(source, sharded, name)), None)
        # Rows that pad the vocabulary need not be stored. Then main parameters start from the weights, moments at zero.
        whole = weight.to(torch.float32, copy=True) if kind == PARAM else torch.zeros(owned.parameter.shape)
        # A weight of fp32 can be its own main parameter.
        if name is not None or kind != PARAM or weight.dtype != torch.float32:
            whole = _fill(source, sharded, name or names[0], whole)
        tensors[kind] = whole.reshape(-1)[owned.start : owned.stop].clone()
    return LoadedParameter(owned, tensors)


def _is_stored(source: _Source, sharded: Any, key: str) -> bool:
    if not isinstance(sharded, ShardedTensorFactory):
        return source.keys.has(key)
    # The parts of a mixer's tensors have keys of their own.
    found: list[bool] = []
    # The bytes of a quantized weight may not be read, not even to cut them.
    unread = torch.empty(sharded.data.shape, device="meta")
    built = replace(sharded, key=key, data=unread).build()
    dict_list_map_outplace(lambda part: found.append(source.keys.has(part.key)), built)
    return any(found)


def _kinds_of(owned: OwnedParameter) -> tuple[str, ...]:
    kind = owned.part.kind
    assert kind is not None, "an optimizer with parameters has a kind"
    if owned.part.bound_shapes(owned.main):
        raise UnsupportedError(
            f"optimizer state of {owned.name}: {owned.part.kind_name} has state that has not the parameter's shape, "
            "which megatron cannot store in torch_dist: leave 'optimizer' out of load_contents"
        )
    return (PARAM, *kind.moments)


@dataclass(frozen=True, eq=False)
class _ChainedState:
    """The `dp_reshardable` state of one chained optimizer, whose keys begin with `prefix`."""

    files: TorchDistFiles
    prefix: str
    part: OptimizerPart

    @property
    def group_key(self) -> str:
        """The beginning of the keys for this rank's combination of pipeline, tensor and expert ranks."""
        return f"{self.prefix}optimizer.distributed.dp_group_idx_{self.part.megatron.data_parallel_group_idx}"


def _read_range(chained: _ChainedState, where: BucketRange, owned: OwnedParameter) -> LoadedParameter:
    """Reads an owned range from megatron's bucket, as `dp_reshardable` stores it."""
    key = f"{chained.group_key}.gbuf_idx_{where.buffer}.dtype_{where.dtype}.bucket_idx_{where.bucket}"
    tensors = {}
    # The last one is the parameter that HybridDeviceOptimizer updates. After a load by megatron it can differ from the
    # main parameter beside it, which is a copy.
    inner = (_INNER,) if chained.files.dtype_of(f"{key}.{_INNER}") is not None else ()
    for kind in (*KINDS, *inner):
        stored = chained.files.dtype_of(f"{key}.{kind}") or torch.float32
        tensors[kind] = torch.empty(owned.stop - owned.start, dtype=stored)
        try:
            chained.files.read(WantedPart(f"{key}.{kind}", (where.numel,), (where.start,), tensors[kind]))
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"{error}. A {_DP_RESHARDABLE} optimizer state can be loaded only with the tensor, pipeline and expert "
                "layout and the bucket sizes that it was saved with: use these, load only the model, or save the "
                f"optimizer as {_FULLY_RESHARDABLE}"
            ) from None
    tensors[PARAM] = tensors.pop(_INNER, tensors[PARAM])
    return LoadedParameter(owned, tensors)


def _shared_by_group(trainer: Trainer, chained: _ChainedState) -> SavedPart:
    """Reads param groups and scaler, which `dp_reshardable` stores for each data-parallel group."""
    if chained.part.inner is None:
        return SavedPart(None, 0, None)
    key = chained.group_key
    optimizer = chained.files.read_object(f"{key}.optimizer/shard_0_1")
    scaler_keys = chained.files.object_keys(f"{key}.grad_scaler/")
    scaler = chained.files.read_object(scaler_keys[0]) if scaler_keys else None
    return _loaded_part(trainer, chained.files, [{"optimizer": optimizer, "grad_scaler": scaler}])


def _shared_by_all(
    trainer: Trainer, files: TorchDistFiles, saved: Sequence[Mapping[str, Any]], part: OptimizerPart
) -> SavedPart:
    """Reads param groups and scaler, which are stored once, and selects those of `part`."""
    if part.inner is None:
        return SavedPart(None, 0, None)
    kind = part.kind
    loaded = _loaded_part(trainer, files, saved, has_step=kind is None or kind.has_step)
    return replace(loaded, param_groups=_groups_for(part, _groups_of(saved)))


def _groups_for(part: OptimizerPart, saved: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Selects the saved groups that belong to a part. A part has either the experts' groups or all other groups.

    megatron separates the experts' groups only under expert parallelism. Groups that were saved without this separation
    are used for both kinds of part.
    """
    field = "is_expert_parallel"
    wanted = any(group.get(field) for group in part.param_groups)
    return [group for group in saved if bool(group.get(field)) == wanted] or [{**g, field: wanted} for g in saved]


def _groups_of(
    saved: Sequence[Mapping[str, Any]], left: Sequence[str] = ("step", "params", *ARGUMENTS)
) -> list[dict[str, Any]]:
    """Returns the fields of the param groups of all saved parts, except those that are `left`."""
    groups = (group for state in saved for group in (state.get("optimizer") or {}).get("param_groups", ()))
    return [{key: value for key, value in group.items() if key not in left} for group in groups]


def _loaded_part(
    trainer: Trainer, files: TorchDistFiles, saved: Sequence[Mapping[str, Any]], has_step: bool = True
) -> SavedPart:
    groups = _groups_of(saved, left=())
    if not groups:
        raise CheckpointMismatchError(
            f"{files.path}: has no param groups of the optimizer: leave 'optimizer' out of load_contents"
        )
    steps = {group["step"] for group in groups if group.get("step") is not None}
    # Float16OptimizerWithFloat16Params and FP32Optimizer have it beside the groups, as a number or a tensor.
    common = ((state.get("optimizer") or {}).get("state") for state in saved)
    steps |= {int(each["common_step"]) for each in common if isinstance(each, Mapping) and "common_step" in each}
    if len(steps) > 1:
        raise CheckpointMismatchError(
            f"{files.path}: the param groups have different step counts ({steps}), but megatron steps all groups "
            "together: leave 'optimizer' out of load_contents"
        )
    step = None
    if has_step:
        step = steps.pop() if steps else step_missing(trainer, str(files.path))
    scalers = [state["grad_scaler"] for state in saved if state.get("grad_scaler")]
    return SavedPart(_groups_of(saved), step, scalers[0] if scalers else None)


# -- random states -----------------------------------------------------------------------------------------


def _read_rng(trainer: Trainer, files: TorchDistFiles) -> dict[str, Any]:
    """Reads this rank's random states.

    They are stored by pipeline and tensor rank and, under expert parallelism, also by replica.
    """
    at, sizes = trainer.coordinates, trainer.topology
    replica = at.dp * sizes.cp + at.cp
    by_replica = f"{at.pp}.{at.tp}.{replica}_{sizes.pp}.{sizes.tp}.{sizes.dp * sizes.cp}"
    names = [f"rng_state/shard_{place}" for place in (f"{at.pp}.{at.tp}_{sizes.pp}.{sizes.tp}", by_replica)]
    there = files.object_keys("rng_state/")
    key = next((name for name in names if name in there), None)
    if key is None:
        raise CheckpointMismatchError(
            f"{files.path}: random states: wanted {names[0]}, found {there[:4] or 'none'}: random states can be loaded "
            "only with the tensor and pipeline sizes that they were saved with. Leave 'extra' out of load_contents to "
            "start with fresh ones"
        )
    states = files.read_object(key)
    if isinstance(states, (list, tuple)):
        # The list has one entry, unless data_parallel_random_init gave each data-parallel rank its own seed.
        states = states[at.dp if len(states) > 1 else 0] if states else None
    return rng_from_megatron(states, f"{files.path}: {key}")
