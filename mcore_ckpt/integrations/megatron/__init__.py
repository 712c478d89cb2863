"""Offers Megatron-LM's `save_checkpoint` and `load_checkpoint` to a training loop that imports them from here.

    from mcore_ckpt.integrations.megatron import (
        configure,
        load_checkpoint,
        maybe_finalize_async_save,
        save_checkpoint,
    )

Names, signatures and results are those of `megatron/training/checkpointing.py` (core_r0.16, and what has been added to
it until 2026-08). The functions read Megatron's global arguments (`args.save`, `args.load`, ...) if
`megatron.training` is installed, else those that were given to `configure`. An argument that cannot be honoured is
refused by name. None is ignored silently.
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
from mcore_ckpt.state import read_rng, write_rng

try:
    from megatron.core import num_microbatches_calculator as microbatches
except ImportError as error:
    raise ImportError("mcore_ckpt.integrations.megatron needs megatron-core: pip install megatron-core") from error

from mcore_ckpt.integrations.megatron.arguments import Arguments, LoopSettings
from mcore_ckpt.integrations.megatron.folders import COUNTERS, find
from mcore_ckpt.integrations.megatron.refusals import (
    check_groups,
    check_place,
    refuse_other_kinds,
    refuse_partial_loads,
)
from mcore_ckpt.integrations.megatron.rerun import read_rerun_state, write_rerun_state

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = (
    3.0  # Megatron-LM's `set_checkpoint_version`; it stands for the order of query, key and value since 2021
)
_KEY = "megatron"  # the key of these functions' own state in extra_state


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
    """The manager that saves, and what it was made for. Only one, since its host memory is as large as the state."""

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
    """Sets what Megatron's arguments do not say. Call it once on every rank, before the first save or load.

    Args:
        args: any object with attributes named as Megatron-LM names its arguments: `save`, `load`, `ckpt_step`,
            `finetune`, `no_load_optim`, `no_load_rng`, `no_save_optim`, `no_save_rng`, `async_save`,
            `exit_on_missing_checkpoint`, `pretrained_checkpoint`, `save_retain_interval`, `dataloader_save`; those left
            out have Megatron-LM's defaults. `consumed_train_samples`, `skipped_train_samples` and
            `consumed_valid_samples` are read at each save and set by a load. The default is what
            `megatron.training.get_args()` returns at each call.
        config: our own options; `args` decides contents and `async_save`.
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
        iteration: at least 0.
        model: the list of virtual chunks, or one model, wrapped or not.
        optimizer, opt_param_scheduler: or None.
        num_floating_point_operations_so_far: `load_checkpoint` returns it.
        train_data_iterator: kept with the rerun state if a step is to be run again; and what its iterable's
            `save_state` returns, if `args.dataloader_save` is set: see `loaded_dataloader_state`.
        pipeline_rank, expert_rank, tensor_rank, pipeline_parallel, expert_parallel, tp_group, pp_group, dp_cp_group,
            dp_group, expt_dp_group: this rank's own, as in megatron's `parallel_state`, or None.
        checkpointing_context, preprocess_common_state_dict_fn: ignored, because nothing has to be kept from save to
            save, and the ranks' states may differ.
        non_persistent_ckpt, release, rng_state_key_prefix: refused.

    Raises:
        UnsupportedError: an argument cannot be honoured. Nothing has been done.
        CheckpointError: see CheckpointManager.save.
    """
    args = _settings.arguments()
    refuse_other_kinds(non_persistent_ckpt, release, rng_state_key_prefix)
    args.refuse_unsupported()
    manager = _saving_manager(args, _Trainer(_as_list(model), optimizer, opt_param_scheduler))

    def state() -> dict[str, Any]:
        # Checks that may fail on one rank only run inside `save`, which then raises on all ranks.
        check_place(
            {"tensor_rank": tensor_rank, "pipeline_rank": pipeline_rank, "expert_rank": expert_rank},
            {"pipeline_parallel": pipeline_parallel, "expert_parallel": expert_parallel},
        )
        check_groups(tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group)
        return {
            "iteration": int(iteration),
            "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
            "checkpoint_version": CHECKPOINT_VERSION,
            **{name: args[name] for name in COUNTERS},
            "no_save_rng": bool(args["no_save_rng"]),
            "layout": _layout(),
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
    """Loads the newest checkpoint of the folder `args.<load_arg>`, or that of `args.ckpt_step`. Every rank calls it.

    If the newest checkpoint is one that Megatron-LM wrote itself (`iter_0000100`, format torch_dist), the run continues
    from that.

    Args:
        ddp_model: the list of virtual chunks, or one model, wrapped or not.
        optimizer, opt_param_scheduler: or None.
        load_arg: the argument that names the folder.
        tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group: this rank's own, or None.
        checkpointing_context: ignored.
        strict: False is refused, and so are skip_load_to_model_and_opt and rng_state_key_prefix.

    Returns:
        The iteration (0 with `args.finetune`) and num_floating_point_operations_so_far; (0, 0) if there is nothing to
        load and never was.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none is complete; or there is none, and
            `args.exit_on_missing_checkpoint` is set (Megatron-LM ends the process then, with status 0).
        UnsupportedError: an argument that cannot be honoured.
        CheckpointError: see CheckpointManager.load.
    """
    args = _settings.arguments()
    refuse_partial_loads(strict, skip_load_to_model_and_opt)
    refuse_other_kinds(False, False, rng_state_key_prefix)
    args.refuse_unsupported()
    folders = [str(folder) for folder in (args[load_arg], args["pretrained_checkpoint"]) if folder]
    if not folders:
        logger.warning("args.%s names no folder: training starts from the beginning", load_arg)
        return 0, 0
    trainer = _Trainer(_as_list(ddp_model), optimizer, opt_param_scheduler)
    found = _find_together(
        folders, args, trainer, lambda: check_groups(tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group)
    )
    if not found:
        logger.warning("%s: there is no checkpoint: training starts from the beginning", folders[0])
        return 0, 0
    if found["folder"] != str(args[load_arg]):
        args["finetune"] = True  # as Megatron-LM does, for code that reads the arguments later
    return _load(found, args, trainer)


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Waits for an async save. Megatron-LM's loop calls it at each iteration and at the end (`async_utils.py`).

    Args:
        blocking: returns when no save is under way. Without it there is nothing to do, because a save commits on a
            thread of its own.
        terminate: waits, too, and frees the memory that saves need.

    Raises:
        CheckpointError: with `blocking` or `terminate`, the save that was under way failed; raised on all ranks.
            Without them the next save or load raises it.
    """
    if terminate:
        _close()
    elif blocking and _saving is not None:
        _saving.manager.wait()


def loaded_dataloader_state() -> Any:
    """Returns the data loader state of the checkpoint loaded last, for this rank; or None.

    It is what `train_data_iterator.iterable.save_state()` returned.

    Megatron-LM writes it below `args.dataloader_save`, in separate files that may be of another iteration than the
    weights. Here it is part of the checkpoint.
    """
    return _dataloader_state


def _as_list(model: Any) -> list[Any]:
    return list(model) if isinstance(model, Sequence) else [model]


def _layout() -> dict[str, int]:
    """Returns the sizes that a rerun state is bound to. Megatron-LM drops the state if one of them has changed."""
    topology = read_topology(1)[1]
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
    """Returns the data loader's state, which Megatron-LM reads in `maybe_save_dataloader_state`; or None."""
    if train_data_iterator is None or not args["dataloader_save"]:
        return None
    iterable: Any = getattr(train_data_iterator, "iterable", None)
    if not hasattr(iterable, "save_state"):
        raise UnsupportedError(
            f"args.dataloader_save is set, but train_data_iterator, a {type(train_data_iterator).__name__}, has no "
            "iterable with a save_state: leave it out, or hand over a data iterator that has (Megatron Energon's)"
        )
    return iterable.save_state()


# -- loading -----------------------------------------------------------------------------------------------


def _find_together(folders: list[str], args: Arguments, trainer: _Trainer, check: Callable[[], None]) -> dict[str, Any]:
    """Returns what all ranks load, as rank 0 finds it; empty if there never was a checkpoint.

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
        layout = _layout()
        # Megatron-LM keeps generators by tensor and pipeline rank.
        has_rng = not found["state"]["no_save_rng"] and (found["tp"], found["pp"]) == (layout["tp"], layout["pp"])
        if keeps_rng or not has_rng:
            words = tuple(word for word in config.load_contents if word != "extra")
            config = replace(config, load_contents=words)
    generators = read_rng()
    manager = trainer.manager(found["folder"], config)
    try:
        result = manager.load(step=found.get("step"), path=theirs)
    finally:
        manager.close()
    state = found["state"] if theirs is not None else _state_of(result)
    if theirs is None and (keeps_rng or state["no_save_rng"]):
        # `extra` has what this function returns, and the generators, too.
        write_rng(generators)
    return _take_over(state, args)


def _state_of(result: LoadResult) -> dict[str, Any]:
    state = (result.extra_state or {}).get(_KEY)
    if state is None:
        logger.warning("%s was not saved by save_checkpoint: it has no counters of Megatron-LM's", result.report.path)
        return {"iteration": result.step, "num_floating_point_operations_so_far": 0, "no_save_rng": False}
    return dict(state)


def _take_over(state: dict[str, Any], args: Arguments) -> tuple[int, float]:
    global _dataloader_state
    _dataloader_state = None
    operations = state["num_floating_point_operations_so_far"]
    if args["finetune"]:
        return 0, operations
    for name in COUNTERS:
        args[name] = state.get(name, 0)
    # update_num_microbatches fails where nobody has set the calculator up.
    if microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        microbatches.update_num_microbatches(args["consumed_train_samples"], verbose=True)
    if state.get("rerun_state_machine") is not None and state["layout"] == _layout():
        write_rerun_state(state["rerun_state_machine"])
    _dataloader_state = state.get("dataloader_state_dict")
    return state["iteration"], operations
