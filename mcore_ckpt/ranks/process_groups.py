"""Finds the process groups of the parallel layout, in a model or in megatron's `parallel_state`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_ckpt.errors import InvalidStateError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The fields of megatron's ProcessGroupCollection (0.16 to 0.19) that every layout needs, and the fields that can be
# absent.
_NEEDED = ("tp", "pp", "cp", "dp")
_EXPERTS = ("ep", "expt_tp", "expt_dp")
_OTHERS = ("dp_cp", *_EXPERTS, "inter_dist_opt")


@dataclass(frozen=True, eq=False)
class ProcessGroups:
    """This rank's process groups, one for each way to divide a training.

    Attributes:
        tp, pp, cp, dp: tensor, pipeline, context and data parallelism.
        dp_cp: data and context parallelism together. The ranks of `dp_cp` hold the same dense tensors.
        ep, etp, edp: expert parallelism, and tensor and data parallelism of the experts. The ranks of `edp` hold the
            same experts. `ep`, `etp` and `edp` are None if the trainer made no groups for experts.
        instances: connects the distributed optimizer's instances. None if there is one instance.
    """

    tp: ProcessGroup
    pp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    ep: ProcessGroup | None = None
    etp: ProcessGroup | None = None
    edp: ProcessGroup | None = None
    instances: ProcessGroup | None = None


def has_process_group() -> bool:
    """Returns True if torch.distributed is initialized in this process."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Returns the number of ranks of torch.distributed; 1 if it is not initialized in this process."""
    import torch.distributed as dist

    return dist.get_world_size() if has_process_group() else 1


def find_process_groups(model: Any = None) -> ProcessGroups | None:
    """Returns the process groups that a model was built with, or the groups of `parallel_state`.

    Each group is taken from the unwrapped model's `pg_collection`, or from `parallel_state` if the collection lacks the
    group. Returns None if torch.distributed is not initialized, because this process is then the only rank.

    Raises:
        InvalidStateError: there is a process group, but the model has no collection and `parallel_state` is not
            initialized; or a group of the model's collection has been destroyed.
        UnsupportedError: a group is neither in the collection nor in `parallel_state`.
    """
    if not has_process_group():
        return None
    collection, default = getattr(model, "pg_collection", None), _of_parallel_state()
    if collection is None and default is None:
        raise InvalidStateError(
            "torch.distributed is initialized but megatron's parallel_state is not: call "
            "parallel_state.initialize_model_parallel(...) first, or build the model with a pg_collection"
        )
    # If a field was never set, the attribute is missing (until megatron 0.18), or None (megatron 0.19).
    found: dict[str, Any] = {
        name: getattr(collection, name, None) or getattr(default, name, None) for name in (*_NEEDED, *_OTHERS)
    }
    return _checked(found, _has_experts(model))


def _of_parallel_state() -> Any:
    """Returns megatron's own groups as a collection; None if they are not initialized."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not parallel_state.model_parallel_is_initialized():
        return None
    return ProcessGroupCollection.use_mpu_process_groups([*_NEEDED, *_OTHERS])


def _has_experts(model: Any) -> bool:
    modules = getattr(model, "modules", None)
    return modules is not None and any(hasattr(module, "num_local_experts") for module in modules())


def _checked(found: dict[str, Any], has_experts: bool) -> ProcessGroups:
    missing = [name for name in _NEEDED if found[name] is None]
    if found["dp_cp"] is None and not missing:
        # Without context parallelism, megatron does not ask for `dp_cp` (setup_process_groups_for_optimizer), and `dp`
        # has the same ranks.
        missing = ["dp_cp"] if found["cp"].size() > 1 else []
        found["dp_cp"] = found["dp"]
    of_experts = [name for name in _EXPERTS if found[name] is None]
    missing += of_experts if has_experts else []
    if missing:
        raise UnsupportedError(
            f"the model's pg_collection lacks {', '.join(missing)}: a checkpoint needs "
            f"{', '.join((*_NEEDED, 'dp_cp'))}, and {', '.join(_EXPERTS)} if the model has experts. Set them when you "
            "make the ProcessGroupCollection"
        )
    if of_experts:
        found |= dict.fromkeys(_EXPERTS)
    for name, group in found.items():
        if group is not None:
            _check_alive(name, group)
    return ProcessGroups(
        **{name: found[name] for name in (*_NEEDED, "dp_cp", "ep")},
        etp=found["expt_tp"],
        edp=found["expt_dp"],
        instances=found["inter_dist_opt"],
    )


def _check_alive(name: str, group: ProcessGroup) -> None:
    import torch.distributed as dist

    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        raise InvalidStateError(
            f"the {name} group of the model's pg_collection has been destroyed: build the model again after "
            "parallel_state.initialize_model_parallel(...)"
        ) from None
