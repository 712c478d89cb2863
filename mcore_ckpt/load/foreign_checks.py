"""Checks another program's checkpoint against the trainer, after the ranks have read it and before anything changes.

The formats of other programs have no CRCs. Instead, the checks demand that every main parameter rounds to its weight.
In this way the checks find optimizer state of another run, of other buckets, or of another pipeline split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.halves import join_halves, split_halves
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.foreign_state import FoundPart, FoundWeight
from mcore_ckpt.load.live_training import OwnedParameter
from mcore_ckpt.load.tensor_fills import describe_rounding
from mcore_ckpt.sharding.plan import PARAM
from mcore_ckpt.state.optimizers.hybrid_device import ARGUMENTS
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.param_groups import GroupChanges, SavedPart, Schedules, match_groups, read_live_groups
from mcore_ckpt.state.quantized import is_quantized

_NEVER_QUANTIZED = ("word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, eq=False)
class LoadedParameter:
    """An owned parameter, and the flat CPU tensors to copy into its main parameter and moments, by kind."""

    owned: OwnedParameter
    tensors: Mapping[str, torch.Tensor]

    def roundings(self) -> Iterator[str | None]:
        """Yields, for each tensor, how its values are rounded; None if no value is rounded."""
        for kind, loaded in self.tensors.items():
            form = self.owned.part.form_of(self.owned, kind)
            kept = torch.float32 if form.is_halved else form.dtype or loaded.dtype
            yield describe_rounding(kind, loaded.dtype, kept, form.is_scaled)


@dataclass(frozen=True)
class MatchedGroups:
    """The saved state of the chained optimizers in the order of their live param groups.

    Attributes:
        parts: the state of each part.
        changes: the messages to the user about the param groups.
        count: how many param groups the checkpoint has; 0 if none are stored.
    """

    parts: tuple[SavedPart, ...]
    changes: GroupChanges
    count: int


def match_parts(parts: Sequence[OptimizerPart], found: Sequence[FoundPart], schedules: Schedules) -> MatchedGroups:
    """Puts the stored param groups into the order of this trainer's groups.

    Raises:
        CheckpointMismatchError: a group has no counterpart.
    """
    sizes = [len(part.param_groups or ()) for part in found]
    matched = [
        _matched(part, stored, schedules, sum(sizes[:number]))
        for number, (part, stored) in enumerate(zip(parts, found, strict=True))
    ]
    kept, replaced = (tuple(chain(*texts)) for texts in zip(*((g.kept, g.replaced) for _, g in matched), strict=True))
    return MatchedGroups(tuple(saved for saved, _ in matched), GroupChanges(kept, replaced), sum(sizes))


def _matched(part: OptimizerPart, found: FoundPart, schedules: Schedules, first: int) -> tuple[SavedPart, GroupChanges]:
    """Returns the saved state of a part in the order of the part's live groups.

    `first` is the number of the part's first saved group.
    """
    saved = SavedPart(None, found.step, found.grad_scaler)
    if found.param_groups is None and part.inner is not None:
        return saved, GroupChanges(tuple(group.describe() for group in read_live_groups(part)))
    stored = [_without_arguments(group) for group in found.param_groups or ()]
    places, changes = match_groups(part, stored, schedules)
    groups = [None if place is None else stored[place] for place in places]
    numbers = [None if place is None else first + place for place in places]
    return replace(saved, param_groups=groups, numbers=numbers), changes


def _without_arguments(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ARGUMENTS}


def checked_parameters(
    path: Path, weights: Sequence[FoundWeight], parameters: Sequence[LoadedParameter], was_quantized: bool
) -> tuple[LoadedParameter, ...]:
    """Checks that main parameters belong to the weights. Returns the parameters, with stored halves completed.

    Args:
        path: the checkpoint, for messages.
        weights: the checkpoint's weights of this rank. If there are none, the model's present weights are compared.
        parameters: the values that were read for each owned range.
        was_quantized: whether the checkpoint's matrices were quantized.

    Raises:
        CheckpointMismatchError: main parameters do not belong to the weights.
    """
    loaded = {id(weight.live): weight.loaded for weight in weights}
    expected = [_weight_of(parameter, loaded) for parameter in parameters]
    whole = _with_upper_halves(parameters, expected)
    whose = "the checkpoint's weights" if weights else "the model's present weights (the checkpoint has none)"
    for parameter, weight in zip(whole, expected, strict=True):
        _check_main(path, parameter, weight, was_quantized, whose)
    return whole


def _weight_of(parameter: LoadedParameter, loaded: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Returns the weights of the elements that this rank owns, from the checkpoint, or else from the model."""
    owned, main = parameter.owned, parameter.tensors[PARAM]
    whole = loaded.get(id(owned.parameter))
    if whole is None and is_quantized(owned.parameter):
        return main.to(owned.parameter.dtype)  # there is no weight to compare, so the check must pass
    whole = owned.parameter.detach() if whole is None else whole
    return whole.cpu().reshape(-1)[owned.start : owned.stop]


def _with_upper_halves(
    parameters: Sequence[LoadedParameter], weights: Sequence[torch.Tensor]
) -> tuple[LoadedParameter, ...]:
    """If only the lower halves of main parameters were stored, adds the upper halves from the weights.

    With `store_param_remainders`, megatron (0.16 to 0.19) stores FusedAdam's remainders as if they were the main
    parameters: as int16, or as the same numbers in float32. The remainders have a meaning only together with the
    bfloat16 weights.
    """
    pairs = [(each, weight) for each, weight in zip(parameters, weights, strict=True)]
    halved = [(each.tensors[PARAM], weight) for each, weight in pairs if weight.dtype == torch.bfloat16]
    # Remainders are whole numbers. A single tensor of main parameters may also have only whole numbers (norms begin as
    # ones), so all tensors are looked at.
    are_numbers = all(torch.equal(main.to(torch.int16).to(main.dtype), main) for main, _ in halved)
    if not are_numbers or not any(_differing(main.to(weight.dtype), weight) for main, weight in halved):
        return tuple(parameters)
    return tuple(
        replace(each, tensors={**each.tensors, PARAM: join_halves(weight, each.tensors[PARAM].to(torch.int16))})
        if weight.dtype == torch.bfloat16
        else each
        for each, weight in pairs
    )


def _check_main(path: Path, parameter: LoadedParameter, weight: torch.Tensor, was_quantized: bool, whose: str) -> None:
    """Refuses a main parameter that belongs to another weight.

    A main parameter rounds to its weight, unless the weight is a matrix that was quantized at the save.

    megatron, in every release up to 0.19.2, writes wrong main parameters when it saves a `fully_reshardable` optimizer
    with several buckets. It removes the padding at the ends of the buckets from the gathered buffer
    (`get_parameter_state_dp_zero`), but then cuts this buffer at offsets that include the padding
    (`sharded_param_state_fully_reshardable`). So in all buckets after the first, main parameters and moments get values
    of neighbouring parameters. A `dp_reshardable` range also belongs to another parameter if the buckets or the
    pipeline split have changed since the save.
    """
    owned, main = parameter.owned, parameter.tensors[PARAM]
    wrong = _differing(main.to(weight.dtype), weight)
    if wrong and weight.dtype == torch.bfloat16:
        # Accept both roundings of a value that is halfway between two neighbours. FusedAdam with remainders rounds
        # such a value up. All other optimizers round such a value to the even neighbour.
        wrong = min(wrong, _differing(split_halves(main.float().contiguous())[0], weight))
    is_matrix = owned.parameter.dim() > 1 and not owned.name.endswith(_NEVER_QUANTIZED)
    may_differ = is_matrix and (was_quantized or is_quantized(owned.parameter))
    if wrong and not (may_differ and _is_quantized_from(main, weight)):
        raise CheckpointMismatchError(
            f"{path}: optimizer state of {owned.name}: {wrong} of {weight.numel()} main parameters do not round "
            f"to {whose}, so neither the main parameters nor their moments can be trusted. Either the checkpoint "
            "was saved under other buckets or another layout, or in megatron's fully_reshardable format with "
            "several buckets (in this case every release up to 0.19.2 mixes up parameters, and the lost values "
            "cannot be recovered), or its optimizer kept main parameters of fp16. "
            "Load the checkpoint with load_contents=('model', 'extra'), or save it again as dp_reshardable"
        )


def _is_quantized_from(main: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns True if a weight can come from quantizing its main parameter to 8 or 4 bits.

    Neighbouring values of float4_e2m1fn differ by up to a third of the larger value; the smallest positive value and 0
    differ by a twelfth of the largest value in the block. Rounding changes a value by at most half of such a
    difference: by a fifth of the value itself, or by a 24th of the largest value. The sum of both is allowed. Weights
    of other parameters differ by more.
    """
    main, weight = main.float(), weight.float()
    largest = main.abs().max() if main.numel() else torch.zeros(())
    return bool(((main - weight).abs() <= main.abs() / 5 + largest / 24).all())


def _differing(found: torch.Tensor, wanted: torch.Tensor) -> int:
    # Compare bits, so that a NaN equals itself and 0 differs from -0.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    return int((found.contiguous().view(bits) != wanted.contiguous().view(bits)).sum())
