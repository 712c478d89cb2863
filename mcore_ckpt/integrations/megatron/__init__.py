"""Offers Megatron-LM's `save_checkpoint` and `load_checkpoint` to a training loop that imports them from this module.

    from mcore_ckpt.integrations.megatron import (
        configure,
        load_checkpoint,
        maybe_finalize_async_save,
        save_checkpoint,
    )

The functions have the same names, signatures and results as in `megatron/training/checkpointing.py` (core_r0.16 to
core_r0.19, and main until 2026-08), except that `save_checkpoint` returns a handle. The functions read the arguments
that were given to `configure` (`args.save`, `args.load`, ...), or Megatron's global arguments if none were given. An
argument that cannot be honoured raises an error that names the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mcore_ckpt import CheckpointManager, SavedPart, SaveHandle
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidStateError, UnsupportedError

try:
    import megatron.core  # noqa: F401
except ImportError as error:
    raise ImportError("mcore_ckpt.integrations.megatron needs megatron-core: pip install megatron-core") from error

from mcore_ckpt.integrations import energon
from mcore_ckpt.integrations.kit.arguments import COUNTERS, Arguments
from mcore_ckpt.integrations.kit.loop import LoopCheckpoints, LoopSettings, Training, restore_counters
from mcore_ckpt.integrations.megatron.loaded_data import LoadedData, check_rule
from mcore_ckpt.integrations.megatron.refusals import (
    check_groups,
    check_place,
    refuse_other_kinds,
    refuse_partial_loads,
)
from mcore_ckpt.integrations.megatron.rollout_bank import PART, RolloutBankPart


@dataclass(frozen=True)
class _Settings(LoopSettings):
    """The arguments that were given to `configure`, whose docstring describes them."""

    args: Any = None
    other_data_size: str = "refuse"

    def training(self, model: Any, optimizer: Any, scheduler: Any) -> Training:
        chunks = list(model) if isinstance(model, Sequence) else [model]
        return Training(chunks, optimizer, scheduler, self.role, self.hf_config, self.processing_class)

    def arguments(self) -> Arguments:
        """Returns the arguments given to `configure`, or Megatron-LM's global arguments if none were given.

        Raises InvalidStateError if none were given, and `megatron.training` is not installed or not initialized.
        """
        if self.args is not None:
            return Arguments(self.args)
        try:
            from megatron.training import get_args

            return Arguments(get_args())
        except ImportError:
            why = "is not installed"
        except AssertionError:
            # The wheels of megatron-core since 0.17 have megatron.training, but only Megatron-LM's own trainer
            # initializes it.
            why = "is not initialized"
        raise InvalidStateError(
            f"megatron.training {why}, so its arguments are unknown: call "
            "mcore_ckpt.integrations.megatron.configure(args) once, with args.save, args.load, ... as Megatron-LM "
            "names them"
        )


_settings = _Settings()
_checkpoints = LoopCheckpoints()
_bank: RolloutBankPart | None = None
_loaded_data = LoadedData()


def configure(
    args: Any = None,
    *,
    config: CheckpointConfig | None = None,
    role: str = "actor",
    hf_config: Any = None,
    processing_class: Any = None,
    other_data_size: str = "refuse",
) -> None:
    """Sets the options that Megatron's arguments lack.

    Call this function once on every rank, before the first save or load.

    Args:
        args: any object whose attributes have the names of Megatron-LM's arguments: `save`, `load`, `ckpt_step`,
            `finetune`, `no_load_optim`, `no_load_rng`, `no_save_optim`, `no_save_rng`, `async_save`,
            `exit_on_missing_checkpoint`, `pretrained_checkpoint`, `save_retain_interval`, `dataloader_save`,
            `verify_integrity` (a load then checks all files first: ours by their CRCs, Megatron-LM's by their digests).
            Missing attributes have Megatron-LM's defaults. Each save reads `consumed_train_samples`,
            `skipped_train_samples` and `consumed_valid_samples`, and each load sets them. If `args` is None,
            each call uses the arguments that `megatron.training.get_args()` returns.
        config: the options of this package. `args` overrides `async_save`, can take the optimizer out of the contents,
            and sets which steps stay (if it has `save_retain_interval`).
        role, hf_config, processing_class: see CheckpointManager.
        other_data_size: what `load_checkpoint` does if the data loader's state does not fit this data-parallel size.
            "refuse": it raises CheckpointMismatchError before anything changes. "begin_anew": it loads the rest, and
            `loaded_dataloader_state` returns None. "as_saved": `loaded_dataloader_state` returns plain values and a
            ShardedPosition as a rank saved them, for loops that divide this state themselves, or can use it undivided.
            Energon's state is refused.

    Raises InvalidArgumentError: `other_data_size` has another value.

    Example:
        >>> from types import SimpleNamespace
        >>> configure(SimpleNamespace(save="checkpoints", load="checkpoints"))
    """
    check_rule(other_data_size)
    global _settings, _checkpoints, _bank
    _checkpoints.finalize(terminate=True)
    _checkpoints, _bank = LoopCheckpoints(), None
    _settings = _Settings(config or CheckpointConfig(), role, hf_config, processing_class, args, other_data_size)


def attach(
    name: str, *, save: Any = None, load: Callable[[SavedPart], object] | None = None, optional: bool = False
) -> None:
    """Attaches a part to all checkpoints from now on, as `CheckpointManager.attach` does.

    Call this function after `configure`.
    """
    _checkpoints.attach(name, save=save, load=load, optional=optional)


def attach_rollout_bank() -> None:
    """Makes Megatron-LM's rollout bank (`--rl-durable-rollout-bank`) a part of each checkpoint.

    Call this function after `configure`, on every rank, before the load. Only rank 0 has a bank. Without the option,
    the function does nothing.
    """
    global _bank
    if not _settings.arguments()["rl_durable_rollout_bank"] or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _bank = RolloutBankPart(_settings.arguments)
    attach(PART, save=_bank.save, load=_bank.load, optional=True)


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
) -> SaveHandle:
    """Saves to `<args.save>/global_steps_{iteration}/{role}`. Every rank calls this function.

    Process groups, and this rank's numbers in them, may be left out. If given, they must match the model.

    Args:
        iteration: the iteration's number, at least 0.
        model: the list of virtual chunks, or one model, wrapped or not.
        optimizer: megatron's object, or None.
        opt_param_scheduler: megatron's object, or None.
        num_floating_point_operations_so_far: a number for `load_checkpoint` to return.
        train_data_iterator: the training's data iterator. If a step is to be run again, the rerun state contains the
            iterator's state. If `args.dataloader_save` is set, the checkpoint also has the result of the iterator's
            `iterable.save_state()` (see `loaded_dataloader_state`).
        checkpointing_context: ignored, because nothing has to be kept between saves.
        preprocess_common_state_dict_fn: ignored. Megatron-LM uses it to compare the states of ranks, but here these
            states may differ.
        non_persistent_ckpt: refused if set.
        release: refused if set.
        rng_state_key_prefix: refused if set.

    Returns:
        The handle of the save, as CheckpointManager.save returns it. Megatron-LM's function returns None.

    Raises:
        UnsupportedError: an argument cannot be honoured. Nothing was saved.
        CheckpointError: see CheckpointManager.save.
    """
    args = _settings.arguments()
    refuse_other_kinds(non_persistent_ckpt, release, rng_state_key_prefix)
    args.refuse_unsupported()
    training = _settings.training(model, optimizer, opt_param_scheduler)

    def state() -> dict[str, Any]:
        # These checks can fail on a single rank. They run inside `save`, so that `save` raises on all ranks.
        check_place(
            training.model,
            {"tensor_rank": tensor_rank, "pipeline_rank": pipeline_rank, "expert_rank": expert_rank},
            {"pipeline_parallel": pipeline_parallel, "expert_parallel": expert_parallel},
        )
        check_groups(training.model, tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group)
        return {
            "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
            **{name: args[name] for name in COUNTERS},
            "dataloader_state_dict": _read_dataloader_state(train_data_iterator, args),
        }

    config = _settings.config
    handle = _checkpoints.save(int(iteration), training, args, config, state, data_iterator=train_data_iterator)
    if _bank is not None:
        _bank.saved(int(iteration), handle)
    return handle


def saving_manager(model: Any, optimizer: Any, opt_param_scheduler: Any) -> CheckpointManager:
    """Returns the manager with which `save_checkpoint` saves these objects, for a PreemptionGuard.

    Every rank calls this function, after the load. The manager stays the same until `configure` is called, or until an
    argument that the saves read changes. Do not close the manager: `maybe_finalize_async_save(terminate=True)` does
    this.

    Raises CheckpointError: see CheckpointManager.

    Example:
        >>> guard = PreemptionGuard(  # doctest: +SKIP
        ...     saving_manager(model, optimizer, scheduler),
        ...     save=lambda iteration: save_checkpoint(iteration, model, optimizer, scheduler, operations),
        ... )
    """
    training = _settings.training(model, optimizer, opt_param_scheduler)
    return _checkpoints.saving_manager(training, _settings.arguments(), _settings.config)


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
    """Loads the newest checkpoint in the folder `args.<load_arg>`, or step `args.ckpt_step`.

    Every rank calls this function. Megatron-LM itself may have written the newest checkpoint (`iter_0000100`, format
    torch_dist). Process groups may be left out. If given, they must be the groups of the model.

    Args:
        ddp_model: the list of virtual chunks, or one model, wrapped or not.
        optimizer: megatron's object, or None.
        opt_param_scheduler: megatron's object, or None.
        load_arg: the name of the argument that names the folder.
        checkpointing_context: ignored.
        strict: must be True.
        skip_load_to_model_and_opt: refused if set.
        rng_state_key_prefix: refused if set.

    Returns:
        The iteration (0 with `args.finetune`) and num_floating_point_operations_so_far. Both are 0 if there never was a
        checkpoint.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none is complete; or there is no checkpoint, and
            `args.exit_on_missing_checkpoint` is set (Megatron-LM then exits with status 0) or
            `args.pretrained_checkpoint` names a second folder.
        UnsupportedError: an argument cannot be honoured.
        CheckpointMismatchError: the data loader's state does not fit this data-parallel size (`other_data_size` of
            `configure`), or the checkpoint does not fit the model. Nothing has changed.
        CheckpointError: see CheckpointManager.load.
    """
    args = _settings.arguments()
    refuse_partial_loads(strict, skip_load_to_model_and_opt)
    refuse_other_kinds(False, False, rng_state_key_prefix)
    args.refuse_unsupported()
    training = _settings.training(ddp_model, optimizer, opt_param_scheduler)
    dp, rule = training.layout()["dp"], _settings.other_data_size

    def data_in(state: Mapping[str, Any]) -> LoadedData:
        return LoadedData.of(state, dp, rule)

    loaded = _checkpoints.load(
        training,
        args,
        _settings.config,
        load_arg=load_arg,
        check=lambda: check_groups(training.model, tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group),
        check_state=lambda state: data_in(state).check(),
    )
    global _loaded_data
    _loaded_data = LoadedData()
    if loaded is None:
        return 0, 0
    if args["finetune"]:
        return 0, loaded.operations
    restore_counters(loaded, args)
    _loaded_data = data_in(loaded.state).kept()
    return loaded.iteration, loaded.operations


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Waits for an async save.

    Megatron-LM's loop calls this function at each iteration and at the end (`async_utils.py`).

    Args:
        blocking: True waits until no save is under way. False waits for nothing, because a save commits on its own
            thread.
        terminate: True also waits, and then frees the memory that saves use.

    Raises:
        CheckpointError: the save that was under way failed. All ranks raise it. With `blocking` or `terminate` this
            function raises the error; otherwise the next save or load does.
    """
    _checkpoints.finalize(blocking, terminate)
    if _bank is not None:
        _bank.compact()


def loaded_dataloader_state() -> Any:
    """Returns this rank's data loader state from the checkpoint that was loaded last; None if there is no such state.

    The state is what `train_data_iterator.iterable.save_state()` returned for the save: Energon's object (for
    `restore_state_rank`), plain values, or a ShardedPosition. Under another data-parallel size, Energon's object has
    this rank's share of all saved workers (`ShardedPosition.of_energon`).

    Megatron-LM writes the state below `args.dataloader_save`, in separate files, which can belong to another iteration
    than the weights. Here the state is part of the checkpoint.

    A state that does not fit the data-parallel size was refused by `load_checkpoint`; see `other_data_size` of
    `configure`.
    """
    return _loaded_data.for_rank()


def _read_dataloader_state(train_data_iterator: Any, args: Arguments) -> Any:
    """Reads the data loader's state, like Megatron-LM's `maybe_save_dataloader_state`; None if no state is wanted."""
    if train_data_iterator is None or not args["dataloader_save"]:
        return None
    iterable: Any = getattr(train_data_iterator, "iterable", None)
    if not hasattr(iterable, "save_state"):
        raise UnsupportedError(
            f"args.dataloader_save is set, but train_data_iterator (a {type(train_data_iterator).__name__}) has no "
            "iterable with a save_state: leave the argument out, or pass a data iterator that has such an iterable "
            "(Megatron Energon's)"
        )
    state = iterable.save_state()
    return energon.position_of_state(state) if energon.is_state(state) else state
