"""Settles from config, tensors and flags whether a model has tied embeddings, a value head, multi-token prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.table import HF_HEAD, MCORE_HEAD
from mcore_ckpt.sharding.regions import Shape

_HF_VALUE, _HF_BIAS = "score.weight", "score.bias"


def reconcile(
    model: HfModel,
    tensors: Mapping[str, Shape],
    tie_word_embedding: bool | None = None,
    is_value_model: bool | None = None,
) -> HfModel:
    """Returns the model with the facts that its tensors show, after checking these facts against config and flags.

    Args:
        model: the model that `config.json` describes, from `model_from_config`.
        tensors: the shapes of all tensors by name. The names are those of a HuggingFace folder, or the global names of
            an mcore checkpoint.
        tie_word_embedding: the user's flag, True if the output head is the embedding. None if the flag is not set.
        is_value_model: the user's flag, True if the head gives one value. None if the flag is not set. Trainers save a
            critic with the config of its language model, so a flag that agrees with the tensors overrules the class in
            the config.

    Returns:
        The model with `is_tied`, `is_value`, the bias of the value head and `mtp_layers` set to match the tensors. A
        value model is never tied.

    Raises:
        CheckpointMismatchError: flags, config and tensors contradict each other.

    Example:
        >>> shapes = {tensor.name: tensor.shape for tensor in stored}  # doctest: +SKIP
        >>> model = reconcile(model_from_config(read_config(folder)), shapes)  # doctest: +SKIP
    """
    ignored = [re.compile(pattern) for pattern in model.ignored]
    there = {name: shape for name, shape in tensors.items() if not any(p.fullmatch(name) for p in ignored)}
    is_mcore = any(name.startswith(("embedding.", "decoder.")) for name in there)
    value = _reconcile_value(model, _value_in(there, is_mcore), is_value_model)
    tied = not value and _reconcile_tied(model, _tied_in(there, is_mcore), tie_word_embedding)
    facts = model.facts - {"value", "score_bias", "tied"}
    if value:
        # mcore's value heads have no bias, so for mcore tensors the config decides. If the config has no value class,
        # an export gets the class ...ForTokenClassification, which has a bias.
        has_bias = _HF_BIAS in there if not is_mcore else "score_bias" in model.facts or not model.is_value
        facts |= {"value", *(("score_bias",) if has_bias else ())}
    elif tied:
        facts |= {"tied"}
    known = replace(model.known, facts=frozenset(facts), mtp_layers=_reconcile_mtp(model, there, is_mcore))
    return replace(model, known=known)


_VALUE_HINTS = {
    True: "pass is_value_model=True (--is-value-model) if the checkpoint is a value model",
    False: "use the config.json of the language model",
}


def _value_in(there: Mapping[str, Shape], is_mcore: bool) -> bool:
    if is_mcore:
        return MCORE_HEAD in there and there[MCORE_HEAD][0] == 1
    return _HF_VALUE in there


def _tied_in(there: Mapping[str, Shape], is_mcore: bool) -> bool:
    return (MCORE_HEAD if is_mcore else HF_HEAD) not in there


def _reconcile_value(model: HfModel, data: bool, user: bool | None) -> bool:
    named = bool(model.config.get("architectures"))
    if user is not None and user != data:
        raise CheckpointMismatchError(
            f"is_value_model is {user}, but the tensors are those of a model with a {_head(data)}: omit the flag, or "
            "choose another checkpoint"
        )
    if user is None and named and model.is_value != data:
        raise CheckpointMismatchError(
            f"config.json: architectures is {model.config['architectures']}, but the tensors are those of a model "
            f"with a {_head(data)}: {_VALUE_HINTS[data]}"
        )
    return data


def _head(is_value: bool) -> str:
    return "value head" if is_value else "language model's head"


def _reconcile_tied(model: HfModel, data: bool, user: bool | None) -> bool:
    stated = bool(model.config.get("tie_word_embeddings"))
    head = (
        "no head of its own (lm_head.weight or output_layer.weight)"
        if data
        else "a head (lm_head.weight or output_layer.weight)"
    )
    if user is not None and user != data:
        raise CheckpointMismatchError(f"tie_word_embedding is {user}, but the tensors have {head}: omit the flag")
    if stated != data:
        hint = (
            "if the head is a copy of the embedding, exclude it with --ignore"
            if stated
            else "the checkpoint is incomplete, or tie_word_embeddings should be true"
        )
        raise CheckpointMismatchError(
            f"config.json: tie_word_embeddings is {stated}, but the tensors have {head}: {hint}"
        )
    return data


def _reconcile_mtp(model: HfModel, there: Mapping[str, Shape], is_mcore: bool) -> tuple[frozenset[str], ...]:
    """Returns the model's multi-token-prediction layers, or an empty tuple if the tensors have none.

    A config that announces such layers does not contradict tensors without them, because transformers does not save
    multi-token prediction.
    """
    first = "mtp.layers.0." if is_mcore else f"model.layers.{len(model.layers)}."
    return model.mtp_layers if any(name.startswith(first) for name in there) else ()
