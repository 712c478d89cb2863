"""Compares what a checkpoint's model and the live model compute with the same tensors.

Our own checkpoints have the facts in their manifest. Of other programs' checkpoints, Megatron-LM's stored arguments
have them, or a `config.json` beside the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointError, CheckpointMismatchError
from mcore_ckpt.models.architecture import read_config
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.state.model_facts import DifferentFact, Facts, config_facts, described, different_facts
from mcore_ckpt.state.trainer import Trainer

logger = logging.getLogger(__name__)

# The tensors themselves show it, and a critic that starts from a language model has another head on purpose.
_SHOWN_BY_TENSORS = ("share_embeddings_and_output_weights",)
# What Megatron-LM calls its arguments (`core_transformer_config_from_args`, 0.15 to 0.19), if not as the fields.
_ARGUMENTS = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}
# Without these, the arguments are those of another program, and say nothing of the fields that they lack.
_OF_MEGATRON_LM = {"norm_epsilon", "swiglu", "squared_relu", "position_embedding_type", "group_query_attention"}


def differences_to_live(trainer: Trainer, saved: Facts | None) -> list[DifferentFact]:
    """Returns the facts in which a checkpoint's model differs from the live one. None of them shows in the tensors.

    Raises:
        CheckpointMismatchError: there are some, and the config has `strict_model`.
    """
    if not saved or set(trainer.config.load_contents) <= {"extra"}:
        return []
    found = [each for each in different_facts(saved, trainer.model) if not each.name.endswith(_SHOWN_BY_TENSORS)]
    if found and trainer.config.strict_model:
        raise CheckpointMismatchError(
            f"the checkpoint's model computes something else with the same tensors: {described(found)}: build the "
            "model as it was when the checkpoint was saved, or set strict_model=False if the change is meant"
        )
    return found


def warn_of_other_model(trainer: Trainer, folder: Any, found: Sequence[DifferentFact]) -> None:
    """Logs what differs, on rank 0."""
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
            "%s: %s. A longer context changes this on purpose; anything else should not",
            folder,
            described(changed),
        )


def facts_of_arguments(arguments: Mapping[str, Any]) -> Facts:
    """Returns the facts that Megatron-LM's arguments state. Returns none if another program has stored them."""
    if not arguments.keys() >= _OF_MEGATRON_LM:
        return {}
    fields = {_ARGUMENTS.get(name, name): value for name, value in arguments.items()}
    fields |= {"activation_func": "gelu", "gated_linear_unit": False}
    if arguments["swiglu"]:
        fields |= {"activation_func": "silu", "gated_linear_unit": True}
    if arguments["squared_relu"]:
        fields |= {"activation_func": "squared_relu"}
    elif arguments.get("quick_geglu"):
        fields |= {"activation_func": "quick_gelu", "gated_linear_unit": True}
    if not arguments["group_query_attention"]:
        fields["num_query_groups"] = None
    return config_facts(fields, {})


def facts_beside(path: Path) -> Facts:
    """Returns the facts that `huggingface/config.json` in a folder, or beside it, states. There may be none."""
    for folder in (path / file_names.HUGGINGFACE_DIR, path.parent / file_names.HUGGINGFACE_DIR):
        if (folder / "config.json").is_file():
            try:
                stated = to_mcore_config(model_from_config(read_config(folder)))
                return config_facts(stated.fields, stated.gpt)
            except CheckpointError:
                return {}  # a model that cannot be converted can still be loaded
    return {}
