"""Replaces Megatron-Bridge's functions in NeMo-RL's workers.

NeMo-RL's driver names a folder for each save, `<checkpoint_dir>/tmp_step_{N}/policy/weights`, and renames the step when
everything is written (`nemo_rl/utils/checkpoint.py`). So a checkpoint of ours is the folder `policy` in `weights`.
NeMo-RL never counts Bridge's iterations, so all checkpoints, NeMo-RL's and ours, have iteration 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from mcore_ckpt.checkpoint import MANIFEST_FILE
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.integrations.bridge.options import arguments, overridden_config, refuse_unsupported
from mcore_ckpt.integrations.bridge.train_state import restore_train_state, saved_state
from mcore_ckpt.integrations.bridge.unsupported import refuse_load, refuse_save
from mcore_ckpt.integrations.kit.loop import LoopCheckpoints, Training
from mcore_ckpt.integrations.kit.options import refuse_fast, refuse_skip
from mcore_ckpt.integrations.kit.together import decided_by_rank_0
from mcore_ckpt.steps import write_tracker

_STEP = re.compile(r"(?:tmp_)?step_\d+")
_ITERATION = 0


class BridgeFunctions:
    """Saves and loads for one worker. Its methods replace Megatron-Bridge's functions of the same names.

    Args:
        config: the options of this package. NeMo-RL's own options override them.
        stock_load: Bridge's `load_checkpoint`, for checkpoints that are not ours.
        hf_config, processing_class: see CheckpointManager.

    Raises InvalidArgumentError, UnsupportedError: the config has an option that the driver decides on, or a fast tier.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        stock_load: Callable[..., tuple[int, float]],
        hf_config: Any = None,
        processing_class: Any = None,
    ) -> None:
        for name in ("max_to_keep", "keep_every", "keep_best", "keep_for", "optimizer_for_last", "remote", "roles"):
            if getattr(config, name) not in (None, ()):
                raise InvalidArgumentError(
                    f"{name} is not for NeMo-RL's workers, because NeMo-RL's driver keeps and deletes the steps: leave "
                    "it out of checkpoint_config"
                )
        if config.if_failed != "raise":
            raise InvalidArgumentError(
                f"if_failed is {config.if_failed!r}: NeMo-RL's driver deletes older steps when the workers report no "
                "error, so a failed save must raise an error: leave if_failed out of checkpoint_config"
            )
        refuse_fast(config, "checkpoint_config", "NeMo-RL's driver renames the folder of each step")
        refuse_skip(config, "checkpoint_config", "NeMo-RL's driver counts a step as saved when the workers return")
        self._config = config
        self._stock_load = stock_load
        self._beside = (hf_config, processing_class)
        self._checkpoints = LoopCheckpoints()

    def save_checkpoint(
        self,
        state: Any,
        model: list[Any],
        optimizer: Any,
        opt_param_scheduler: Any,
        num_floating_point_operations_so_far: float,
        checkpointing_context: dict[str, Any] | None = None,
    ) -> None:
        """Saves into `cfg.checkpoint.save`. With `async_save` the commit follows some time after this method returns.

        Raises:
            UnsupportedError: the configuration asks for something that cannot be honoured. Nothing was saved.
            CheckpointError: see CheckpointManager.save.
        """
        weights = Path(state.cfg.checkpoint.save)
        refuse_save(_context(state, model))
        # NeMo-RL sets this option for the first load of a run with FP8 parameters. Bridge does this load, and no save
        # needs the option.
        refuse_unsupported(state.cfg.checkpoint, but=("load_main_params_from_ckpt",))
        root, role = _place(weights)
        args = arguments(state.cfg)
        args["save"] = str(root)
        # The worker may move parameters and optimizer state to the host as soon as this method has returned, so copy
        # the state before this method returns.
        config = replace(self._config_of(state), async_mode="snapshot")
        self._checkpoints.save(
            _ITERATION,
            Training(model, optimizer, opt_param_scheduler, role, *self._beside),
            args,
            config,
            lambda: saved_state(state, num_floating_point_operations_so_far),
            path=weights / role,
        )
        if dist.get_rank() == 0:
            # `setup_model_and_optimizer` asks for a load only if Bridge sees a tracker in the folder. The driver has
            # not renamed the step yet, so nobody looks for the step before it is committed.
            write_tracker(weights, _ITERATION)

    def load_checkpoint(
        self,
        state: Any,
        model: list[Any],
        optimizer: Any,
        opt_param_scheduler: Any,
        checkpointing_context: dict[str, Any] | None = None,
        skip_load_to_model_and_opt: bool = False,
    ) -> tuple[int, float]:
        """Loads `cfg.checkpoint.load`, which this package or Megatron-Bridge wrote.

        Returns:
            Bridge's iteration, which is 0, and the number of floating-point operations so far.

        Raises:
            UnsupportedError: the configuration asks for something that cannot be honoured. Nothing has been done.
            CheckpointError: see CheckpointManager.load.
        """
        weights, timeout_s = state.cfg.checkpoint.load, self._config.timeout_s
        _, role = _place(Path(weights)) if weights else (None, "policy")

        def is_ours() -> bool:
            return bool(weights) and (Path(weights) / role / MANIFEST_FILE).exists()

        if not decided_by_rank_0("nemo_rl/load", f"looking at {weights}", str(weights), is_ours, timeout_s):
            # Bridge loads the HuggingFace model at the first start, a reference model, or a checkpoint that Bridge
            # wrote.
            return self._stock_load(
                state,
                model,
                optimizer,
                opt_param_scheduler,
                checkpointing_context=checkpointing_context,
                skip_load_to_model_and_opt=skip_load_to_model_and_opt,
            )
        refuse_load(_context(state, model, skip_load_to_model_and_opt))
        refuse_unsupported(state.cfg.checkpoint)
        training = Training(list(model), optimizer, opt_param_scheduler, role)
        loaded = self._checkpoints.load(training, arguments(state.cfg), self._config_of(state))
        assert loaded is not None, "the manifest is there"
        restore_train_state(state, loaded)
        return state.train_state.step, loaded.operations

    def maybe_finalize_async_save(
        self, global_state: Any, ckpt_cfg: Any = None, blocking: bool = False, terminate: bool = False
    ) -> None:
        """Waits for an async save. See LoopCheckpoints.finalize."""
        self._checkpoints.finalize(blocking, terminate)

    def _config_of(self, state: Any) -> CheckpointConfig:
        return overridden_config(state.cfg.checkpoint, self._config, state.cfg.peft is not None)


def _place(weights: Path) -> tuple[Path, str]:
    """Returns the folder of all steps and the role to which a folder `<root>/step_{N}/{role}/weights` belongs.

    Raises InvalidArgumentError: the folder has another name.
    """
    if weights.name != "weights" or not _STEP.fullmatch(weights.parent.parent.name):
        raise InvalidArgumentError(
            f"{weights}: is not a folder of the form <checkpoint_dir>/step_<N>/policy/weights, as NeMo-RL names its "
            "checkpoints"
        )
    return weights.parents[2], weights.parent.name


def _context(state: Any, model: list[Any], skip: bool = False) -> Any:
    """Returns a context, like the context that Bridge's manager gets, for the checks of Bridge's integration."""
    return SimpleNamespace(
        state=state, model=model, non_persistent_ckpt=False, strict=True, skip_load_to_model_and_opt=skip
    )
