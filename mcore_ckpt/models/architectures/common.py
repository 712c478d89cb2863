"""Rows of tables and readers of `config.json` that many architectures share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import ModelFacts
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.table import HF_EMBEDDING, HF_HEAD, MCORE_EMBEDDING, MCORE_HEAD, Row, Transform, qkv
from mcore_ckpt.sharding.towers import LANGUAGE_MODEL

MODEL = (
    Row(MCORE_EMBEDDING, {HF_EMBEDDING: "vocab hidden"}),
    Row("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"}),
    Row(MCORE_HEAD, {HF_HEAD: "vocab hidden"}, when="!tied !value"),
    Row(MCORE_HEAD, {"score.weight": "1 hidden"}, when="value"),
    # The head of a ...ForTokenClassification has a bias, but mcore's value heads have no bias. So this row has no mcore
    # name.
    Row("", {"score.bias": "1"}, when="value score_bias"),
)

NORMS = (
    Row("input_layernorm.weight", {"input_layernorm.weight": "hidden"}),
    Row("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": "hidden"}),
)


def attention(hf: str, when: str, queries: str = "heads", order: Transform = qkv, bias: str = "") -> tuple[Row, ...]:
    """Returns the rows of attention's projections.

    Args:
        hf: the beginning of the projections' HuggingFace names.
        when: see `Row`.
        queries: the number of heads in the projection of queries, as words of a shape (see `Row.hf`).
        order: a function that orders the rows of queries, keys and values (see `Row.transform`).
        bias: the words of `Row.when` for a bias of queries, keys and values; empty if there is no bias.
    """
    lengths = {"q": f"{queries}*head_dim", "k": "groups*head_dim", "v": "groups*head_dim"}
    weights = {f"{hf}.{name}_proj.weight": f"{rows} hidden" for name, rows in lengths.items()}
    biases = {f"{hf}.{name}_proj.bias": rows for name, rows in lengths.items()}
    return (
        Row("self_attention.linear_qkv.weight", weights, order, when),
        *([Row("self_attention.linear_qkv.bias", biases, order, bias)] if bias else []),
        Row("self_attention.linear_proj.weight", {f"{hf}.o_proj.weight": "hidden heads*head_dim"}, when=when),
    )


ATTENTION = attention("self_attn", when="", bias="qkv_bias")

QK_NORMS = (
    Row("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "head_dim"}, when="qk_norm"),
    Row("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "head_dim"}, when="qk_norm"),
)

DENSE_MLP = (
    Row(
        "mlp.linear_fc1.weight", {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"}, when="!moe"
    ),
    Row("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "hidden ffn"}, when="!moe"),
)

EXPERT = "mlp.experts.local_experts.{expert}."
"""The beginning of the mcore names of an expert's tensors."""

ROUTER = (
    Row("mlp.router.weight", {"mlp.gate.weight": "experts hidden"}, when="moe"),
    # mcore keeps this tensor in a buffer that is always fp32 (TopKRouter, 0.16.1).
    Row("mlp.router.expert_bias", {"mlp.gate.e_score_correction_bias": "experts"}, when="moe expert_bias"),
)

EXPERTS = (
    *ROUTER,
    Row(
        EXPERT + "linear_fc1.weight",
        {
            "mlp.experts.{expert}.gate_proj.weight": "moe_ffn hidden",
            "mlp.experts.{expert}.up_proj.weight": "moe_ffn hidden",
        },
        when="moe",
    ),
    Row(EXPERT + "linear_fc2.weight", {"mlp.experts.{expert}.down_proj.weight": "hidden moe_ffn"}, when="moe"),
)

STACKED_EXPERTS = (
    Row(EXPERT + "linear_fc1.weight", {"mlp.experts.gate_up_proj": "experts 2*moe_ffn hidden"}, when="moe"),
    Row(EXPERT + "linear_fc2.weight", {"mlp.experts.down_proj": "experts hidden moe_ffn"}, when="moe"),
)


def shared_experts(name: str) -> tuple[Row, ...]:
    """Returns the rows of shared experts and of their gate. The HuggingFace names begin with `mlp.{name}`."""
    mcore, hf = "mlp.shared_experts.", f"mlp.{name}"
    gate_and_up = dict.fromkeys((f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), "shared_ffn hidden")
    return (
        Row(mcore + "linear_fc1.weight", gate_and_up, when="moe shared"),
        Row(mcore + "linear_fc2.weight", {f"{hf}.down_proj.weight": "hidden shared_ffn"}, when="moe shared"),
        Row(mcore + "gate_weight", {f"{hf}_gate.weight": "1 hidden"}, when="moe shared shared_gate"),
    )


# Published checkpoints repeat the embedding and the head in each layer of multi-token prediction. In mcore these layers
# use the embedding and the head of the model (MultiTokenPredictionBlock, 0.16.1).
MTP = (
    Row("enorm.weight", {"enorm.weight": "hidden"}),
    Row("hnorm.weight", {"hnorm.weight": "hidden"}),
    Row("eh_proj.weight", {"eh_proj.weight": "hidden 2*hidden"}),
    Row("final_layernorm.weight", {"shared_head.norm.weight": "hidden"}),
    Row(MCORE_EMBEDDING, {"embed_tokens.weight": "vocab hidden"}, is_copy=True),
    Row(MCORE_HEAD, {"shared_head.head.weight": "vocab hidden"}, when="!tied !value", is_copy=True),
    Row(MCORE_EMBEDDING, {"shared_head.head.weight": "vocab hidden"}, when="tied", is_copy=True),
)


def weight_and_bias(mcore: str, hf: str, weight: str, bias: str, **more: Any) -> tuple[Row, Row]:
    """Returns the rows of a module with a weight and a bias of these shapes. `more` are further fields of both rows."""
    return Row(f"{mcore}.weight", {f"{hf}.weight": weight}, **more), Row(f"{mcore}.bias", {f"{hf}.bias": bias}, **more)


def below(mcore: str, hf: str, rows: Iterable[Row], **more: Any) -> list[Row]:
    """Returns the rows with `mcore` and `hf` put before the names on each side, and with the fields in `more`."""
    return [
        replace(row, mcore=mcore + row.mcore, hf={hf + name: words for name, words in row.hf.items()}, **more)
        for row in rows
    ]


def language_model_rows(renamed: Callable[[str], str]) -> tuple[Row, ...]:
    """Returns the rows of `MODEL` for a vision-language model's language model, without the rows of value models.

    `renamed` turns HuggingFace's usual names into the model's names.
    """
    return tuple(
        replace(row, mcore=LANGUAGE_MODEL + row.mcore, hf={renamed(name): words for name, words in row.hf.items()})
        for row in MODEL
        if "value" not in row.when.split()
    )


def vision_of(config: HfConfig) -> Mapping[str, Any]:
    """Returns the config's section that describes the vision tower. Raises UnsupportedError if there is none."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise UnsupportedError(f"config.json: vision_config is {vision!r}, but must be an object")
    return vision


def sizes_of(config: HfConfig, ffn: bool = True) -> dict[str, int]:
    """Reads the sizes that every decoder has. Raises UnsupportedError if a size is missing or impossible.

    `ffn` is False if the architecture has no dense layer, and therefore no `intermediate_size`.
    """
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    groups = heads if config.get("num_key_value_heads") is None else integer(config, "num_key_value_heads")
    if heads % groups:
        raise UnsupportedError(f"config.json: {heads} num_attention_heads cannot share {groups} num_key_value_heads")
    return {
        "hidden": hidden,
        "vocab": integer(config, "vocab_size"),
        "heads": heads,
        "groups": groups,
        "head_dim": hidden // heads if config.get("head_dim") is None else integer(config, "head_dim"),
        **({"ffn": integer(config, "intermediate_size")} if ffn else {}),
    }


def facts_of(config: HfConfig) -> set[str]:
    """Reads the facts about the output head: "tied", "value", "score_bias".

    Raises UnsupportedError if `architectures` is not a list of names.
    """
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise UnsupportedError(f"config.json: architectures is {classes!r}, but must be a list of names")
    if any(name.endswith("ForTokenClassification") for name in classes):
        return {"value", "score_bias"}
    if any(name.endswith("ForSequenceClassification") for name in classes):
        return {"value"}
    return {"tied"} if config.get("tie_word_embeddings") else set()


def uniform_layers(config: HfConfig) -> tuple[frozenset[str], ...]:
    """Returns the facts of decoder layers that are all alike: an empty set for each layer."""
    return (frozenset[str](),) * integer(config, "num_hidden_layers")


def read_uniform(config: HfConfig, *facts: str) -> ModelFacts:
    """Reads the facts of a model whose layers are all alike and dense. `facts` are further facts of the whole model."""
    return ModelFacts(sizes_of(config), frozenset(facts_of(config).union(facts)), uniform_layers(config))


def moe_layers(is_moe: Sequence[bool]) -> tuple[frozenset[str], ...]:
    """Returns the facts of decoder layers: {"moe"} for each mixture of experts, an empty set for each other layer."""
    return tuple(frozenset({"moe"}) if moe else frozenset[str]() for moe in is_moe)


def read_mixture(config: HfConfig, *facts: str) -> ModelFacts:
    """Reads the facts of a model in which every layer is a mixture of experts of the size `intermediate_size`.

    `facts` are additional facts that are true of the whole model.
    """
    sizes = sizes_of(config)
    sizes |= {"experts": first_integer(config, "num_local_experts", "num_experts"), "moe_ffn": sizes["ffn"]}
    layers = moe_layers([True] * integer(config, "num_hidden_layers"))
    return ModelFacts(sizes, frozenset(facts_of(config).union(facts)), layers)


def integer(config: Mapping[str, Any], name: str) -> int:
    """Reads a required positive integer. Raises UnsupportedError if the field is missing or has another value."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedError(f"config.json: {name} is {value!r}, but must be a positive number")
    return value


def first_integer(config: Mapping[str, Any], *names: str) -> int:
    """Reads a required positive integer from the first of these fields that is present.

    Raises UnsupportedError if no field is present, or if the value is not a positive integer.
    """
    return integer(config, next((name for name in names if config.get(name) is not None), names[0]))
