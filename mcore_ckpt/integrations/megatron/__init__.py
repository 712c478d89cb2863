"""Offers Megatron-LM's `save_checkpoint` and `load_checkpoint` to a training loop that imports them from here.

    from mcore_ckpt.integrations.megatron import (
        configure,
        load_checkpoint,
        maybe_finalize_async_save,
        save_checkpoint,
    )

Names, signatures and results are those of `megatron/training/checkpointing.py` (core_r0.16 to core_r0.19, and main
until 2026-08). The functions read the arguments that were given to `configure` (`args.save`, `args.load`, ...), or
Megatron's global arguments if none were given. An argument that cannot be honoured is refused by name, never silently
ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_ckpt import LoadResult
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.ranks import read_topology
from mcore_ckpt.state import process_groups_of, read_rng, write_rng

try:
    from megatron.core import num_microbatches_calculator as microbatches
except ImportError as error:
    raise ImportError("mcore_ckpt.integrations.megatron needs megatron-core: pip install megatron-core") from error

from mcore_ckpt.integrations.megatron.arguments import Arguments, LoopSettings
from mcore_ckpt.integrations.megatron.folders import COUNTERS, check_integrity, find
from mcore_ckpt.integrations.megatron.refusals import (
    check_groups,
    check_place,
    refuse_other_kinds,
    refuse_partial_loads,
)
from mcore_ckpt.integrations.megatron.rerun import read_rerun_state, write_rerun_state

logger = logging.getLogger(__name__)

# For Megatron-LM's `set_checkpoint_version`. 3.0 means the order of query, key and value that it has used since 2021.
CHECKPOINT_VERSION = 3.0
_KEY = "megatron"  # the key in extra_state of what these functions save


@dataclass(frozen=True, eq=False)
class _Trainer:
    model: list[Any]
    optimizer: Any
    scheduler: Any

    def manager(self, root: str, config: CheckpointConfig) -> CheckpointManager:
        return CheckpointManager(
            root,
            self.model,
            self.optimizer,
            self.scheduler,
            role=_settings.role,
            hf_config=_settings.hf_config,
            processing_class=_settings.processing_class,
            config=config,
        )


@dataclass(frozen=True, eq=False)
class _Saving:
    """The manager that saves, and what it was made for.

    There is only one, because its host memory is as large as the training state.
    """

    manager: CheckpointManager
    made_for: tuple[Any, ...]


_settings = LoopSettings()
_saving: _Saving | None = None
_dataloader_state: Any = None


def configure(
    args: Any = None,
    *,
    config: CheckpointConfig | None = None,
    role: str = "actor",
    hf_config: Any = None,
    processing_class: Any = None,
) -> None:
    """Sets what Megatron's arguments do not contain. Call it once on every rank, before the first save or load.

    Args:
        args: any object whose attributes have the names of Megatron-LM's arguments: `save`, `load`, `ckpt_step`,
            `finetune`, `no_load_optim`, `no_load_rng`, `no_save_optim`, `no_save_rng`, `async_save`,
            `exit_on_missing_checkpoint`, `pretrained_checkpoint`, `save_retain_interval`, `dataloader_save`,
            `verify_integrity` (a load then checks all files first: ours by their CRCs, Megatron-LM's by their digests).
            Missing attributes have Megatron-LM's defaults. Each save reads `consumed_train_samples`,
            `skipped_train_samples` and `consumed_valid_samples`, and each load sets them. None: what
            `megatron.training.get_args()` returns at each call.
        config: the options of this package. `args` overrides `async_save`, can take the optimizer out of the contents,
            and with `save_retain_interval` sets which steps stay.
        role, hf_config, processing_class: see CheckpointManager.

    Example:
        >>> from types import SimpleNamespace
        >>> configure(SimpleNamespace(save="checkpoints", load="checkpoints"))
    """
    global _settings
    _close()
    _settings = LoopSettings(args, config or CheckpointConfig(), role, hf_config, processing_class)


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any] | None = None,
    pipeline_rank: int | None = None,
    expert_rank: int | None = None,
    tensor_rank: int | None = None,
    pipeline_parallel: bool | None = None,
    expert_parallel: bool | None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Any = None,
    release: bool = False,
    tp_group: Any = None,
    pp_group: Any = None,
    dp_cp_group: Any = None,
    dp_group: Any = None,
    expt_dp_group: Any = None,
    rng_state_key_prefix: str = "",
) -> None:
    """Saves to `<args.save>/global_steps_{iteration}/{role}`. Every rank calls it.

    Args:
        iteration: the iteration's number, at least 0.
        model: the list of virtual chunks, or one model, wrapped or not.
        optimizer, opt_param_scheduler: megatron's objects, or None.
        num_floating_point_operations_so_far: a number for `load_checkpoint` to return.
        train_data_iterator: the training's data iterator. If a step is to be run again, the rerun state contains the
            iterator's state. If `args.dataloader_save` is set, the save also keeps what the `save_state` of the
            iterator's iterable returns (see `loaded_dataloader_state`).
        pipeline_rank, expert_rank, tensor_rank, pipeline_parallel, expert_parallel, tp_group, pp_group, dp_cp_group,
            dp_group, expt_dp_group: None, or what the model's own process groups are on this rank.
        checkpointing_context: ignored, because nothing has to be kept between saves.
        preprocess_common_state_dict_fn: ignored, because the ranks' states may differ.
        non_persistent_ckpt, release, rng_state_key_prefix: refused if set.

    Raises:
        UnsupportedError: an argument cannot be honoured. Nothing has been done.
        CheckpointError: see CheckpointManager.save.
    """
    args = _settings.arguments()
    refuse_other_kinds(non_persistent_ckpt, release, rng_state_key_prefix)
    args.refuse_unsupported()
    trainer = _Trainer(_as_list(model), optimizer, opt_param_scheduler)
    manager = _saving_manager(args, trainer)

    def state() -> dict[str, Any]:
        # These checks can fail on a single rank. They run inside `save`, so that `save` raises on all ranks.
        check_place(
            trainer.model,
            {"tensor_rank": tensor_rank, "pipeline_rank": pipeline_rank, "expert_rank": expert_rank},
            {"pipeline_parallel": pipeline_parallel, "expert_parallel": expert_parallel},
        )
        check_groups(trainer.model, tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group)
        return {
            "iteration": int(iteration),
            "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
            "checkpoint_version": CHECKPOINT_VERSION,
            **{name: args[name] for name in COUNTERS},
            "no_save_rng": bool(args["no_save_rng"]),
            "layout": _layout(trainer),
            "arguments": args.plain(),
            "rerun_state_machine": read_rerun_state(train_data_iterator),
            "dataloader_state_dict": _read_dataloader_state(train_data_iterator, args),
        }

    manager.save(int(iteration), extra_state=lambda: {_KEY: state()})


def load_checkpoint(
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: dict[str, Any] | None = None,
    skip_load_to_model_and_opt: bool = False,
    tp_group: Any = None,
    pp_group: Any = None,
    dp_cp_group: Any = None,
    dp_group: Any = None,
    expt_dp_group: Any = None,
    rng_state_key_prefix: str = "",
) -> tuple[int, float]:
    """Loads the newest checkpoint in the folder `args.<load_arg>`, or step `args.ckpt_step`. Every rank calls it.

    The newest checkpoint may be one that Megatron-LM wrote itself (`iter_0000100`, format torch_dist).

    Args:
        ddp_model: the list of virtual chunks, or one model, wrapped or not.
        optimizer, opt_param_scheduler: megatron's objects, or None.
        load_arg: the name of the argument that names the folder.
        tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group: None, or the model's own process groups.
        checkpointing_context: ignored.
        strict: must be True.
        skip_load_to_model_and_opt, rng_state_key_prefix: refused if set.

    Returns:
        The iteration (0 with `args.finetune`) and num_floating_point_operations_so_far. Both are 0 if there never was a
        checkpoint.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none is complete. Or there is none although
            `args.exit_on_missing_checkpoint` is set (Megatron-LM then exits with status 0), or although
            `args.pretrained_checkpoint` names a second folder.
        UnsupportedError: an argument cannot be honoured.
        CheckpointError: see CheckpointManager.load.
    """
    args = _settings.arguments()
    refuse_partial_loads(strict, skip_load_to_model_and_opt)
    refuse_other_kinds(False, False, rng_state_key_prefix)
    args.refuse_unsupported()
    folders = [str(folder) for folder in (args[load_arg], args["pretrained_checkpoint"]) if folder]
    if not folders:
        logger.warning("args.%s names no folder, so training starts from the beginning", load_arg)
        return 0, 0
    trainer = _Trainer(_as_list(ddp_model), optimizer, opt_param_scheduler)

    def check() -> None:
        check_groups(trainer.model, tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group)

    found = _find_together(folders, args, trainer, check)
    if not found:
        logger.warning("%s: there is no checkpoint, so training starts from the beginning", folders[0])
        return 0, 0
    if found["folder"] != str(args[load_arg]):
        args["finetune"] = True  # as Megatron-LM does, for code that reads the arguments later
    return _load(found, args, trainer)


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Waits for an async save. Megatron-LM's loop calls it at each iteration and at the end (`async_utils.py`).

    Args:
        blocking: True waits until no save is under way. False does nothing, because a save commits on a thread of its
            own.
        terminate: True also waits, and then frees the memory that saves use.

    Raises:
        CheckpointError: the save that was under way failed. All ranks raise it. Without `blocking` and `terminate` this
            function does not raise it, but the next save or load does.
    """
    if terminate:
        _close()
    elif blocking and _saving is not None:
        _saving.manager.wait()


def loaded_dataloader_state() -> Any:
    """Returns this rank's data loader state from the checkpoint that was loaded last; None if it has no such state.

    The state is what `train_data_iterator.iterable.save_state()` returned for the save.

    Megatron-LM writes the state below `args.dataloader_save`, in separate files that can be of another iteration than
    the weights. Here the state is part of the checkpoint.
    """
    return _dataloader_state


def _as_list(model: Any) -> list[Any]:
    return list(model) if isinstance(model, Sequence) else [model]


def _layout(trainer: _Trainer) -> dict[str, int]:
    """Returns the sizes for which a rerun state is valid. Megatron-LM drops the state if one of them has changed."""
    topology = read_topology(process_groups_of(trainer.model))[1]
    return {"world_size": topology.world_size, "tp": topology.tp, "pp": topology.pp, "dp": topology.dp}


# -- saving ------------------------------------------------------------------------------------------------


def _saving_manager(args: Arguments, trainer: _Trainer) -> CheckpointManager:
    global _saving
    config = args.saving(_settings.config, trainer.optimizer is not None)
    made_for = (args.folder("save"), *map(id, (*trainer.model, trainer.optimizer, trainer.scheduler)), config)
    if _saving is None or _saving.made_for != made_for:
        _close()
        _saving = _Saving(trainer.manager(args.folder("save"), config), made_for)
    return _saving.manager


def _close() -> None:
    global _saving
    saving, _saving = _saving, None
    if saving is not None:
        saving.manager.close()


def _read_dataloader_state(train_data_iterator: Any, args: Arguments) -> Any:
    """Reads the data loader's state like Megatron-LM's `maybe_save_dataloader_state`; None if it is not to be saved."""
    if train_data_iterator is None or not args["dataloader_save"]:
        return None
    iterable: Any = getattr(train_data_iterator, "iterable", None)
    if not hasattr(iterable, "save_state"):
        raise UnsupportedError(
            f"args.dataloader_save is set, but train_data_iterator, a {type(train_data_iterator).__name__}, has no "
            "iterable with a save_state: leave the argument out, or pass a data iterator that has such an iterable "
            "(Megatron Energon's)"
        )
    return iterable.save_state()


# -- loading -----------------------------------------------------------------------------------------------


def _find_together(folders: list[str], args: Arguments, trainer: _Trainer, check: Callable[[], None]) -> dict[str, Any]:
    """Returns on all ranks what rank 0 has found to load; empty if there never was a checkpoint.

    If `check` raises on one rank, all ranks raise.
    """
    role, step = _settings.role, args["ckpt_step"]
    needed = args["exit_on_missing_checkpoint"] or len(folders) > 1

    def answer() -> dict[str, Any]:
        for folder in folders:
            found = find(Path(folder), role, step)
            if found is not None:
                return {"folder": folder, **found}
        if needed:
            raise CheckpointNotFoundError(f"{' and '.join(folders)}: there is no checkpoint")
        return {}

    def request() -> dict[str, Any]:
        check()
        return {"folders": folders, "ckpt_step": step}

    manager = trainer.manager(folders[0], args.loading(_settings.config, trainer.optimizer is not None))
    try:
        return manager.agree("finding a checkpoint", request, answer)
    finally:
        manager.close()


def _load(found: dict[str, Any], args: Arguments, trainer: _Trainer) -> tuple[int, float]:
    config = args.loading(_settings.config, trainer.optimizer is not None)
    keeps_rng = args["finetune"] or args["no_load_rng"]
    theirs = found.get("theirs")
    if theirs is not None:
        layout = _layout(trainer)
        # Megatron-LM saves random number generators by tensor-parallel and pipeline-parallel rank.
        has_rng = not found["state"]["no_save_rng"] and (found["tp"], found["pp"]) == (layout["tp"], layout["pp"])
        if keeps_rng or not has_rng:
            words = tuple(word for word in config.load_contents if word != "extra")
            config = replace(config, load_contents=words)
    generators = read_rng()
    manager = trainer.manager(found["folder"], config)
    try:
        if theirs is not None and args["verify_integrity"]:
            check_integrity(theirs)
        verify = "full" if args["verify_integrity"] else "read"
        result = manager.load(step=found.get("step"), path=theirs, verify=verify)
    finally:
        manager.close()
    state = found["state"] if theirs is not None else _state_of(result)
    if theirs is None and (keeps_rng or state["no_save_rng"]):
        # `extra` had to be loaded for what this function returns, but it has replaced the generators, too.
        write_rng(generators)
    return _take_over(state, args, trainer)


def _state_of(result: LoadResult) -> dict[str, Any]:
    state = (result.extra_state or {}).get(_KEY)
    if state is None:
        logger.warning("%s was not saved by save_checkpoint, so it lacks Megatron-LM's counters", result.report.path)
        return {"iteration": result.step, "num_floating_point_operations_so_far": 0, "no_save_rng": False}
    return dict(state)


def _take_over(state: dict[str, Any], args: Arguments, trainer: _Trainer) -> tuple[int, float]:
    global _dataloader_state
    _dataloader_state = None
    operations = state["num_floating_point_operations_so_far"]
    if args["finetune"]:
        return 0, operations
    for name in COUNTERS:
        args[name] = state.get(name, 0)
    # update_num_microbatches fails if the calculator has not been set up.
    if microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        microbatches.update_num_microbatches(args["consumed_train_samples"], verbose=True)
    if state.get("rerun_state_machine") is not None and state["layout"] == _layout(trainer):
        write_rerun_state(state["rerun_state_machine"])
    _dataloader_state = state.get("dataloader_state_dict")
    return state["iteration"], operations
