"""Reads the optimizer's state from a torch_dist checkpoint.

A `fully_reshardable` or `fully_sharded_model_space` optimizer loads under any layout (`fully_sharded_model_space` only
with the same padding of the vocabulary). A `dp_reshardable` optimizer loads only under the saved layout, except that
the data-parallel size may differ. The state of optimizers other than DistributedOptimizer (replicated Adam, Muon and
similar ones, layer-wise or not) is stored tensor by tensor, in the model's shapes. Such state loads under any layout,
also into a DistributedOptimizer of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.foreign_state import (
    ADAM_KINDS,
    BucketRange,
    FoundPart,
    FoundWeight,
    LivePart,
    LiveTraining,
    ModelTensor,
    OwnedRange,
)
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.stored_keys import StoredKeys
from mcore_ckpt.sharding.plan import PARAM

_FULLY_RESHARDABLE = "fully_reshardable"
_DP_RESHARDABLE = "dp_reshardable"
# This form was megatron's default until 0.15, and 0.16 no longer has it. As with `fully_reshardable`, each tensor of
# such a state can be read in the model's shape.
_MODEL_SPACE = "fully_sharded_model_space"
# megatron names a form only for DistributedOptimizer. In the state of any other optimizer, the form is None, and each
# tensor has the model's shape.
_BY_PARAMETER = "None"
# `fully_reshardable` calls main parameters by the first name, Float16OptimizerWithFloat16Params by the second name.
MAIN_NAMES = (PARAM, "fp32_param")
# The name of the parameters that HybridDeviceOptimizer updates. After a load by megatron, such a parameter can differ
# from the stored main parameter, which is only a copy. So `_Buckets` reads the parameter that HybridDeviceOptimizer
# updates.
_INNER = "master_param"
# The settings of param groups that show the kind of an optimizer. Adam has `betas` and `eps`, Lion only `betas`, Muon
# has `momentum`. The other settings belong to SGD, AdaptiveMuon and SOAP.
_KIND_SETTINGS = {"betas", "eps", "momentum", "beta2", "nesterov", "dampening", "shampoo_beta"}

Stored = Mapping[str, Any]
"""The state of one saved optimizer except tensors: param groups, scaler, `param_state_sharding_type`."""


def read_optimizer(
    files: TorchDistFiles,
    keys: StoredKeys,
    training: LiveTraining,
    tensors: Sequence[ModelTensor],
    weights: Sequence[FoundWeight],
) -> list[FoundPart]:
    """Reads the state of each chained optimizer on this rank.

    Raises:
        CheckpointMismatchError, CheckpointCorruptError, UnsupportedError: see `ForeignState`.
    """
    saved = _saved_parts(files.path, files.common.get("optimizer"))
    if _are_buckets(files.path, saved):
        training.require_distributed()
        if keys.are_other_layers:
            raise CheckpointMismatchError(
                f"{files.path}: the model has the checkpoint's parts in other layers (GPTModel and HybridModel), but a "
                f"{_DP_RESHARDABLE} optimizer state can be loaded only into the same layers: save it as "
                f"{_FULLY_RESHARDABLE}, or leave 'optimizer' out of load_contents"
            )
        buckets = _Buckets(files, training)
        return [buckets.read_part(number, part) for number, part in enumerate(training.parts)]
    by_parameter = _Parameters(
        files,
        keys,
        training,
        saved,
        {id(tensor.live): tensor for tensor in tensors},
        {id(weight.live): weight.loaded for weight in weights},
    )
    return [by_parameter.read_part(part) for part in training.parts]


def _saved_parts(path: Path, saved: Any) -> list[Stored]:
    """Returns the state of each chained optimizer. `saved` is the optimizer's entry in the state that all ranks share.

    The entry is one state if there is one optimizer, or a dict or list of states if there are several. Chains may nest.
    """
    if isinstance(saved, Mapping) and saved and set(saved) == set(range(len(saved))):
        saved = [saved[number] for number in range(len(saved))]
    if isinstance(saved, (list, tuple)) and saved:
        return [state for each in saved for state in _saved_parts(path, each)]
    if not isinstance(saved, Mapping):
        raise CheckpointMismatchError(
            f"{path}: has no optimizer state: leave 'optimizer' out of load_contents if it was not saved"
        )
    # FP32Optimizer stores the state of its inner optimizer directly, so this state is wrapped here as other optimizers
    # wrap theirs. Our conversion (`for_trainers`) writes both forms into one dict, which is used unchanged.
    return [saved if "param_groups" not in saved or "optimizer" in saved else {"optimizer": saved}]


def _are_buckets(path: Path, saved: Sequence[Stored]) -> bool:
    """Returns True if the state is stored by megatron's buckets, False if each tensor has the model's shape."""
    found = {str(state.get("param_state_sharding_type")) for state in saved}
    if found <= {_FULLY_RESHARDABLE, _MODEL_SPACE, _BY_PARAMETER}:
        return False
    if found == {_DP_RESHARDABLE}:
        return True
    raise UnsupportedError(
        f"{path}: the optimizer state is stored as {', '.join(sorted(found - {_BY_PARAMETER}))}. For a "
        f"DistributedOptimizer, only {_FULLY_RESHARDABLE} can be read, or {_DP_RESHARDABLE} if all optimizers are "
        "stored in this form. Save it again in one of these forms, or leave 'optimizer' out of load_contents"
    )


@dataclass(frozen=True, eq=False)
class _Parameters:
    """Optimizer state that is stored in the model's shapes.

    Attributes:
        files, keys, training: see `read_optimizer`.
        saved: the state of each saved optimizer.
        tensors: the model's tensors, by the `id` of the live tensor.
        weights: the checkpoint's weights, by the `id` of the live tensor.
    """

    files: TorchDistFiles
    keys: StoredKeys
    training: LiveTraining
    saved: Sequence[Stored]
    tensors: Mapping[int, ModelTensor]
    weights: Mapping[int, torch.Tensor]

    def read_part(self, part: LivePart) -> FoundPart:
        tensors = [self._read_range(part, owned) for owned in part.ranges]
        if part.is_empty:
            return FoundPart(tensors, step=0)
        alike = _of_the_same_kind(part, self.saved)
        return _found_part(self.training, self.files, alike, tensors, _groups_for(part, _groups_of(alike)), part)

    def _read_range(self, part: LivePart, owned: OwnedRange) -> dict[str, torch.Tensor]:
        """Reads a parameter's state, which has the model's shape, and keeps the range that this rank owns."""
        if owned.has_bound_state:
            raise UnsupportedError(
                f"optimizer state of {owned.name}: {part.kind_name} has state of another shape than the parameter's, "
                "but megatron cannot store such state in torch_dist: leave 'optimizer' out of load_contents"
            )
        tensor = self.tensors[id(owned.parameter)]
        weight = self.weights.get(id(owned.parameter), owned.parameter.detach()).cpu()
        found = {}
        for kind in (PARAM, *part.moments):
            names = self._names_of(kind, tensor.key)
            name = next((name for name in names if any(map(self.keys.has, tensor.keys(name)))), None)
            # Rows that pad the vocabulary need not be stored. In rows that are not stored, main parameters start from
            # the weights, and moments start at zero.
            whole = weight.to(torch.float32, copy=True) if kind == PARAM else torch.zeros(owned.parameter.shape)
            # An fp32 weight can be its own main parameter, and then no main parameter is stored. In this case the
            # weight is used.
            if name is not None or kind != PARAM or weight.dtype != torch.float32:
                whole = tensor.fill(name or names[0], whole, self.keys.read)
            found[kind] = whole.reshape(-1)[owned.start : owned.stop].clone()
        return found

    def _names_of(self, kind: str, key: str) -> list[str]:
        """Returns the keys under which a tensor's state can be stored.

        `ChainedOptimizer.sharded_state_dict` (0.16.1) puts the number of the part into the key if there are several
        parts. Under another layout, a tensor can belong to a part with another number, so the tensor's key can have the
        number of any saved part.
        """
        prefixes = ["", *(f"chained_{number}." for number in range(len(self.saved)))]
        kinds = MAIN_NAMES if kind == PARAM else (kind,)
        return [f"{prefix}optimizer.state.{stored}.{key}" for stored in kinds for prefix in prefixes]


@dataclass(frozen=True, eq=False)
class _Buckets:
    """`dp_reshardable` state, which is stored by megatron's buckets."""

    files: TorchDistFiles
    training: LiveTraining

    def read_part(self, number: int, part: LivePart) -> FoundPart:
        prefix = f"chained_{number}." if len(self.training.parts) > 1 else ""
        # This key belongs to this rank's combination of pipeline, tensor and expert ranks.
        group_key = f"{prefix}optimizer.distributed.dp_group_idx_{part.group_index}"
        places = part.bucket_ranges()
        tensors = [self._read_range(group_key, *each) for each in zip(part.ranges, places, strict=True)]
        if part.is_empty:
            return FoundPart(tensors, step=0)
        optimizer = self.files.read_object(f"{group_key}.optimizer/shard_0_1")
        scaler_keys = self.files.object_keys(f"{group_key}.grad_scaler/")
        scaler = self.files.read_object(scaler_keys[0]) if scaler_keys else None
        saved = [{"optimizer": optimizer, "grad_scaler": scaler}]
        return _found_part(self.training, self.files, saved, tensors, _groups_of(saved))

    def _read_range(self, group_key: str, owned: OwnedRange, where: BucketRange) -> dict[str, torch.Tensor]:
        key = f"{group_key}.gbuf_idx_{where.buffer}.dtype_{where.dtype}.bucket_idx_{where.bucket}"
        tensors = {}
        inner = (_INNER,) if self.files.dtype_of(f"{key}.{_INNER}") is not None else ()
        for kind in (*ADAM_KINDS, *inner):
            stored = self.files.dtype_of(f"{key}.{kind}") or torch.float32
            tensors[kind] = torch.empty(owned.stop - owned.start, dtype=stored)
            try:
                self.files.read(WantedPart(f"{key}.{kind}", (where.numel,), (where.start,), tensors[kind]))
            except CheckpointMismatchError as error:
                raise CheckpointMismatchError(
                    f"{error}. A {_DP_RESHARDABLE} optimizer state can be loaded only with the saved tensor, pipeline "
                    "and expert layout and the saved bucket sizes: use these, load only the model, or save the "
                    f"optimizer as {_FULLY_RESHARDABLE}"
                ) from None
        tensors[PARAM] = tensors.pop(_INNER, tensors[PARAM])
        return tensors


# -- param groups ------------------------------------------------------------------------------------------


def _of_the_same_kind(part: LivePart, saved: Sequence[Stored]) -> Sequence[Stored]:
    """Returns the saved parts whose optimizer has the same kind as `part`; if there are none, all saved parts.

    The settings in the param groups show the kind.
    """
    own = _kind_settings(part.param_groups)
    return [state for state in saved if _kind_settings(_stored_groups(state)) == own] or saved


def _kind_settings(groups: Sequence[Mapping[str, Any]]) -> set[str]:
    return {key for group in groups for key in group if key in _KIND_SETTINGS}


def _groups_for(part: LivePart, saved: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Selects the saved groups that belong to a part. A part has either the experts' groups or all other groups.

    megatron separates the experts' groups only under expert parallelism. If no saved group belongs to the part, the
    saved groups were not separated, and all of them are used for the part.
    """
    field, wanted = "is_expert_parallel", part.is_of_experts
    return [group for group in saved if bool(group.get(field)) == wanted] or [{**g, field: wanted} for g in saved]


def _stored_groups(state: Stored) -> Sequence[Mapping[str, Any]]:
    groups: Sequence[Mapping[str, Any]] = (state.get("optimizer") or {}).get("param_groups", ())
    return groups


def _groups_of(saved: Sequence[Stored]) -> list[dict[str, Any]]:
    """Returns the fields of the param groups of all saved parts, except the step and the parameters."""
    groups = (group for state in saved for group in _stored_groups(state))
    return [{key: value for key, value in group.items() if key not in ("step", "params")} for group in groups]


def _found_part(
    training: LiveTraining,
    files: TorchDistFiles,
    saved: Sequence[Stored],
    tensors: Sequence[Mapping[str, torch.Tensor]],
    groups: Sequence[Mapping[str, Any]],
    part: LivePart | None = None,
) -> FoundPart:
    """Returns a part with its step and scaler. `part` is the live part; None stands for a part that counts steps."""
    stored = [group for state in saved for group in _stored_groups(state)]
    if not stored:
        raise CheckpointMismatchError(
            f"{files.path}: has no param groups of the optimizer: leave 'optimizer' out of load_contents"
        )
    steps = {group["step"] for group in stored if group.get("step") is not None}
    # Float16OptimizerWithFloat16Params and FP32Optimizer store the step outside of the param groups, as a number or a
    # tensor.
    common = ((state.get("optimizer") or {}).get("state") for state in saved)
    steps |= {int(each["common_step"]) for each in common if isinstance(each, Mapping) and "common_step" in each}
    if len(steps) > 1:
        raise CheckpointMismatchError(
            f"{files.path}: the param groups have different step counts ({steps}), but megatron steps all groups "
            "together: leave 'optimizer' out of load_contents"
        )
    step = None
    if part is None or part.has_step:
        step = steps.pop() if steps else training.step_instead(files.path)
    scalers = [state["grad_scaler"] for state in saved if state.get("grad_scaler")]
    return FoundPart(tensors, groups, step, scalers[0] if scalers else None)
