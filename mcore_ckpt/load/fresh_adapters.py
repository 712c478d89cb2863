"""Lets a run train new adapters on a checkpoint without adapters, from which only the base model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.sharding.adapter_names import is_adapter, peft_matrix
from mcore_ckpt.state.trainer import Trainer

logger = logging.getLogger(__name__)


def choice_of(
    trainer: Trainer, place: Path | str, live: Iterable[str], stored: Iterable[str]
) -> Callable[[str, bool], bool]:
    """Returns a function that says whether a tensor is to be loaded, given its name and whether it is frozen.

    If the checkpoint has no adapters, the model's adapters keep their values. Then the base model is loaded even with
    `skip_frozen`, because there is nothing else to load.

    `live` has the names of the model's tensors on this rank, and `stored` has the names of the checkpoint's tensors.

    Raises CheckpointMismatchError if the checkpoint lacks the adapters and the optimizer is to be loaded.
    """
    # All ranks must decide alike, but a pipeline stage can be without adapters. So look at `trainer.adapters`, which
    # describes the adapters of the whole model.
    has_adapters = trainer.adapters is not None or any(map(_is_adapter, live))
    if not has_adapters or "model" not in trainer.config.load_contents or any(map(_is_adapter, stored)):
        return lambda name, is_frozen: not (trainer.config.skip_frozen and is_frozen)
    if "optimizer" in trainer.config.load_contents:
        raise CheckpointMismatchError(
            f"{place}: has no adapters, and no optimizer state for the model's adapters: leave 'optimizer' out of "
            "load_contents to load the base model and to train new adapters"
        )
    if trainer.agreement.is_coordinator:
        logger.warning(
            "%s: has no adapters: the base model is loaded, and the model's adapters keep their values", place
        )
    return lambda name, is_frozen: not _is_adapter(name)


def _is_adapter(name: str) -> bool:
    """Returns True for an adapter's tensor. Also knows PEFT's names (ROLL's live modules, ms-swift's checkpoints)."""
    return is_adapter(name) or peft_matrix(name) is not None
