"""Applies a foreign checkpoint: each rank reads it into host memory, all ranks check it, then all ranks apply it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.halves import join_halves, split_halves
from mcore_ckpt.checkpoint.model_facts import DifferentFact, Facts
from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.io.device_waits import wait_for_gpu
from mcore_ckpt.load.same_model import differences_to_live
from mcore_ckpt.load.tensor_fills import describe_rounding, refuse_rounding
from mcore_ckpt.ranks.rounds import Record, decide
from mcore_ckpt.sharding.plan import PARAM
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.common_state import write_common
from mcore_ckpt.state.main_weights import write_mains
from mcore_ckpt.state.model import forget_caches, model_shards
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.param_groups import (
    NO_CHANGES,
    GroupChanges,
    SavedPart,
    Schedules,
    match_groups,
    read_live_groups,
)
from mcore_ckpt.state.quantized import is_quantized
from mcore_ckpt.state.rng import write_rng
from mcore_ckpt.state.scheduler import check_scheduler, schedules_of
from mcore_ckpt.state.trainer import Trainer

KINDS = (PARAM, "exp_avg", "exp_avg_sq")
_NEVER_QUANTIZED = ("word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class ForeignLoad:
    """Result of loading a foreign checkpoint on this rank.

    Attributes:
        step: the training step at which the checkpoint was saved.
        nbytes: the bytes of tensors that this rank read.
        rounded: how many tensors of this rank were rounded; see LoadReport.
        was_quantized: whether the main parameters are more precise than the weights, which were quantized.
        other_model: what the live model computes otherwise with the same tensors.
        groups: what a user is told of the param groups.
        extra_state: always None, because foreign checkpoints have no extra state.
    """

    step: int
    nbytes: int
    rounded: Mapping[str, int]
    was_quantized: bool = False
    other_model: tuple[DifferentFact, ...] = ()
    groups: GroupChanges = NO_CHANGES
    extra_state: None = None


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A parameter, and the flat range `[start, stop)` of the parameter for which this rank owns optimizer state."""

    part: OptimizerPart
    name: str
    parameter: torch.Tensor
    key: torch.Tensor
    main: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class LoadedModelTensor:
    """A live tensor of the model, and the CPU tensor to copy into it."""

    name: str
    live: torch.Tensor
    loaded: torch.Tensor


@dataclass(frozen=True, eq=False)
class LoadedParameter:
    """An owned parameter, and the flat CPU tensors to copy into its main parameter and moments, by kind."""

    owned: OwnedParameter
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class ForeignState:
    """Everything that this rank has read from a foreign checkpoint and not yet applied.

    Attributes:
        step: the training step at which the checkpoint was saved.
        nbytes: the number of bytes of tensors that this rank has read.
        weights: all of the model's tensors on this rank; empty if none are read.
        parameters: main parameters and moments; empty unless the optimizer is loaded.
        parts: param groups, step and scaler of each part of the optimizer; empty unless the optimizer is loaded.
        scheduler: the scheduler's state dict; None unless the optimizer is loaded.
        rng: the states as `state.rng.read_rng` returns them; None unless `extra` is loaded.
        was_quantized: whether the checkpoint says that matrices were quantized, and have what their few bits stand for.
        model: what the checkpoint's model computes with its tensors, as far as the checkpoint says.
        groups: what a user is told of the param groups.
        saved_groups: how many param groups the checkpoint has; 0 if they were not read.
        report: this rank's report as JSON values, which rank 0 checks together with those of the other ranks, or None.
    """

    step: int
    nbytes: int
    weights: tuple[LoadedModelTensor, ...] = ()
    parameters: tuple[LoadedParameter, ...] = ()
    parts: tuple[SavedPart, ...] = ()
    scheduler: dict[str, Any] | None = None
    rng: dict[str, Any] | None = None
    was_quantized: bool = False
    model: Facts = field(default_factory=dict)
    groups: GroupChanges = NO_CHANGES
    saved_groups: int = 0
    report: Record | None = None


def load_together(
    trainer: Trainer, path: Path, read: Callable[[], ForeignState], combine: Callable[[Sequence[Record]], Record]
) -> ForeignLoad:
    """Reads and checks a checkpoint on all ranks, and applies it only if no rank has found an error.

    Args:
        trainer: this rank's trainer.
        path: the checkpoint, for messages.
        read: reads this rank's part of the checkpoint.
        combine: checks, on rank 0, the reports of all ranks.

    Raises:
        CheckpointError: `read` or a check failed on some rank. All ranks raise the same type, and nothing has changed.
    """
    states: list[ForeignState] = []
    other_model: list[DifferentFact] = []

    def look() -> Record:
        states.append(_checked(trainer, path, read()))
        other_model.extend(differences_to_live(trainer, states[0].model))
        return states[0].report or {}

    def write() -> Record:
        _apply(trainer, states[0])
        return {}

    decide(trainer.agreement, f"checking {path}", look, combine)
    decide(trainer.agreement, f"loading {path}", write, lambda _: {})
    rounded = Counter(rounding for rounding in _roundings(states[0]) if rounding is not None)
    state = states[0]
    return ForeignLoad(state.step, state.nbytes, dict(rounded), state.was_quantized, tuple(other_model), state.groups)


def owned_parameters(trainer: Trainer, only_distributed: bool = True) -> list[OwnedParameter]:
    """Lists the parameters, with their flat ranges, for which this rank owns optimizer state.

    Args:
        trainer: this rank's trainer.
        only_distributed: whether the checkpoint has what only a DistributedOptimizer can load.

    Raises:
        UnsupportedError: a part of the optimizer is not megatron's DistributedOptimizer, but has to be.
    """
    names = {id(shard.tensor): shard.key.name for shard in model_shards(trainer.chunks)}
    owned = []
    for part in optimizer_parts(trainer.optimizer):
        if only_distributed and part.inner is not None and not part.is_distributed:
            raise UnsupportedError(
                f"{type(part.megatron).__name__}: this checkpoint's optimizer state can be loaded only into "
                "DistributedOptimizer: set use_distributed_optimizer=True, or leave 'optimizer' out of load_contents"
            )
        owned += [
            OwnedParameter(part, names[id(each.parameter)], each.parameter, each.key, each.main, *each.flat)
            for each in part.mains()
        ]
    return owned


def step_missing(trainer: Trainer, where: str) -> int:
    """Returns the config's `assume_optimizer_step`, for checkpoints that do not store the optimizer's step.

    Raises:
        CheckpointMismatchError: the config does not set it.
    """
    step = trainer.config.assume_optimizer_step
    if step is None:
        raise CheckpointMismatchError(
            f"{where}: has no step count of the optimizer, without which Adam's bias correction is wrong. Set "
            "CheckpointConfig(assume_optimizer_step=N) to the number of steps that the optimizer had done when the "
            "checkpoint was saved (it can differ from the trainer's step), or leave 'optimizer' out of load_contents"
        )
    return step


def rng_from_megatron(state: Any, where: str) -> dict[str, Any]:
    """Converts the random states that megatron's trainer and verl store into the form that `state.rng` uses.

    Raises:
        CheckpointMismatchError: one of the states is missing.
    """
    wanted = ("random_rng_state", "np_rng_state", "torch_rng_state", "rng_tracker_states")
    missing = [name for name in wanted if not isinstance(state, Mapping) or name not in state]
    if missing:
        raise CheckpointMismatchError(
            f"{where}: has no {', '.join(missing)}: leave 'extra' out of load_contents to start with fresh ones"
        )
    name, keys, position, has_gauss, cached = state["np_rng_state"]
    return {
        "python": state["random_rng_state"],
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": state["torch_rng_state"],
        "device": state.get("cuda_rng_state"),
        "megatron": dict(state["rng_tracker_states"]),
    }


# -- checks ------------------------------------------------------------------------------------------------


def _checked(trainer: Trainer, path: Path, state: ForeignState) -> ForeignState:
    """Checks the state against this trainer, and puts its param groups into the order of this optimizer."""
    if "optimizer" not in trainer.config.load_contents:
        return state
    weights = _weights_of(state)
    state = _with_upper_halves(state, weights)
    _check_against_weights(path, state, weights)
    refuse_rounding(trainer, _roundings(state))
    check_scheduler(trainer.lr_scheduler, state.scheduler)
    schedules = schedules_of(trainer.lr_scheduler, state.scheduler)
    parts = optimizer_parts(trainer.optimizer)
    sizes = [len(saved.param_groups or ()) for saved in state.parts]
    matched = [
        _matched(part, saved, schedules, sum(sizes[:number]))
        for number, (part, saved) in enumerate(zip(parts, state.parts, strict=True))
    ]
    kept, replaced = (tuple(chain(*texts)) for texts in zip(*((g.kept, g.replaced) for _, g in matched), strict=True))
    found = tuple(saved for saved, _ in matched)
    return replace(state, parts=found, groups=GroupChanges(kept, replaced), saved_groups=sum(sizes))


def _roundings(state: ForeignState) -> Iterator[str | None]:
    for parameter in state.parameters:
        for kind, loaded in parameter.tensors.items():
            form = parameter.owned.part.form_of(parameter.owned, kind)
            kept = torch.float32 if form.is_halved else form.dtype or loaded.dtype
            yield describe_rounding(kind, loaded.dtype, kept, form.is_scaled)


def _matched(part: OptimizerPart, saved: SavedPart, schedules: Schedules, first: int) -> tuple[SavedPart, GroupChanges]:
    """Returns the saved state of a part in the order of its groups. `first` is the number of the first saved group."""
    stored = [group for group in saved.param_groups or () if group is not None]
    if saved.param_groups is None and part.inner is not None:
        return saved, GroupChanges(tuple(group.describe() for group in read_live_groups(part)))
    places, changes = match_groups(part, stored, schedules)
    groups = [None if place is None else stored[place] for place in places]
    numbers = [None if place is None else first + place for place in places]
    return replace(saved, param_groups=groups, numbers=numbers), changes


def _weights_of(state: ForeignState) -> list[torch.Tensor]:
    """Returns, for each parameter, the weights of the elements that this rank owns: the checkpoint's if it has any."""
    loaded = {id(tensor.live): tensor.loaded for tensor in state.weights}
    return [_weight_of(parameter, loaded) for parameter in state.parameters]


def _weight_of(parameter: LoadedParameter, loaded: Mapping[int, torch.Tensor]) -> torch.Tensor:
    owned, main = parameter.owned, parameter.tensors[PARAM]
    whole = loaded.get(id(owned.parameter))
    if whole is None and is_quantized(owned.parameter):
        return main.to(owned.parameter.dtype)  # this rank has no other values
    whole = owned.parameter.detach() if whole is None else whole
    return whole.cpu().reshape(-1)[owned.start : owned.stop]


def _with_upper_halves(state: ForeignState, weights: Sequence[torch.Tensor]) -> ForeignState:
    """Returns the state with main parameters put together if only their lower halves were stored.

    With `store_param_remainders`, megatron (0.16 to 0.19) stores FusedAdam's remainders as if they were the main
    parameters: as int16, or those numbers as float32. They mean something only beside the bfloat16 weights.
    """
    mains = [parameter.tensors[PARAM] for parameter in state.parameters]
    halved = [pair for pair in zip(mains, weights, strict=True) if pair[1].dtype == torch.bfloat16]
    # No other main parameters are all whole numbers. A single tensor may be: norms begin as ones.
    are_numbers = all(torch.equal(main.to(torch.int16).to(main.dtype), main) for main, _ in halved)
    if not are_numbers or not any(_differing(main.to(weight.dtype), weight) for main, weight in halved):
        return state
    parameters = (
        replace(each, tensors={**each.tensors, PARAM: join_halves(weight, each.tensors[PARAM].to(torch.int16))})
        if weight.dtype == torch.bfloat16
        else each
        for each, weight in zip(state.parameters, weights, strict=True)
    )
    return replace(state, parameters=tuple(parameters))


def _check_against_weights(path: Path, state: ForeignState, weights: Sequence[torch.Tensor]) -> None:
    """Refuses main parameters that are not those of the weights, because they belong to other parameters.

    Main parameters round to the weights, but for matrices that were quantized when they were saved.

    megatron, in every release up to 0.19.2, writes such checkpoints when it saves a `fully_reshardable` optimizer with
    several buckets. It removes the padding at the ends of the buckets from the gathered buffer
    (`get_parameter_state_dp_zero`), but then cuts this buffer at offsets that include the padding
    (`sharded_param_state_fully_reshardable`). So the parameters of all buckets after the first get values of their
    neighbours, and so do their moments. A `dp_reshardable` range also belongs to another parameter if the buckets or
    the pipeline split differ.
    """
    whose = "the checkpoint's weights" if state.weights else "the model's present weights (the checkpoint has none)"
    for parameter, expected in zip(state.parameters, weights, strict=True):
        owned, main = parameter.owned, parameter.tensors[PARAM]
        wrong = _differing(main.to(expected.dtype), expected)
        if wrong and expected.dtype == torch.bfloat16:
            # FusedAdam rounds a value half up beside a remainder, all others to the even neighbour.
            wrong = min(wrong, _differing(split_halves(main.float().contiguous())[0], expected))
        is_matrix = owned.parameter.dim() > 1 and not owned.name.endswith(_NEVER_QUANTIZED)
        may_differ = is_matrix and (state.was_quantized or is_quantized(owned.parameter))
        if wrong and not (may_differ and _is_quantized_from(main, expected)):
            raise CheckpointMismatchError(
                f"{path}: optimizer state of {owned.name}: {wrong} of {expected.numel()} main parameters do not round "
                f"to {whose}, so neither the main parameters nor their moments can be trusted. Either the checkpoint "
                "was saved under other buckets or another layout, or in megatron's fully_reshardable format with "
                "several buckets (in this case every release up to 0.19.2 mixes up parameters, and the lost values "
                "cannot be recovered), or its optimizer kept main parameters of fp16. "
                "Load it with load_contents=('model', 'extra'), or save it again as dp_reshardable"
            )


def _is_quantized_from(main: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns True if a weight can be what 8 or 4 bits have left of its main parameter.

    Between two values of float4_e2m1fn there is up to a third of the larger one, and below the smallest of them a
    twelfth of the largest in the block. Halves of both are allowed. Weights of other parameters differ by more.
    """
    main, weight = main.float(), weight.float()
    largest = main.abs().max() if main.numel() else torch.zeros(())
    return bool(((main - weight).abs() <= main.abs() / 5 + largest / 24).all())


def _differing(found: torch.Tensor, wanted: torch.Tensor) -> int:
    # Compare bits, so that a NaN equals itself and 0 differs from -0.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    return int((found.contiguous().view(bits) != wanted.contiguous().view(bits)).sum())


# -- applying ----------------------------------------------------------------------------------------------


def _apply(trainer: Trainer, state: ForeignState) -> None:
    wait_for_gpu(trainer.agreement.timeout_s)  # kernels in flight may still read the old state
    contents = trainer.config.load_contents
    with torch.no_grad():
        if "model" in contents:
            through_mains = [each for each in state.weights if _is_made_of_main(trainer, each.live)]
            apart = {id(each.live) for each in through_mains}
            for tensor in (each for each in state.weights if id(each.live) not in apart):
                tensor.live.data.copy_(tensor.loaded)
            if through_mains:
                write_mains(trainer.optimizer, [(each.live, each.loaded) for each in through_mains])
            forget_caches(trainer.chunks)
        for parameter in state.parameters:
            _apply_parameter(parameter)
    if "optimizer" in contents:
        write_common(trainer.optimizer, trainer.lr_scheduler, state.parts, state.scheduler, state.saved_groups)
        optimizer_state.refresh(trainer.optimizer)
    if state.rng is not None:
        write_rng(state.rng)


def _is_made_of_main(trainer: Trainer, weight: torch.Tensor) -> bool:
    """Returns True if a weight is quantized from its main parameter once that is loaded."""
    return trainer.optimizer is not None and weight.requires_grad and is_quantized(weight)


def _apply_parameter(parameter: LoadedParameter) -> None:
    owned = parameter.owned
    for kind, loaded in parameter.tensors.items():
        form = owned.part.form_of(owned, kind)
        if form.is_plain:
            target = owned.part.tensor_of(owned, kind, loaded.dtype)
            target.copy_(loaded.view(target.shape))
        else:
            owned.part.encode(owned, kind, loaded.to(owned.main.device, torch.float32))


# -- places in megatron's buffers --------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketRange:
    """Place of an owned range in megatron's gradient buffers, in elements. Padding at the ends of buckets is left out.

    Attributes:
        buffer: the buffer's index in the optimizer's `gbuf_ranges`.
        dtype: megatron's key for the buffer: (parameter dtype, gradient dtype).
        bucket: the bucket's index in the buffer.
        start: the range's offset in the whole bucket, of which each data-parallel rank has a part.
        numel: the number of elements in the bucket.
        before: the number of elements in the buffer's earlier buckets.
    """

    buffer: int
    dtype: Any
    bucket: int
    start: int
    numel: int
    before: int


def bucket_ranges(part: OptimizerPart) -> dict[int, BucketRange]:
    """Returns the place of each owned range, by `id` of the model parameter.

    The same element has the same place under any data-parallel size.
    """
    if part.inner is None:
        return {}
    return {id(parameter): found for parameter, found in _bucket_ranges(part.megatron)}


def _bucket_ranges(optimizer: Any) -> Iterator[tuple[torch.Tensor, BucketRange]]:
    group = optimizer.data_parallel_group
    for buffer, by_dtype in enumerate(optimizer.gbuf_ranges):
        for dtype, maps in by_dtype.items():
            before = 0
            for number, (bucket, ranges) in enumerate(zip(optimizer.buffers[buffer].buckets, maps, strict=True)):
                numel = bucket.numel_unpadded
                own = group.rank() * (bucket.grad_data.numel() // group.size())
                for parameter, where in ranges["param_map"].items():
                    start = own + where["gbuf_local"].start
                    yield parameter, BucketRange(buffer, dtype, number, start, numel, before)
                before += numel
