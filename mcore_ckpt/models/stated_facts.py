"""Reads from `config.json` how a model computes with its tensors, and compares these facts with a checkpoint's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint.file_names import config_dir
from mcore_ckpt.checkpoint.model_facts import DifferentFact, Facts, config_facts, described, hidden_differences
from mcore_ckpt.errors import CheckpointError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.mcore_config import check_known, gpt_arguments, to_mcore_config
from mcore_ckpt.models.registry import model_from_config

# The facts that decide the order of rows in a tensor. The tensor's shape does not show this order. Each fact is mapped
# to the name of its size in the table.
_ORDER = {
    "num_attention_heads": "heads",
    "num_query_groups": "groups",
    "kv_channels": "head_dim",
    "linear_num_key_heads": "key_heads",
    "vision_model.num_attention_heads": "v_heads",
}
IN_CONFIG = "in config.json"


def facts_of_model(model: HfModel) -> Facts:
    """Returns the facts that `config.json` states; none if there are no rules, or megatron cannot build the model."""
    try:
        stated = to_mcore_config(model)
    except UnsupportedError:
        return {}
    return config_facts(stated.fields, stated.gpt)


def facts_of_folder(path: Path) -> Facts:
    """Returns the facts that the `config.json` of a checkpoint's folder states; none if there is no such file."""
    folder = config_dir(path)
    try:
        return {} if folder is None else facts_of_model(model_from_config(read_config(folder)))
    except CheckpointError:
        return {}  # a checkpoint can be loaded without these facts


def other_facts(saved: Facts, model: HfModel) -> list[DifferentFact]:
    """Returns the differences between `config.json` and the model that was trained, in facts that no tensor shows.

    `saved` has the facts of the checkpoint or of the live model. Facts that `saved` lacks are not compared.
    """
    towers = {name: value for name, value in saved.items() if "." in name}  # no rule describes towers
    sizes = {fact: model.sizes[size] for fact, size in _ORDER.items() if size in model.sizes}
    return hidden_differences(saved, {**towers, **(facts_of_model(model) or saved), **sizes})


def check_rows(
    saved: Facts, model: HfModel, saved_in: str = "in the checkpoint", stated_in: str = IN_CONFIG
) -> list[DifferentFact]:
    """Returns what `other_facts` returns, if `model` has the same order of rows as the trained model.

    Raises CheckpointMismatchError: the orders differ, so tensors would be cut at the wrong rows.
    """
    found = other_facts(saved, model)
    if wrong := [each for each in found if each.name in _ORDER]:
        raise CheckpointMismatchError(
            f"{described(wrong, saved_in, stated_in)}, so the {model.describe()} of this config.json has another order "
            "of rows in its tensors: give the configuration of the model that was trained"
        )
    return found


def check_model(model: Any, hf_model: HfModel, strict: bool = True) -> list[DifferentFact]:
    """Raises CheckpointMismatchError unless a live model computes what a HuggingFace config describes.

    Args:
        model: an unwrapped `GPTModel` or `HybridModel`, or another module with megatron's `config`. Facts that tensors
            show, and arguments that the module does not expose, are not compared. The model may lack multi-token
            prediction.
        hf_model: the model that the config describes, from `model_from_config`.
        strict: False to accept differences that are made on purpose for a longer context (the rotary base). Such
            differences are returned, but raise no error.

    Returns:
        The differences. In each of them, `saved` is the config's value, and `live` is the live model's value.
    """
    # Megatron-Bridge and mbridge keep the language model in a module that also has the vision tower.
    model = getattr(model, "language_model", None) or model
    stated = to_mcore_config(hf_model)
    check_known(stated.transformer, model.config)
    live = config_facts(model.config, gpt_arguments(model))
    found = hidden_differences(config_facts(stated.fields, stated.gpt), live)
    for each in found:
        if strict or not each.may_change:
            raise CheckpointMismatchError(
                f"the model's {each.name} is {each.live!r}, but config.json of this {hf_model.describe()} requires "
                f"{each.saved!r}: build the model with mcore_ckpt.models.to_mcore_config, or load the HuggingFace "
                "model for which this model was built"
            )
    if model.share_embeddings_and_output_weights != hf_model.is_tied and not hf_model.is_value:
        raise CheckpointMismatchError(
            f"the model's share_embeddings_and_output_weights is {model.share_embeddings_and_output_weights}, but "
            f"{hf_model.architecture.tied_field} of this {hf_model.describe()} is {hf_model.is_tied}: build the model "
            "with mcore_ckpt.models.to_mcore_config"
        )
    return found
