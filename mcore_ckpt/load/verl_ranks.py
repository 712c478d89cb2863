"""Loads the per-rank folders that verl up to 0.4 wrote: model, optimizer state, random states and scheduler.

The files are read without verl and without megatron's `load_parameter_state` (0.16.1). That function needs Gloo groups
and an optimizer that already has state. It also scatters data that each rank can read by itself.

The same TP, PP, VPP and EP are needed. The file of a data-parallel group is mapped and each rank takes its range. The
optimizer's step is not stored: `assume_optimizer_step` says it. Param groups stay the user's, with rates from the
scheduler. The gradient scaler starts anew. The step is the one in the folder's name, or 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.foreign_pickles import load_safely
from mcore_ckpt.formats.step_folders import step_of
from mcore_ckpt.formats.verl_ranks.kind import model_file, rank_dirs
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
from mcore_ckpt.models.stated_facts import facts_of_folder
from mcore_ckpt.ranks.rounds import Record, decide
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.state.model import unwrap
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.param_groups import SavedPart
from mcore_ckpt.state.trainer import Trainer

_SCHEDULER_FILE = "optimizer_scheduler/optimizer_scheduler.pt"

Place = tuple[int, int, int, int]
"""(pp, tp, cp, dp)"""


@dataclass(frozen=True)
class _Writers:
    """The ranks and folders that have this rank's state if the checkpoint was saved under the present layout.

    Attributes:
        dense: the place of the rank whose file has this rank's dense optimizer state. It is the first rank of this
            rank's data-parallel group.
        experts: the same for the experts' optimizer state.
        rank_dirs: the names of all ranks' model folders.
    """

    dense: Place
    experts: Place
    rank_dirs: frozenset[str]


def load_verl_ranks(trainer: Trainer, path: Path) -> ForeignLoad:
    """Loads a folder of per-rank files. Every rank calls it.

    The step is the number in the folder's name (`global_step_12/actor`), or 0.

    Raises:
        CheckpointMismatchError: the checkpoint was saved under another layout, or lacks something that `load_contents`
            names. Nothing has changed.
        CheckpointCorruptError: a file is missing, is damaged, or contains something other than data. Nothing has
            changed.
    """
    writers = _writers(trainer)
    return load_together(trainer, path, lambda: _read(trainer, path, writers), lambda _: {})


def _writers(trainer: Trainer) -> _Writers:
    def combine(records: Sequence[Record]) -> Record:
        places = [record["place"] for record in records]
        return {"places": places, "rank_dirs": sorted({record["rank_dir"] for record in records})}

    own = {
        "place": list(trainer.coordinates.place),
        "rank_dir": _rank_dir(trainer.coordinates, trainer.topology),
    }
    ranks = decide(trainer.agreement, "finding the ranks that wrote each file", lambda: own, combine)
    dense, experts = (ranks["places"][group[0]] for group in (trainer.replicas.dense, trainer.replicas.experts))
    return _Writers(tuple(dense), tuple(experts), frozenset(ranks["rank_dirs"]))


def _read(trainer: Trainer, path: Path, writers: _Writers) -> ForeignState:
    _check_ranks(trainer.topology, path, writers.rank_dirs)
    contents = trainer.config.load_contents
    weights = tuple(_read_model(trainer, path))
    parameters: tuple[LoadedParameter, ...] = ()
    parts: tuple[SavedPart, ...] = ()
    scheduler = rng = None
    if "optimizer" in contents:
        step = step_missing(trainer, f"{path / 'optim'}")
        parameters = tuple(_read_optimizer(trainer, path, writers))
        parts = tuple(SavedPart(None, step, None) for _ in optimizer_parts(trainer.optimizer))
        scheduler = _read_scheduler(path)
    if "extra" in contents:
        rng = _read_rng(trainer, path)
    nbytes = sum(tensor.loaded.nbytes for tensor in weights)
    nbytes += sum(tensor.nbytes for parameter in parameters for tensor in parameter.tensors.values())
    return ForeignState(step_of(path), nbytes, weights, parameters, parts, scheduler, rng, model=facts_of_folder(path))


# -- layout ------------------------------------------------------------------------------------------------


def _rank_dir(at: RankCoordinates, topology: Topology) -> str:
    """Returns the folder name that megatron's `get_checkpoint_name` gives a rank. It omits pp and ep of size 1."""
    name = f"mp_rank_{at.tp:02d}"
    name += f"_{at.pp:03d}" if topology.pp > 1 else ""
    return name + (f"_{at.ep:03d}" if topology.ep > 1 else "")


def _check_ranks(topology: Topology, path: Path, expected: frozenset[str]) -> None:
    found = rank_dirs(path)
    if set(found) == expected:
        return
    raise CheckpointMismatchError(
        f"{path / 'model'}: was saved on {_describe(list(found.values()))}, this is tp={topology.tp}, "
        f"pp={topology.pp}, ep={topology.ep}: missing {sorted(expected - set(found))[:4]}, "
        f"unexpected {sorted(set(found) - expected)[:4]}. Per-rank checkpoints of verl can be loaded only with the "
        "layout that they were saved with: load this one with that layout, save it with mcore_ckpt, and load the new "
        "checkpoint here"
    )


def _describe(numbers: Sequence[tuple[int, ...]]) -> str:
    sizes = [max(ranks) + 1 for ranks in zip(*numbers, strict=False)]
    names = {1: ("tp",), 2: ("tp", "pp or ep"), 3: ("tp", "pp", "ep")}[len(sizes)]
    return ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


# -- model -------------------------------------------------------------------------------------------------


def _read_model(trainer: Trainer, path: Path) -> Iterator[LoadedModelTensor]:
    file = model_file(path / "model" / _rank_dir(trainer.coordinates, trainer.topology))
    assert file is not None, "rank_dirs has seen it"
    saved = load_safely(file, str(file), mmap=True)
    saved = saved if isinstance(saved, (list, tuple)) else [saved]
    if len(saved) != len(trainer.chunks):
        raise CheckpointMismatchError(
            f"{file}: has {len(saved)} virtual chunks (vpp={len(saved)}), but the model has "
            f"vpp={len(trainer.chunks)}: use the layout that the checkpoint was saved with"
        )
    for number, (chunk, tensors) in enumerate(zip(trainer.chunks, saved, strict=True)):
        yield from _read_chunk(f"{file}: chunk {number}", unwrap(chunk), tensors)


def _read_chunk(where: str, module: torch.nn.Module, saved: Any) -> Iterator[LoadedModelTensor]:
    if not isinstance(saved, Mapping):
        raise CheckpointMismatchError(f"{where}: wanted a state dict, found a {type(saved).__name__}")
    # Older versions of DDP and Float16Module added a prefix to all names in the state dict of the wrapped module.
    found = {_bare(name): value for name, value in saved.items() if isinstance(value, torch.Tensor)}
    found = {name: value for name, value in found.items() if _is_stored(name)}
    wanted = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and _is_stored(name)
    }
    for name in [*wanted, *found]:
        _check_tensor(where, name, wanted.get(name), found.get(name))
    for name, live in wanted.items():
        yield LoadedModelTensor(name, live, found[name].detach())


def _bare(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _is_stored(name: str) -> bool:
    # transformer-engine's _extra_state is a pickle. Delayed scaling alone needs it, and begins its history anew.
    return not name.endswith("_extra_state")


def _check_tensor(where: str, name: str, wanted: torch.Tensor | None, found: torch.Tensor | None) -> None:
    wants, finds = (
        "no such tensor" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}" for tensor in (wanted, found)
    )
    if wants != finds:
        raise CheckpointMismatchError(f"{where}: tensor {name}: wanted {wants}, found {finds}")


# -- optimizer ---------------------------------------------------------------------------------------------


def _read_optimizer(trainer: Trainer, path: Path, writers: _Writers) -> Iterator[LoadedParameter]:
    parts = optimizer_parts(trainer.optimizer)
    owned = owned_parameters(trainer)
    for number, part in enumerate(parts):
        mine = [parameter for parameter in owned if parameter.part.megatron is part.megatron]
        if not mine:
            continue
        file = path / file_names.optimizer_file(*(writers.experts if _is_of_experts(part) else writers.dense))
        buffers = _buffers_of_part(file, number, len(parts))
        ranges = bucket_ranges(part)
        for parameter in mine:
            yield _read_parameter(file, buffers, parameter, ranges[id(parameter.parameter)], part)


def _is_of_experts(part: OptimizerPart) -> bool:
    return any(group.get("is_expert_parallel") for group in part.param_groups)


def _buffers_of_part(file: Path, number: int, parts: int) -> Mapping[Any, Any]:
    """Reads the buffers of one chained optimizer from the file.

    A file of several chained optimizers is a list. It has None for the optimizers that another rank has written.
    """
    if not file.is_file():
        raise CheckpointMismatchError(
            f"{file}: is missing. verl wrote the optimizer state of a data-parallel group only to the file of the "
            "group's first rank. Some versions did not write the experts' state of every expert-parallel rank, and "
            "this state is lost. Leave 'optimizer' out of load_contents"
        )
    saved = load_safely(file, str(file), mmap=True)
    chained = saved if isinstance(saved, (list, tuple)) else [saved]
    if len(chained) != parts or not isinstance(chained[number], Mapping):
        raise CheckpointMismatchError(
            f"{file}: wanted the states of {parts} chained optimizers, and a dict at position {number}, found "
            f"{[type(state).__name__ for state in chained]}: use the layout and the experts that it was saved with"
        )
    buffers: Mapping[Any, Any] = chained[number]
    if not buffers.get("buckets_coalesced"):
        raise CheckpointMismatchError(
            f"{file}: is in the format that megatron wrote before February 2024, which is not supported: load it with "
            "a newer megatron and save it again"
        )
    return buffers


def _read_parameter(
    file: Path, buffers: Mapping[Any, Any], owned: OwnedParameter, where: BucketRange, part: OptimizerPart
) -> LoadedParameter:
    tensors = buffers.get(where.buffer, {}).get(where.dtype)
    if not isinstance(tensors, Mapping) or any(not isinstance(tensors.get(kind), torch.Tensor) for kind in KINDS):
        raise CheckpointMismatchError(
            f"{file}: optimizer state of {owned.name}: wanted buffer {where.buffer} of {where.dtype}, found "
            f"{[(key, list(value)) for key, value in buffers.items() if isinstance(value, Mapping)]}: use the dtypes "
            "that it was saved with"
        )
    wanted = part.megatron.buffers[where.buffer].numel_unpadded
    first = where.before + where.start
    last = first + owned.stop - owned.start
    result = {}
    for kind in KINDS:
        if tensors[kind].shape != (wanted,):
            raise CheckpointMismatchError(
                f"{file}: optimizer state of {owned.name}: {kind}: wanted a buffer of {wanted} elements, found "
                f"{list(tensors[kind].shape)}: use the model, the layout and the bucket size that it was saved with"
            )
        result[kind] = tensors[kind][first:last]
    return LoadedParameter(owned, result)


# -- the small files ---------------------------------------------------------------------------------------


def _read_scheduler(path: Path) -> dict[str, Any] | None:
    file = path / _SCHEDULER_FILE
    if not file.is_file():
        return None  # check_scheduler refuses this if the trainer has a scheduler
    state = load_safely(file, str(file))
    if not isinstance(state, dict):
        raise CheckpointMismatchError(f"{file}: wanted the state of an LR scheduler, found a {type(state).__name__}")
    return state


def _read_rng(trainer: Trainer, path: Path) -> dict[str, Any]:
    file = path / file_names.rng_file(*trainer.coordinates.place)
    if not file.is_file():
        raise CheckpointMismatchError(
            f"{file}: is missing: this rank's random states were not saved (was the data-parallel size different?). "
            "Leave 'extra' out of load_contents to start with fresh ones"
        )
    states = load_safely(file, str(file))
    if isinstance(states, (list, tuple)):
        # The list has one entry, unless data_parallel_random_init gave each data-parallel rank its own seed.
        states = states[trainer.coordinates.dp if len(states) > 1 else 0] if states else None
    return rng_from_megatron(states, str(file))
