"""Checkpoints as other programs write them, made of a training of the tests by megatron's own functions."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from mcore_ckpt.ranks.topology import read_topology
from mcore_ckpt.state.model import process_groups_of, unwrap
from tests.distributed.agreement import everywhere, gather
from tests.distributed.snapshot import chained
from tests.distributed.training import Training

STEP = 3


def save_verl_ranks(training: Training, folder: Path) -> None:
    """As verl up to 0.4 did: `get_checkpoint_name`, `save_parameter_state`, and plain `torch.save`."""
    at, sizes = read_topology(process_groups_of(training.model))
    name = (
        f"mp_rank_{at.tp:02d}" + (f"_{at.pp:03d}" if sizes.pp > 1 else "") + (f"_{at.ep:03d}" if sizes.ep > 1 else "")
    )
    place = f"pp{at.pp}_tp{at.tp}_cp{at.cp}_dp{at.dp}.pt"
    for part in (f"model/{name}", "optim", "rng_states", "optimizer_scheduler", "hf_config_and_tokenizer"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if gather(name).index(name) == dist.get_rank():
        torch.save([chunk.state_dict() for chunk in training.model], folder / "model" / name / "model.pt")
    optimizers = chained(training.optimizer)
    groups = gloo_groups([optimizer.data_parallel_group for optimizer in optimizers])
    for optimizer, group in zip(optimizers, groups, strict=True):
        optimizer.data_parallel_group_gloo = group
    training.optimizer.save_parameter_state(str(folder / f"optim/distrib_optim_{place}"))
    torch.save([random_states()], folder / f"rng_states/rng_states_{place}")
    if dist.get_rank() == 0:
        torch.save(training.scheduler.state_dict(), folder / "optimizer_scheduler/optimizer_scheduler.pt")
    with everywhere():
        pass


def gloo_groups(groups: list[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Groups of the same ranks over gloo. On a CPU every group is one, and the tests' trainings have no others."""
    if all(dist.get_backend(group) == "gloo" for group in groups):
        return groups
    members = [tuple(dist.get_process_group_ranks(group)) for group in groups]
    all_members = sorted({ranks for of_rank in gather(members) for ranks in of_rank})
    made = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in all_members}
    return [made[ranks] for ranks in members]


def save_torch_dist(training: Training, folder: Path, sharding_type: str, **more: Any) -> None:
    """As megatron's trainer and verl do: `sharded_state_dict` of model and optimizer under the same metadata."""
    metadata = _metadata(sharding_type)
    chunks = sharded_chunks(training, metadata)
    state = {
        "optimizer": training.optimizer.sharded_state_dict(chunks, metadata=metadata),
        **chunks,
        "opt_param_scheduler": training.scheduler.state_dict(),
        "iteration": STEP,
        "rng_state": rng_object(training),
        **more,
    }
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
    with everywhere():
        pass
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1), content_metadata=metadata)


def load_by_megatron(training: Training, folder: Path, sharding_type: str) -> None:
    """As megatron's trainer does (load_checkpoint), for the model and the optimizer of a `save_torch_dist`."""
    metadata = _metadata(sharding_type)
    chunks = sharded_chunks(training, metadata)
    optimizer = training.optimizer.sharded_state_dict(chunks, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load({"optimizer": optimizer, **chunks}, str(folder))
    for name, chunk in zip(chunks, training.model, strict=True):
        unwrap(chunk).load_state_dict(loaded[name])
    training.optimizer.load_state_dict(loaded["optimizer"])


def _metadata(sharding_type: str) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": sharding_type,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def sharded_chunks(training: Training, metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "model" if len(training.model) == 1 else f"model{number}": unwrap(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(training.model)
    }


def save_as(kind: str, training: Training, folder: Path, sharding_type: str = "dp_reshardable") -> None:
    if kind == "verl_ranks":
        save_verl_ranks(training, folder)
    else:
        save_torch_dist(training, folder, sharding_type)


def random_states() -> dict[str, Any]:
    """megatron's trainer's `get_rng_state`."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def rng_object(training: Training) -> ShardedObject:
    """megatron's trainer's `get_rng_state`, as torch_dist stores it."""
    at, sizes = read_topology(process_groups_of(training.model))
    place = (sizes.pp, sizes.tp), (at.pp, at.tp)
    return ShardedObject("rng_state", [random_states()], *place, replica_id=at.dp * sizes.cp + at.cp)


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])


def seed_replicas_alike() -> None:
    """megatron's trainer seeds data-parallel ranks alike, so torch_dist keeps one random state for all of them."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    states = [random_states()]
    dist.broadcast_object_list(states, src=dist.get_process_group_ranks(group)[0], group=group)
    set_random_states(states[0])
