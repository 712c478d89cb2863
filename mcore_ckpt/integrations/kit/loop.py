"""Saves and loads for training loops like Megatron-LM's, whatever framework they belong to.

Such a loop has options with Megatron-LM's names (`arguments`), counts iterations and samples, and may resume from a
checkpoint in the framework's own format. The framework's integration reads the options and the counters from the
framework, and restores the counters after a load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.core import num_microbatches_calculator as microbatches

from mcore_ckpt import LoadResult, SaveHandle
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.integrations.kit.arguments import COUNTERS, Arguments
from mcore_ckpt.integrations.kit.kept import KeptManager
from mcore_ckpt.integrations.kit.rerun import read_rerun_state, write_rerun_state
from mcore_ckpt.integrations.kit.resume import FindTheirs, check_integrity, find, megatron_checkpoint
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.ranks import read_topology
from mcore_ckpt.state import process_groups_of, read_rng, write_rng

logger = logging.getLogger(__name__)

# The key of these loops' state in extra_state. All frameworks use the same key, so a run can change its framework.
_KEY = "megatron"
# The value for Megatron-LM's `set_checkpoint_version`. 3.0 means the order of query, key and value that Megatron-LM has
# used since 2021.
CHECKPOINT_VERSION = 3.0


@dataclass(frozen=True, eq=False)
class Training:
    """The objects that a loop trains, and other arguments of its manager. CheckpointManager describes the fields."""

    model: list[Any]
    optimizer: Any = None
    lr_scheduler: Any = None
    role: str = "actor"
    hf_config: Any = None
    processing_class: Any = None

    def arguments(self) -> dict[str, Any]:
        """Returns the fields, which are arguments of CheckpointManager."""
        return dict(vars(self))

    def layout(self) -> dict[str, int]:
        """Returns the sizes for which a rerun state is valid. Megatron-LM drops the state if a size changes."""
        topology = read_topology(process_groups_of(self.model))[1]
        return {"world_size": topology.world_size, "tp": topology.tp, "pp": topology.pp, "dp": topology.dp}


@dataclass(frozen=True)
class LoopSettings:
    """Settings for which a loop has no options. An integration's `configure` sets the fields. See CheckpointManager."""

    config: CheckpointConfig = field(default_factory=CheckpointConfig)
    role: str = "actor"
    hf_config: Any = None
    processing_class: Any = None


@dataclass(frozen=True, eq=False)
class Loaded:
    """The loop's own state, as a load returns it. (The load fills the training state in place.)

    Attributes:
        folder: the root (the folder of all checkpoints) in which the checkpoint was found.
        state: the `state` of `LoopCheckpoints.save`, completed with the counters.
    """

    folder: str
    state: Mapping[str, Any]

    @property
    def iteration(self) -> int:
        """The iteration that was saved."""
        return int(self.state["iteration"])

    @property
    def operations(self) -> float:
        """`num_floating_point_operations_so_far`."""
        return self.state["num_floating_point_operations_so_far"]

    @property
    def counters(self) -> dict[str, int]:
        """The numbers of samples, by Megatron-LM's names."""
        return {name: self.state.get(name, 0) for name in COUNTERS}


class LoopCheckpoints:
    """Saves and loads for one training loop. Every rank makes such an object, and all ranks call the same methods."""

    def __init__(self) -> None:
        self._kept = KeptManager()

    def attach(self, name: str, **how: Any) -> None:
        """Attaches a part to all saves and loads from now on. See CheckpointManager.attach."""
        self._kept.attach(name, **how)

    def saving_manager(self, training: Training, args: Arguments, config: CheckpointConfig) -> CheckpointManager:
        """Returns the manager that saves: the same manager while the arguments are the same. Raises CheckpointError."""
        config = args.saving(config, training.optimizer is not None)
        return self._kept.get(args.folder("save"), training.arguments(), config)

    def save(
        self,
        iteration: int,
        training: Training,
        args: Arguments,
        config: CheckpointConfig,
        state: Callable[[], Mapping[str, Any]],
        *,
        data_iterator: Any = None,
        path: Path | None = None,
        prepared: Callable[[], object] | None = None,
    ) -> SaveHandle:
        """Saves to `<args.save>/global_steps_{iteration}/{role}`, or to `path`.

        `args` overrides `config`. `state` returns the loop's own state: the counters,
        `num_floating_point_operations_so_far`, and other plain values. If `state` raises on one rank, all ranks raise.
        The rerun state machine saves the state of `data_iterator`. `prepared` is as in CheckpointManager.save.

        Raises CheckpointError: see CheckpointManager.save.
        """
        manager = self.saving_manager(training, args, config)

        def saved() -> dict[str, Any]:
            return {
                "iteration": iteration,
                "checkpoint_version": CHECKPOINT_VERSION,
                "no_save_rng": bool(args["no_save_rng"]),
                "layout": training.layout(),
                "arguments": args.plain(),
                "rerun_state_machine": read_rerun_state(data_iterator),
                **state(),
            }

        return manager.save(iteration, extra_state=lambda: {_KEY: saved()}, path=path, prepared=prepared)

    def load(
        self,
        training: Training,
        args: Arguments,
        config: CheckpointConfig,
        *,
        load_arg: str = "load",
        check: Callable[[], None] = lambda: None,
        choose_step: Callable[[Path], int | None] = lambda root: None,
        find_theirs: FindTheirs = megatron_checkpoint,
        check_state: Callable[[Mapping[str, Any]], object] = lambda state: None,
    ) -> Loaded | None:
        """Loads the newest checkpoint in the folder `args.<load_arg>`, or step `args.ckpt_step`.

        Args:
            training: the objects to load into.
            args: the loop's options, which override `config`. A load from `pretrained_checkpoint` sets `finetune`.
            config: the options of this package.
            load_arg: the name of the option that names the folder. If this folder has no checkpoint, the folder of
                `pretrained_checkpoint` is tried.
            check: a function to call before anything is loaded. If the function raises on one rank, all ranks raise.
            choose_step: returns which step of a folder to load if `args.ckpt_step` names no step; None for the newest.
                Only rank 0 calls `choose_step`.
            find_theirs: finds a checkpoint in the framework's own format.
            check_state: a function to call with the saved `state` before anything changes, unless the load begins a
                finetuning, or the checkpoint has no such state. If the function raises on one rank, all ranks raise.

        Returns None if there never was a checkpoint.

        Raises:
            CheckpointNotFoundError: there are checkpoints, but none is complete; or there is no checkpoint, and
                `args.exit_on_missing_checkpoint` is set or `args.pretrained_checkpoint` names a second folder.
            CheckpointError: see CheckpointManager.load.
        """
        self._kept.wait()
        folders = [str(folder) for folder in (args[load_arg], args["pretrained_checkpoint"]) if folder]
        if not folders:
            logger.warning("%s names no folder, so training starts from the beginning", load_arg)
            return None

        # The nodes have only steps of this run, which saves to `args.save`. If `load_arg` names another folder, the
        # steps on the nodes must not be loaded.
        config = config if str(args[load_arg]) == str(args["save"]) else replace(config, fast=None)
        # A separate manager finds the checkpoint, because the options of the loading manager depend on the checkpoint.
        finder = CheckpointManager(
            folders[0], config=args.loading(config, training.optimizer is not None), **training.arguments()
        )
        try:
            whole, lost = finder.fast_steps_found((training.role,), args["ckpt_step"] or None)

            def look(root: Path, step: int | None) -> dict[str, Any] | None:
                fast = [each.step for each in whole] if root == Path(folders[0]) else ()
                return find(root, training.role, choose_step(root) if step is None else step, find_theirs, fast)

            found = _find_together(finder, folders, args, check, look)
        finally:
            finder.close()
        if not found and lost:
            raise CheckpointNotFoundError(
                f"{folders[0]}: the fast tier had checkpoints, but none is whole any more: to start from the beginning "
                f"nevertheless, delete {config.fast and config.fast.folder} on all nodes\n  "
                + "\n  ".join(each.reason for each in lost)
            )
        if not found:
            logger.warning("%s: there is no checkpoint, so training starts from the beginning", folders[0])
            return None
        if found["folder"] != str(args[load_arg]):
            args["finetune"] = True  # as Megatron-LM does, because other code reads this argument later
        return self._load(found, args, config, training, check_state)

    def _load(
        self,
        found: dict[str, Any],
        args: Arguments,
        config: CheckpointConfig,
        training: Training,
        check_state: Callable[[Mapping[str, Any]], object],
    ) -> Loaded:
        config = args.loading(config, training.optimizer is not None)
        if found["folder"] != str(args["save"]):
            config = replace(config, fast=None)
        keeps_rng = args["finetune"] or args["no_load_rng"]
        theirs = found.get("theirs")
        if theirs is not None:
            layout = training.layout()
            # Megatron-LM saves random states by tensor-parallel and pipeline-parallel rank. So the random states fit
            # only the parallel sizes of the save.
            has_rng = not found["state"]["no_save_rng"] and (found["tp"], found["pp"]) == (layout["tp"], layout["pp"])
            left_out = {"extra"} if keeps_rng or not has_rng else set()
            left_out |= {"optimizer"} if found["weights_alone"] else set()
            words = tuple(word for word in config.load_contents if word not in left_out)
            config = replace(config, load_contents=words)
        generators = read_rng()
        # With `finetune`, the training begins at iteration 0, so the load leaves out the parts of the other run, such
        # as that run's data position.
        with_parts = not args["finetune"]

        def check_extra(extra: Mapping[str, Any] | None) -> None:
            if not args["finetune"] and extra is not None and _KEY in extra:
                check_state(extra[_KEY])

        with self._kept.loader(found["folder"], training.arguments(), config, with_parts) as manager:
            if theirs is not None and args["verify_integrity"]:
                check_integrity(theirs)
            verify = "full" if args["verify_integrity"] else "read"
            path = theirs or found.get("path")
            result = manager.load(step=found.get("step"), path=path, verify=verify, check_extra=check_extra)
        state = found["state"] if theirs is not None else _state_of(result)
        if theirs is None and (keeps_rng or state["no_save_rng"]):
            # The load of `extra`, which has the counters, has also replaced the random states. Put the old states back.
            write_rng(generators)
        same_layout = state.get("layout") == training.layout()
        if not args["finetune"] and state.get("rerun_state_machine") is not None and same_layout:
            write_rerun_state(state["rerun_state_machine"])
        return Loaded(found["folder"], state)

    def finalize(self, blocking: bool = False, terminate: bool = False) -> None:
        """If `blocking`, waits until no save is under way. If `terminate`, also frees the memory that saves use.

        If both are False, this method does nothing, because a save commits on its own thread, and the next save or load
        raises the save's error. Raises CheckpointError on all ranks: the save that was under way failed.
        """
        if terminate:
            self._kept.close()
        elif blocking:
            self._kept.wait()


def restore_counters(loaded: Loaded, args: Arguments) -> None:
    """Restores the numbers of samples in a loop's options, and in the calculator of the number of micro-batches."""
    for name, count in loaded.counters.items():
        args[name] = count
    # update_num_microbatches fails if the calculator has not been set up.
    if microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        microbatches.update_num_microbatches(args["consumed_train_samples"], verbose=True)


def _find_together(
    finder: CheckpointManager,
    folders: list[str],
    args: Arguments,
    check: Callable[[], None],
    look: Callable[[Path, int | None], dict[str, Any] | None],
) -> dict[str, Any]:
    """Returns, on all ranks, the checkpoint that rank 0 has found; an empty dict if there never was a checkpoint."""
    step = args["ckpt_step"] or None  # Megatron-LM treats 0 as None, too
    needed = args["exit_on_missing_checkpoint"] or len(folders) > 1

    def answer() -> dict[str, Any]:
        for folder in folders:
            found = look(Path(folder), step)
            if found is not None:
                return {"folder": folder, **found}
        if needed:
            raise CheckpointNotFoundError(f"{' and '.join(folders)}: there is no checkpoint")
        return {}

    def request() -> dict[str, Any]:
        check()
        return {"folders": folders, "ckpt_step": step}

    return finder.agree("finding a checkpoint", request, answer)


def _state_of(result: LoadResult) -> dict[str, Any]:
    state = (result.extra_state or {}).get(_KEY)
    if state is None:
        logger.warning("%s was not saved by a loop like Megatron-LM's, so it has no counters", result.report.path)
        return {"iteration": result.step, "num_floating_point_operations_so_far": 0, "no_save_rng": False}
    return dict(state)
