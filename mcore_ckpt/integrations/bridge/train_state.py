"""Saves and restores Megatron-Bridge's TrainState: iteration, samples, operations and its other counters."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.num_microbatches_calculator import update_num_microbatches

from mcore_ckpt.integrations.kit.arguments import COUNTERS
from mcore_ckpt.integrations.kit.loop import Loaded

_KEY = "train_state"  # in the state of LoopCheckpoints.save


def saved_state(state: Any, operations: float) -> dict[str, Any]:
    """Returns the part of Bridge's GlobalState that a save keeps, for LoopCheckpoints.save.

    `operations` is the number of floating-point operations so far, which Bridge passes to each save.
    """
    train_state = state.train_state
    counts = {field.name: getattr(train_state, field.name) for field in fields(train_state)}
    return {
        "num_floating_point_operations_so_far": operations,
        **{name: getattr(train_state, name) for name in COUNTERS},
        _KEY: {**counts, "floating_point_operations_so_far": operations},
        # `mcore-ckpt convert` needs this text to make a step for Megatron-Bridge's own manager. All ranks have the same
        # configuration, so only rank 0 saves the text.
        "run_config": _as_yaml(state.cfg) if dist.get_rank() == 0 else None,
    }


def restore_train_state(state: Any, loaded: Loaded) -> None:
    """Sets Bridge's TrainState, and the number of micro-batches, which follows from it."""
    from megatron.bridge.training.state import TrainState

    if state.cfg.checkpoint.finetune:
        state.train_state.step = 0
        return
    saved = loaded.state.get(_KEY)
    if saved is None:  # another framework has saved the step
        operations = {"floating_point_operations_so_far": loaded.operations}
        saved = {"step": loaded.iteration, **loaded.counters, **operations}
    known = {field.name for field in fields(TrainState)}
    state.train_state = TrainState(**{name: value for name, value in saved.items() if name in known})
    update_num_microbatches(consumed_samples=state.train_state.consumed_train_samples, verbose=True)


def _as_yaml(cfg: Any) -> str:
    """Returns the contents of run_config.yaml in Bridge's own checkpoints. Only Bridge knows how to write this file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run_config.yaml"
        cfg.to_yaml(str(path))
        return path.read_text()
