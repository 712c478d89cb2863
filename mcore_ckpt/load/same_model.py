"""Compares what a checkpoint's model and the live model compute with the same tensors.

The comparison needs facts about both models. Our own checkpoints have the facts in their manifest. For other programs'
checkpoints, the facts are in Megatron-LM's stored arguments (`formats/torch_dist/arguments.py`), or in a `config.json`
next to the weights (`models/stated_facts.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from mcore_ckpt.checkpoint.model_facts import DifferentFact, Facts, described, hidden_differences
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.state.trainer import Trainer

logger = logging.getLogger(__name__)


def differences_to_live(trainer: Trainer, saved: Facts | None) -> list[DifferentFact]:
    """Returns the facts in which a checkpoint's model and the live model differ, although the tensors fit.

    Raises CheckpointMismatchError: there are such facts, and the config has `strict_model`.
    """
    if not saved or set(trainer.config.load_contents) <= {"extra"}:
        return []
    found = hidden_differences(saved, trainer.model)
    if found and trainer.config.strict_model:
        raise CheckpointMismatchError(
            f"the checkpoint's model computes something else with the same tensors: {described(found)}: build the "
            "model as it was when the checkpoint was saved, or set strict_model=False if the change is meant"
        )
    return found


def warn_of_other_model(trainer: Trainer, folder: Any, found: Sequence[DifferentFact]) -> None:
    """Logs a warning on rank 0 about the facts in which the two models differ."""
    if not trainer.agreement.is_coordinator:
        return
    if wrong := [each for each in found if not each.may_change]:
        logger.warning(
            "%s: the model computes something else with the checkpoint's tensors: %s. If that is not meant, build the "
            "model as it was when the checkpoint was saved (CheckpointConfig(strict_model=True) refuses such a load)",
            folder,
            described(wrong),
        )
    if changed := [each for each in found if each.may_change]:
        logger.warning(
            "%s: %s. This is right if the model was built for a longer context. Otherwise, build the model as it was "
            "when the checkpoint was saved",
            folder,
            described(changed),
        )
