"""Makes the state that all ranks share, in megatron's form: optimizer, LR scheduler, counters and arguments.

The shared state of an optimizer differs between megatron's classes (megatron-core 0.16 to 0.19), and a checkpoint of
this package does not say which class it comes from. So one dict has the fields of all three classes:

- `DistributedOptimizer.load_state_dict`: `optimizer.param_groups` with a `step` in each group,
  `param_state_sharding_type`, `grad_scaler`
- `Float16OptimizerWithFloat16Params.load_state_dict`: `optimizer.param_groups`, `optimizer.state.common_step`,
  `grad_scaler`
- `FP32Optimizer.load_state_dict`: `param_groups`, `state.common_step`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.state.group_fields import are_same, field_of, marks, settings
from mcore_ckpt.state.scheduler import saved_scheduler
from mcore_ckpt.state.typed_values import from_stored

# This form of `DistributedOptimizer.sharded_state_dict` loads under any layout, in megatron 0.16 to 0.19.
SHARDING_TYPE = "fully_reshardable"
# Trainers build their `sharded_state_dict` with these flags (Megatron-LM's `load_checkpoint`, verl's
# `_load_content_metadata`).
CONTENT_METADATA: Mapping[str, Any] = {
    "distrib_optim_sharding_type": SHARDING_TYPE,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}
# The key under which our `save_checkpoint` (integrations/megatron) keeps the state of Megatron's loop in extra_state.
LOOP = "megatron"
COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
# For `set_checkpoint_version`: for versions below 3.0 Megatron-LM would reorder query, key and value.
_CHECKPOINT_VERSION = 3.0
# Megatron cannot load these optimizers: `get_megatron_optimizer` makes them without the `init_state_fn` that
# `sharded_state_dict(is_loading=True)` calls.
_NOT_LOADED = {"SGD", "FusedSGD"}
# This field of a param group is True if its parameters belong to experts that have separate process groups.
_EXPERT_FIELD = "is_expert_parallel"
# Megatron matches saved param groups with the run's groups by these fields and by the fields that `marks` returns
# (`param_group_identifier_keys`, 0.16 to 0.18).
_IDENTIFIERS = ("wd_mult", "lr_mult")
# These fields show which optimizer a param group belongs to: torch's optimizers have the first field, FusedAdam has
# the second. Groups with neither field belong to HybridDeviceOptimizer, because its fields are not saved
# (`own_fields`).
_TORCHS_FIELD, _FUSED_FIELD = "foreach", "bias_correction"


@dataclass(frozen=True)
class SharedState:
    """The state that all ranks share.

    Attributes:
        optimizer: megatron's dict, or one dict for each optimizer of a chain, by number; None if no optimizer was
            saved.
        scheduler: the LR scheduler's `state_dict()`; None if there is no LR scheduler.
        was_offloaded: True if a part of the optimizer was a HybridDeviceOptimizer.
        mixed_fields: the fields that differ between param groups which megatron takes for the same group.
    """

    optimizer: dict[Any, Any] | None
    scheduler: Mapping[str, Any] | None
    was_offloaded: bool = False
    mixed_fields: tuple[str, ...] = ()


def read_shared_state(reader: NativeReader) -> SharedState:
    """Reads `common.pt`.

    Raises CheckpointCorruptError if the file is damaged, and UnsupportedError if megatron cannot load this kind of
    optimizer.
    """
    if "optimizer" not in reader.manifest.contents:
        return SharedState(None, None)
    common = reader.plain(file_names.COMMON_FILE)
    if refused := sorted({each["kind"] for each in common["optimizers"]} & _NOT_LOADED):
        raise UnsupportedError(
            f"{reader.place}: has the state of {', '.join(refused)}, which megatron (0.16 to 0.19) cannot load from "
            "torch_dist checkpoints, even if megatron wrote them: take the weights with mcore-ckpt merge"
        )
    saved = _of_layout(reader, common["optimizers"])
    parts = [_optimizer_state(each) for each in saved]
    adams = (each for each in common["optimizers"] if each["kind"] == "Adam")
    groups = (group for each in adams for group in each["param_groups"])
    was_offloaded = any(not {_TORCHS_FIELD, _FUSED_FIELD} & {*group} for group in groups)
    # For a chain of one optimizer, `ChainedOptimizer.load_state_dict` expects that optimizer's state, not a dict of
    # states by number.
    optimizer = parts[0] if len(parts) == 1 else dict(enumerate(parts))
    return SharedState(optimizer, saved_scheduler(common), was_offloaded, _mixed_fields(saved))


def _mixed_fields(saved: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the fields that differ between groups which megatron up to 0.18 takes for the same group.

    `_filter_and_reorder_param_groups` then gives all these groups the values of the last group.
    """
    mixed: set[str] = set()
    for groups in (each["param_groups"] for each in saved):
        for one, other in combinations(groups, 2):
            known = settings(one), settings(other)
            fields = {name for name in {*known[0], *known[1]} if not are_same(known[0].get(name), known[1].get(name))}
            if marks(one) == marks(other) and fields.isdisjoint(_IDENTIFIERS):
                mixed |= {name for name in fields if field_of(name).rule != "rate"}
    return tuple(sorted(mixed))


def _of_layout(reader: NativeReader, saved: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns one state for each optimizer that megatron chains under the layout of the checkpoint.

    Under expert parallelism, experts have a separate optimizer, whose param groups `is_expert_parallel` marks
    (`_get_param_groups`, 0.16.1). A resharded checkpoint can still have the optimizers of the layout before the
    reshard.
    """
    sizes = reader.manifest.topology
    adams = [each for each in saved if each["param_groups"]]
    has_experts = any(is_expert(name) for name in reader.manifest.tensors)
    are_apart = any(group.get(_EXPERT_FIELD) for each in adams for group in each["param_groups"])
    if has_experts and sizes.ep > 1 and not are_apart and len(adams) == 1:
        return [adams[0], _with_experts(adams[0], True)]
    if are_apart and sizes.ep == 1 and sizes.etp == sizes.tp and len(adams) == 2:
        dense, experts = sorted(adams, key=lambda each: any(g.get(_EXPERT_FIELD) for g in each["param_groups"]))
        groups = [*dense["param_groups"], *_with_experts(experts, False)["param_groups"]]
        unlike = [group for number, group in enumerate(groups) if group not in groups[:number]]
        return [{**dense, "param_groups": unlike}]
    return saved


def _with_experts(saved: Mapping[str, Any], are_experts: bool) -> Mapping[str, Any]:
    return {**saved, "param_groups": [{**group, _EXPERT_FIELD: are_experts} for group in saved["param_groups"]]}


def _optimizer_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    step = saved["step"]
    groups = [dict(group) for group in saved["param_groups"]]
    state: dict[str, Any] = {}
    if saved["kind"] == "Adam" and groups:
        step = 0 if step is None else int(step)
        if _TORCHS_FIELD in groups[0]:
            state["common_step"] = torch.tensor(float(step))
        else:
            # FusedAdam counts steps in its param groups, and would treat a `step` in the state as a tensor. torch's
            # Adam counts steps in the state, and would never change a `step` in its groups. So `step` goes only where
            # the optimizer counts.
            groups = [{_FUSED_FIELD: True, **group, "step": step} for group in groups]
    elif step is not None:
        state["common_step"] = step
    return {
        "optimizer": {"param_groups": groups, "state": state},
        "param_groups": deepcopy(groups),
        "state": dict(state),
        "param_state_sharding_type": SHARDING_TYPE,
        **({} if saved["grad_scaler"] is None else {"grad_scaler": saved["grad_scaler"]}),
    }


def megatron_state(reader: NativeReader, model: Callable[[], HfModel | None], has_rng: bool) -> dict[str, Any]:
    """Returns the counters and arguments that Megatron-LM's `load_checkpoint` reads, without optimizer and scheduler.

    `model` returns the model that the checkpoint's `config.json` describes; None if there is no such file. `model` is
    called only if our `save_checkpoint` of Megatron's loop has not saved the arguments of the run.

    Raises CheckpointMismatchError: neither the checkpoint nor `config.json` has the arguments that Megatron-LM compares
    with the run's arguments.
    """
    loop = read_loop_state(reader)
    manifest, sizes = reader.manifest, reader.manifest.topology
    arguments = {
        **_compared(reader, loop, model),
        **{name: loop.get(name, 0) for name in COUNTERS},
        # Megatron-LM loads random states only if the run has these sizes.
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "world_size": sizes.world_size,
        "data_parallel_size": sizes.dp,
        "no_save_optim": "optimizer" not in manifest.contents,
        "no_save_rng": not has_rng,
        "ckpt_format": "torch_dist",
        "async_save": False,
    }
    return {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": int(loop.get("iteration", manifest.step)),
        "num_floating_point_operations_so_far": loop.get("num_floating_point_operations_so_far", 0),
    }


def read_loop_state(reader: NativeReader) -> Mapping[str, Any]:
    """Returns the state that our `save_checkpoint` of Megatron's loop saved on rank 0; empty if it saved none."""
    record = reader.by_path.get(file_names.extra_file(0, 0, 0, 0))
    if record is None:
        return {}
    state = from_stored(reader.plain(record.path).get(LOOP))
    return state if isinstance(state, Mapping) else {}


def _compared(reader: NativeReader, loop: Mapping[str, Any], model: Callable[[], HfModel | None]) -> dict[str, Any]:
    """Returns the arguments that `check_checkpoint_args` compares with the run's arguments (megatron/training)."""
    saved = loop.get("arguments")
    if isinstance(saved, Mapping) and "num_attention_heads" in saved:
        return dict(saved)
    described = model()
    if described is None:
        raise CheckpointMismatchError(
            f"{reader.place}: Megatron-LM needs num_layers, hidden_size and num_attention_heads to compare them with "
            "its arguments, but this checkpoint has neither these values nor a config.json: name a folder that has "
            "config.json with --hf_model_path"
        )
    if not described.architecture.rules:
        raise UnsupportedError(
            f"{reader.place}: config.json names an architecture that this package does not know, so the arguments that "
            "Megatron-LM compares are unknown: save once with save_checkpoint of mcore_ckpt.integrations.megatron"
        )
    config = to_mcore_config(described)
    names = ("num_layers", "hidden_size", "num_attention_heads")
    found: dict[str, Any] = {name: config.transformer[name] for name in names}
    # Set this argument, because Megatron-LM 0.19 assumes that a checkpoint without the argument holds a GPTModel.
    found["hybrid_layer_pattern"] = config.gpt.get("hybrid_layer_pattern")
    return {**found, "add_position_embedding": config.gpt.get("position_embedding_type") == "learned_absolute"}


def parts_left_out(reader: NativeReader) -> str | None:
    """Returns a sentence on the parts of the step, which other trainers do not get; None if the step has no parts."""
    if not reader.manifest.parts:
        return None
    names = ", ".join(reader.manifest.parts)
    return f"the parts of the step ({names}) are not converted: they stay in {reader.place}/{file_names.PARTS_DIR}"


def left_out(reader: NativeReader, extra: Sequence[str]) -> str | None:
    """Returns a sentence on the keys of `extra_state` that other trainers do not get; None if they get everything.

    `extra` has the keys that are converted.
    """
    record = reader.by_path.get(file_names.extra_file(0, 0, 0, 0))
    keys = [] if record is None else sorted({*map(str, reader.plain(record.path))} - {*extra})
    if not keys:
        return None
    return f"extra_state ({', '.join(keys)}) is not converted: it stays in {reader.place}/{file_names.EXTRA_DIR}"
