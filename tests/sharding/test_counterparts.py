"""Tests which layers of two models hold the same parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.sharding.counterparts import describe, find_counterparts, layers_of

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


def names_of(layers: list[tuple[str, ...]]) -> dict[str, list[str]]:
    """The names of a model's tensors, by part in the order in which the model runs them."""
    names = {}
    for number, parts in enumerate(layers):
        for part in parts:
            names[f"{len(names)} {part}"] = [f"decoder.layers.{number}.{tensor}" for tensor in TENSORS[part]]
    return names


gpt_layers = st.lists(st.tuples(st.sampled_from(ATTENTION), st.sampled_from(MLP)), max_size=12)


@given(gpt_layers, st.randoms())
def test_each_part_finds_itself_however_the_parts_are_put_into_layers(
    layers: list[tuple[str, str]], rng: object
) -> None:
    gpt = names_of(layers)
    hybrid = names_of([(part,) for layer in layers for part in layer])
    for wanted, stored in ((gpt, hybrid), (hybrid, gpt), (gpt, gpt)):
        found = find_counterparts(
            *(layers_of(name for names in each.values() for name in names) for each in (wanted, stored))
        )
        for part, names in wanted.items():
            assert [found.stored_name(name) for name in names] == stored[part]


def test_models_of_the_same_layers_keep_their_names() -> None:
    layers = {0: ("attention", "mlp"), 1: ("mamba",)}
    assert find_counterparts(layers, layers).stored == {}
    assert find_counterparts(layers, layers).stored_name("decoder.layers.7.mlp.weight") == "decoder.layers.7.mlp.weight"


def test_tensors_outside_the_layers_keep_their_names() -> None:
    found = find_counterparts({0: ("attention",), 1: ("mlp",)}, {0: ("attention", "mlp")})
    for name in ("decoder.final_norm.weight", "embedding.word_embeddings.weight", "mtp.layers.0.mlp.weight"):
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
    with pytest.raises(ValueError, match=said):
        find_counterparts(dict(enumerate(wanted)), dict(enumerate(stored)))


def test_layers_are_described_shortly() -> None:
    assert describe({}) == "none"
    assert describe({4: ("mamba",), 5: ("mamba",), 6: ("attention",)}) == "2 x (mamba), attention"
