"""Decides from config, tensors and flags whether a model has tied embeddings, a value head and multi-token prediction.

The tensors, `config.json` and the flags of older tools can each show these facts. In a conversion or merge, a
contradiction is an error. In a live save the tensors decide, because a critic is trained with the config of its
language model. The save then writes a `config.json` that fits the tensors (`config_of_weights`, which also spells rope
and dtype for both transformers 4 and 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import hf_mtp_prefix
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.towers import in_tower, split_language_model

HF_VALUE, _HF_BIAS = "score.weight", "score.bias"


def reconcile(
    model: HfModel,
    tensors: Mapping[str, Shape],
    tie_word_embedding: bool | None = None,
    is_value_model: bool | None = None,
) -> HfModel:
    """Returns the model with the facts that its tensors show, after checking these facts against config and flags.

    Args:
        model: the model that `config.json` describes, from `model_from_config`.
        tensors: the shapes of all tensors, by their names in a HuggingFace folder or their global names in an mcore
            checkpoint.
        tie_word_embedding: the user's flag, True if the output head is the embedding. None if the flag is not set.
        is_value_model: the user's flag, True if the head gives one value. None if the flag is not set. Trainers save a
            critic with the config of its language model, so a flag that agrees with the tensors overrules the class in
            the config.

    Returns:
        The model with `is_tied`, `is_value`, the bias of the value head, `mtp_layers` and the kind of its vision tower
        set to match the tensors. A value model is never tied.

    Raises:
        CheckpointMismatchError: flags, config and tensors contradict each other.

    Example:
        >>> shapes = {tensor.name: tensor.shape for tensor in stored}  # doctest: +SKIP
        >>> model = reconcile(model_from_config(read_config(folder)), shapes)  # doctest: +SKIP
    """
    ignored = [re.compile(pattern) for pattern in model.ignored]
    there = {name: shape for name, shape in tensors.items() if not any(p.fullmatch(name) for p in ignored)}
    is_mcore = any(split_language_model(name)[1].startswith(("embedding.", "decoder.")) for name in there)
    if is_mcore:
        model = with_tower_of(model, there)
    model = with_mtp_of(model, there)
    hf_head = model.architecture.table.hf_head
    head = found_as(model.mcore_head, there) if is_mcore else hf_head if hf_head in there else None
    value = _reconcile_value(model, _value_in(there, head, is_mcore), is_value_model)
    tied = not value and _reconcile_tied(model, head is None, tie_word_embedding)
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


def with_tower_of(model: HfModel, names: Iterable[str]) -> HfModel:
    """Returns the model with the kind of vision tower that the names of mcore tensors show.

    A vision-language model of megatron has either a tower of megatron's modules, or transformers' own tower (the fact
    "hf_tower"). The architecture's facts say which of these towers Megatron-Bridge uses; other programs may use the
    other tower. Names that belong to no tower change nothing.
    """
    tower = [name for name in names if in_tower(name)]
    if not tower:
        return model
    is_megatron = any(name.startswith("vision_model.decoder.") for name in tower)
    facts = model.facts - {"hf_tower"} if is_megatron else model.facts | {"hf_tower"}
    return replace(model, known=replace(model.known, facts=frozenset(facts)))


def with_mtp_of(model: HfModel, names: Iterable[str]) -> HfModel:
    """Returns the model, with multi-token prediction if the names show it but `config.json` does not mention it."""
    first = model.architecture.table.mcore + "mtp.layers.0.", hf_mtp_prefix(model)
    if model.mtp_layers or not model.known.unstated_mtp or not any(name.startswith(first) for name in names):
        return model
    return replace(model, known=replace(model.known, mtp_layers=model.known.unstated_mtp))


def with_tokens(model: HfModel, rows: int, tokens: int | None) -> HfModel:
    """Returns the model with a row of the vocabulary for each token of a tokenizer, if `config.json` states fewer rows.

    Training can add tokens, which use rows of megatron's padding, but the configuration still describes the base model.
    Without this function, the rows of these tokens would be cut off as padding. `rows` is the number of rows of the
    stored embedding, and `tokens` is the number of the tokenizer's tokens (None if this number is unknown).

    Raises:
        CheckpointMismatchError: the tokenizer has more tokens than the embedding has rows, and `config.json` states
            fewer rows than the embedding has. Then it is unknown which rows belong to tokens.
    """
    stated = model.sizes.get("vocab", rows)
    if tokens is None or min(tokens, rows) <= stated:
        return model
    if tokens > rows:
        raise CheckpointMismatchError(
            f"the tokenizer has {tokens} tokens, but the embedding has only {rows} rows, and vocab_size of config.json "
            f"is {stated}, so it is unknown which rows belong to tokens: use the tokenizer of this model, or set "
            "vocab_size to the number of rows to keep"
        )
    config = model.architecture.with_language_config(model.config, {**model.language_config, "vocab_size": tokens})
    sizes = {**model.sizes, "vocab": tokens}
    return replace(model, config=config, known=replace(model.known, sizes=sizes))


_VALUE_HINTS = {
    True: "if the checkpoint is a value model, use mcore-ckpt merge (or test) --is-value-model",
    False: "use the config.json of the language model",
}


def _value_in(there: Mapping[str, Shape], head: str | None, is_mcore: bool) -> bool:
    if is_mcore:
        return head is not None and there[head][0] == 1
    return HF_VALUE in there


def _reconcile_value(model: HfModel, data: bool, user: bool | None) -> bool:
    named = bool(model.config.get("architectures"))
    if user is not None and user != data:
        raise CheckpointMismatchError(
            f"is_value_model is {user}, but the tensors show a model with a {_head(data)}: omit the flag, or choose "
            "another checkpoint"
        )
    if user is None and named and model.is_value != data:
        raise CheckpointMismatchError(
            f"config.json: architectures is {model.config['architectures']}, but the tensors show a model with a "
            f"{_head(data)}: {_VALUE_HINTS[data]}"
        )
    return data


def _head(is_value: bool) -> str:
    return "value head" if is_value else "language model's head"


def _reconcile_tied(model: HfModel, data: bool, user: bool | None) -> bool:
    field = model.architecture.tied_field
    stated = bool(model.language_config.get(field))
    names = f"({model.architecture.table.hf_head} or {model.mcore_head})"
    head = f"no separate head {names}" if data else f"a head {names}"
    if user is not None and user != data:
        raise CheckpointMismatchError(f"tie_word_embedding is {user}, but the tensors have {head}: omit the flag")
    if stated != data:
        hint = (
            "if the head is a copy of the embedding, exclude it with mcore-ckpt merge --ignore"
            if stated
            else f"the checkpoint is incomplete, or {field} should be true"
        )
        raise CheckpointMismatchError(f"config.json: {field} is {stated}, but the tensors have {head}: {hint}")
    return data


def _reconcile_mtp(model: HfModel, there: Mapping[str, Shape], is_mcore: bool) -> tuple[frozenset[str], ...]:
    """Returns the model's layers of multi-token prediction; none if the tensors have none.

    A config can state such layers although the tensors have none, because transformers does not save these layers.
    """
    first = model.architecture.table.mcore + "mtp.layers.0." if is_mcore else hf_mtp_prefix(model)
    return model.mtp_layers if any(name.startswith(first) for name in there) else ()
