"""Refuses calls of Megatron-LM's functions with arguments that cannot be honoured. Each error names the argument."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.ranks import read_topology
from mcore_ckpt.state import process_groups_of


def refuse_other_kinds(non_persistent_ckpt: bool, release: bool, rng_state_key_prefix: str) -> None:
    """Raises UnsupportedError if anything other than a checkpoint of the whole training state is requested."""
    if non_persistent_ckpt:
        raise UnsupportedError(
            "save_checkpoint(non_persistent_ckpt=True): mcore_ckpt has only one kind of checkpoint. Save just as "
            "often with args.async_save, and set max_to_keep and keep_every in configure(config=CheckpointConfig(...))"
        )
    if release:
        raise UnsupportedError(
            "save_checkpoint(release=True) is not supported: release a HuggingFace model, which mcore-ckpt merge writes"
        )
    if rng_state_key_prefix:
        raise UnsupportedError(
            f"rng_state_key_prefix={rng_state_key_prefix!r}: several models in one checkpoint are not supported: "
            "configure a separate role for each model"
        )


def refuse_partial_loads(strict: bool, skip_load_to_model_and_opt: bool) -> None:
    """Raises UnsupportedError for a load of only a part of the checkpoint."""
    if not strict:
        raise UnsupportedError(
            "load_checkpoint(strict=False): a checkpoint that does not fit the model is always refused: leave the "
            "argument out"
        )
    if skip_load_to_model_and_opt:
        raise UnsupportedError(
            "load_checkpoint(skip_load_to_model_and_opt=True): that is for Megatron-FSDP and torch's FSDP2, which are "
            "not supported: leave the argument out"
        )


def check_place(model: list[Any], ranks: dict[str, int | None], parallel: dict[str, bool | None]) -> None:
    """Raises UnsupportedError for coordinates that differ from this rank's place in the model's process groups."""
    coordinates, topology = read_topology(process_groups_of(model))
    own: dict[str, Any] = {
        "tensor_rank": coordinates.tp,
        "pipeline_rank": coordinates.pp,
        "expert_rank": coordinates.ep,
        "pipeline_parallel": topology.pp > 1,
        "expert_parallel": topology.ep > 1,
    }
    for name, value in {**ranks, **parallel}.items():
        if value is not None and value != own[name]:
            raise UnsupportedError(
                f"save_checkpoint({name}={value}): in the model's process groups, {name} is {own[name]} on this rank, "
                "and saves follow these groups: leave the argument out"
            )


def check_groups(
    model: list[Any], tp_group: Any, pp_group: Any, dp_cp_group: Any, dp_group: Any, expt_dp_group: Any
) -> None:
    """Raises UnsupportedError for a process group that differs from the group that the model was built with."""
    own = process_groups_of(model)
    given: dict[str, tuple[Any, Any]] = {
        "tp_group": (tp_group, own and own.tp),
        "pp_group": (pp_group, own and own.pp),
        "dp_cp_group": (dp_cp_group, own and own.dp_cp),
        "dp_group": (dp_group, own and own.dp),
        "expt_dp_group": (expt_dp_group, own and own.edp),
    }
    for name, (group, of_model) in given.items():
        if group is None:
            continue
        found = dist.get_process_group_ranks(group)
        wanted = None if of_model is None else dist.get_process_group_ranks(of_model)
        if found != wanted:
            raise UnsupportedError(
                f"{name} has the ranks {found}, but the model was built with {wanted} on this rank: only the model's "
                "own groups are supported"
            )
