"""Loads another program's checkpoint: each rank reads its part into host memory, all ranks check, then all apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.model_facts import DifferentFact
from mcore_ckpt.formats.foreign_state import ForeignState, FoundWeight, LiveTraining, OwnedRange
from mcore_ckpt.formats.kinds import kinds_by_name
from mcore_ckpt.io.device_waits import wait_for_gpu
from mcore_ckpt.load.foreign_checks import LoadedParameter, MatchedGroups, checked_parameters, match_parts
from mcore_ckpt.load.foreign_weights import WeightsAlone
from mcore_ckpt.load.live_training import OwnedParameter, describe_training, find_writers
from mcore_ckpt.load.same_model import differences_to_live
from mcore_ckpt.load.tensor_fills import refuse_rounding
from mcore_ckpt.load.together import plan_together
from mcore_ckpt.models.stated_facts import facts_of_folder
from mcore_ckpt.ranks.rounds import Record, decide
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.common_state import write_common
from mcore_ckpt.state.main_weights import write_mains
from mcore_ckpt.state.model import forget_caches
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.param_groups import NO_CHANGES, GroupChanges
from mcore_ckpt.state.quantized import is_quantized
from mcore_ckpt.state.rng import check_rng, write_rng
from mcore_ckpt.state.scheduler import check_scheduler, schedules_of
from mcore_ckpt.state.trainer import Trainer


@dataclass(frozen=True)
class ForeignLoad:
    """Result of loading a foreign checkpoint on this rank.

    Attributes:
        step: the training step at which the checkpoint was saved.
        nbytes: the number of bytes that this rank read from tensors.
        rounded: for each kind of rounding, the number of this rank's rounded tensors; see LoadReport.
        was_quantized: whether the checkpoint says that the training quantized weights. The stored weights are then
            dequantized values, and the main parameters are more precise. So if the optimizer is loaded, the caller
            makes the live weights from the main parameters.
        other_model: the facts in which the live and the saved model differ, so that the two models compute different
            results with the same tensors.
        groups: the messages to the user about the param groups.
    """

    step: int
    nbytes: int
    rounded: Mapping[str, int]
    was_quantized: bool
    other_model: tuple[DifferentFact, ...]
    groups: GroupChanges


@dataclass(frozen=True, eq=False)
class _Plan:
    """Everything that this rank has read and checked but not applied yet.

    Attributes:
        state: the checkpoint.
        weights: all of the model's tensors on this rank; empty if none are read.
        parameters: main parameters and moments; empty unless the optimizer is loaded.
        groups: param groups, steps and scalers; None unless the optimizer is loaded.
        scheduler: the scheduler's state dict; None unless the optimizer is loaded.
        rng: the random states; None unless `extra` is loaded.
        other_model: as in ForeignLoad.
    """

    state: ForeignState
    weights: Sequence[FoundWeight]
    parameters: Sequence[LoadedParameter] = ()
    groups: MatchedGroups | None = None
    scheduler: dict[str, Any] | None = None
    rng: dict[str, Any] | None = None
    other_model: list[DifferentFact] = field(default_factory=list)

    def roundings(self) -> Iterator[str]:
        of_parameters = (rounding for each in self.parameters for rounding in each.roundings())
        yield from (
            each for each in (*(weight.rounding for weight in self.weights), *of_parameters) if each is not None
        )

    def result(self) -> ForeignLoad:
        state, changes = self.state, NO_CHANGES if self.groups is None else self.groups.changes
        rounded, other = dict(Counter(self.roundings())), tuple(self.other_model)
        return ForeignLoad(state.step, state.nbytes, rounded, state.was_quantized, other, changes)


def load_foreign(trainer: Trainer, kind_name: str, path: Path) -> ForeignLoad:
    """Loads a checkpoint of another program. Every rank must call this function.

    Args:
        trainer: this rank's trainer.
        kind_name: the name of the checkpoint's kind.
        path: the absolute path of the checkpoint's folder.

    Raises:
        CheckpointMismatchError: the checkpoint does not fit, lacks something that `load_contents` names, or has an
            optimizer state that does not belong to the weights. All ranks raise it, and nothing has changed.
        CheckpointCorruptError: a file is missing, is damaged, or contains something other than data. All ranks raise
            it, and nothing has changed.
        UnsupportedError: the state is stored in an unsupported form. All ranks raise it, and nothing has changed.
    """
    kind = kinds_by_name()[kind_name]
    # Either all ranks call `find_writers`, or none does, because all have got the same kind from rank 0.
    writers = find_writers(trainer) if kind.needs_writers else None

    def plan() -> tuple[_Plan, Record]:
        training = describe_training(trainer, path, writers)
        state = kind.open_state(path, training) or WeightsAlone(trainer, kind, path)
        own = _read(trainer, training, state, path)
        return own, state.report()

    def check(own: _Plan, reports: Sequence[Record]) -> Record:
        own.state.check(reports)
        return {}

    own, _ = plan_together(trainer.agreement, f"checking {path}", plan, check)

    def write() -> Record:
        _apply(trainer, own)
        return {}

    decide(trainer.agreement, f"loading {path}", write, lambda _: {})
    return own.result()


def _read(trainer: Trainer, training: LiveTraining, state: ForeignState, path: Path) -> _Plan:
    """Reads this rank's part into host memory, and checks it against the trainer."""
    contents = trainer.config.load_contents
    weights = state.weights()
    found = state.optimizer(weights) if "optimizer" in contents else ()
    scheduler = state.scheduler() if "optimizer" in contents else None
    rng = state.rng() if "extra" in contents else None
    parameters: Sequence[LoadedParameter] = ()
    groups = None
    if "optimizer" in contents:
        read = [
            LoadedParameter(_owned(owned), tensors)
            for part, stored in zip(training.parts, found, strict=True)
            for owned, tensors in zip(part.ranges, stored.tensors, strict=True)
        ]
        parameters = checked_parameters(path, weights, read, state.was_quantized)
        check_scheduler(trainer.lr_scheduler, scheduler)
        schedules = schedules_of(trainer.lr_scheduler, scheduler)
        groups = match_parts(optimizer_parts(trainer.optimizer), found, schedules)
    if rng is not None:
        check_rng(rng, str(path))
    other_model = differences_to_live(trainer, state.facts or facts_of_folder(path))
    plan = _Plan(state, weights, parameters, groups, scheduler, rng, other_model)
    refuse_rounding(trainer, plan.roundings())
    return plan


def _owned(found: OwnedRange) -> OwnedParameter:
    assert isinstance(found, OwnedParameter), "describe_training has made it"
    return found


# -- applying ----------------------------------------------------------------------------------------------


def _apply(trainer: Trainer, plan: _Plan) -> None:
    wait_for_gpu(trainer.agreement.timeout_s)  # kernels in flight may still read the old state
    with torch.no_grad():
        if "model" in trainer.config.load_contents:
            _apply_weights(trainer, plan.weights)
        for parameter in plan.parameters:
            _apply_parameter(parameter)
    if plan.groups is not None:
        write_common(trainer.optimizer, trainer.lr_scheduler, plan.groups.parts, plan.scheduler, plan.groups.count)
        optimizer_state.refresh(trainer.optimizer)
    if plan.rng is not None:
        write_rng(plan.rng)


def _apply_weights(trainer: Trainer, weights: Sequence[FoundWeight]) -> None:
    through_mains = []
    for weight in weights:
        if trainer.optimizer is not None and weight.live.requires_grad and is_quantized(weight.live):
            # Set only the main parameter. The caller of `load_foreign` makes the quantized weight from it later.
            through_mains.append((weight.live, weight.loaded))
        else:
            weight.live.data.copy_(weight.loaded)
    if through_mains:
        write_mains(trainer.optimizer, through_mains)
    forget_caches(trainer.chunks)


def _apply_parameter(parameter: LoadedParameter) -> None:
    owned = parameter.owned
    for kind, loaded in parameter.tensors.items():
        form = owned.part.form_of(owned, kind)
        if form.is_plain:
            target = owned.part.tensor_of(owned, kind, loaded.dtype)
            target.copy_(loaded.view(target.shape))
        else:
            owned.part.encode(owned, kind, loaded.to(owned.main.device, torch.float32))
