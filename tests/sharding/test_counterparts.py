"""Tests which layers of two models hold the same parts."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.sharding.counterparts import Layers, decoder_layers, describe, find_counterparts, layers_of

TENSORS = {
    "attention": (
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj._extra_state",
    ),
    "linear attention": ("self_attention.in_proj.layer_norm_weight", "self_attention.in_proj.weight"),
    "latent attention": ("self_attention.linear_kv_down_proj.weight", "self_attention.kv_layernorm.weight"),
    "mlp": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.weight"),
    "experts": ("mlp.router.weight", "mlp.experts.local_experts.3.linear_fc1.weight"),
    "mamba": ("norm.weight", "mixer.in_proj.weight", "mixer.conv1d.bias"),
}
ATTENTION = ("attention", "linear attention", "latent attention")
MLP = ("mlp", "experts")


# How the two models name a layer of the decoder, and of the second depth of multi-token prediction.
GPT = ("decoder.layers.{}", "mtp.layers.1.transformer_layer")
HYBRID = ("decoder.layers.{}", "mtp.layers.1.mtp_model_layer.layers.{}")


def names_of(stack: str, layers: list[tuple[str, ...]]) -> dict[str, list[str]]:
    """The names of a model's tensors, by part in the order in which the model runs them."""
    names = {}
    for number, parts in enumerate(layers):
        for part in parts:
            key = f"{stack[:3]} {len(names)} {part}"
            names[key] = [f"{stack.format(number)}.{tensor}" for tensor in TENSORS[part]]
    return names


def decoder(layers: list[tuple[str, ...]]) -> Layers:
    return {f"decoder.layers.{number}": parts for number, parts in enumerate(layers)}


gpt_layers = st.lists(st.tuples(st.sampled_from(ATTENTION), st.sampled_from(MLP)), max_size=12)


@given(gpt_layers, st.tuples(st.sampled_from(ATTENTION), st.sampled_from(MLP)))
def test_each_part_finds_itself_however_the_parts_are_put_into_layers(
    layers: list[tuple[str, str]], mtp: tuple[str, str]
) -> None:
    gpt = names_of(GPT[0], list(layers)) | names_of(GPT[1], [mtp])
    hybrid = names_of(HYBRID[0], [(part,) for layer in layers for part in layer])
    hybrid |= names_of(HYBRID[1], [(part,) for part in mtp])
    for wanted, stored in ((gpt, hybrid), (hybrid, gpt), (gpt, gpt)):
        found = find_counterparts(
            *(layers_of(name for names in each.values() for name in names) for each in (wanted, stored))
        )
        for part, names in wanted.items():
            assert [found.stored_name(name) for name in names] == stored[part]


def test_models_of_the_same_layers_keep_their_names() -> None:
    layers = decoder([("attention", "mlp"), ("mamba",)])
    assert find_counterparts(layers, layers).stored == {}
    assert find_counterparts(layers, layers).stored_name("decoder.layers.7.mlp.weight") == "decoder.layers.7.mlp.weight"


def test_a_depth_that_only_one_model_has_is_left_out() -> None:
    one = decoder([("attention", "mlp")])
    two = one | {"mtp.layers.0.transformer_layer": ("attention", "mlp")}
    assert find_counterparts(one, two).stored == find_counterparts(two, one).stored == {}
    assert decoder_layers(two) == one


def test_tensors_outside_the_layers_keep_their_names() -> None:
    found = find_counterparts(decoder([("attention",), ("mlp",)]), decoder([("attention", "mlp")]))
    for name in ("decoder.final_norm.weight", "embedding.word_embeddings.weight", "mtp.layers.0.enorm.weight"):
        assert found.stored_name(name) == name


@pytest.mark.parametrize(
    ("wanted", "stored", "said"),
    [
        (
            [("attention",), ("mlp",)],
            [("attention", "mlp")] * 2,
            r"layers attention, mlp, found 2 x \(attention \+ mlp\)",
        ),
        ([("attention",), ("attention",), ("mlp",), ("mlp",)], [("attention", "mlp")] * 2, "wanted the layers 2 x"),
        ([("mamba",), ("attention",), ("mlp",)], [("attention", "mlp")], "wanted the layers mamba, attention, mlp"),
        ([("attention",), ("experts",)], [("attention", "mlp")], "attention, experts, found attention"),
        ([("latent attention",), ("mlp",)], [("attention", "mlp")], "latent attention, mlp, found attention"),
    ],
)
def test_other_parts_another_number_or_another_order_are_refused(
    wanted: list[tuple[str, ...]], stored: list[tuple[str, ...]], said: str
) -> None:
    found = find_counterparts(decoder(wanted), decoder(stored))
    assert found.stored == {}
    assert re.search(said, found.layer_mismatch or "")


def test_the_depth_of_other_parts_is_named() -> None:
    one, two = (
        decoder([("attention", "mlp")]) | layers_of(name for names in names_of(stack, parts).values() for name in names)
        for stack, parts in ((GPT[1], [("attention", "mlp")]), (HYBRID[1], [("mamba",), ("mlp",)]))
    )
    found = find_counterparts(two, one)
    assert found.layer_mismatch == "wanted the layers mamba, mlp in mtp.layers.1, found attention + mlp"


def test_layers_are_described_shortly() -> None:
    assert describe({}) == "none"
    assert describe(decoder([("attention",), ("mlp",)] * 61 + [("mamba",)])) == "61 x (attention, mlp), mamba"
    assert describe(decoder([("mamba",), ("mlp",), ("mlp",), ("mlp",)])) == "mamba, 3 x (mlp)"


@given(st.lists(st.sampled_from([("attention",), ("mlp",), ("mamba",), ("attention", "mlp")]), max_size=20))
def test_a_description_has_every_layer(layers: list[tuple[str, ...]]) -> None:
    text = describe(decoder(layers))
    while match := re.search(r"(\d+) x \(([^()]*)\)", text):
        text = text[: match.start()] + ", ".join([match[2]] * int(match[1])) + text[match.end() :]
    assert text == (", ".join(" + ".join(parts) for parts in layers) or "none")


def test_a_repeated_layer_is_counted() -> None:
    assert describe(decoder([("mamba",), ("mamba",), ("attention",)])) == "2 x (mamba), attention"
