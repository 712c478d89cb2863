"""Whether a model is tied, has a value head or multi-token prediction: config, data and the user's word compared."""

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
    """The model as it is: what `config.json` says, checked against the tensors that there are.

    Args:
        model: from `model_from_config`.
        tensors: shapes by name, of a HuggingFace folder or of an mcore checkpoint (global names); all of them.
        tie_word_embedding: what the user says: the head is the embedding. None: nothing.
        is_value_model: what the user says: the head gives one value. None: nothing. Trainers leave the language model's
            config beside a critic, so here the user's word and the data together outweigh the config's class.

    Returns:
        The model with `is_tied`, `is_value`, the bias of the value head and `mtp_layers` as the tensors have them. A
        value model is never tied.

    Raises:
        CheckpointMismatchError: user, config and data do not agree.

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
        # ...ForTokenClassification, which an export of a model whose config does not say makes, has a bias.
        has_bias = _HF_BIAS in there if not is_mcore else "score_bias" in model.facts or not model.is_value
        facts |= {"value", *(("score_bias",) if has_bias else ())}
    elif tied:
        facts |= {"tied"}
    known = replace(model.known, facts=frozenset(facts), mtp_layers=_reconcile_mtp(model, there, is_mcore))
    return replace(model, known=known)


_VALUE_HINTS = {
    True: "say is_value_model=True (--is-value-model) if that is meant",
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
            f"is_value_model is {user}, but the tensors are those of a model with a {_head(data)}: leave it out, or "
            "choose the right checkpoint"
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
    says = bool(model.config.get("tie_word_embeddings"))
    head = (
        "no head of its own (lm_head.weight or output_layer.weight)"
        if data
        else "a head (lm_head.weight or output_layer.weight)"
    )
    if user is not None and user != data:
        raise CheckpointMismatchError(f"tie_word_embedding is {user}, but the tensors have {head}")
    if says != data:
        hint = (
            "if the head is a copy of the embedding, leave it out (--ignore)"
            if says
            else "the checkpoint is incomplete, or tie_word_embeddings should be true"
        )
        raise CheckpointMismatchError(
            f"config.json: tie_word_embeddings is {says}, but the tensors have {head}: {hint}"
        )
    return data


def _reconcile_mtp(model: HfModel, there: Mapping[str, Shape], is_mcore: bool) -> tuple[frozenset[str], ...]:
    """transformers does not save multi-token prediction though its configs announce it: none is no contradiction."""
    first = "mtp.layers.0." if is_mcore else f"model.layers.{len(model.layers)}."
    return model.mtp_layers if any(name.startswith(first) for name in there) else ()
