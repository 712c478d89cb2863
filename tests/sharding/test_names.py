"""Tests the translation of local names to global names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.sharding.names import ChunkNames, ExpertNumbers, LayerNumber, is_expert, natural_order, natural_orders

TAILS = ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "mlp.router.expert_bias", "mlp._extra_state")
SEQUENTIAL = ("local_experts.{}.linear_fc1.weight", "local_experts.{}.linear_fc2.bias")
GROUPED = ("linear_fc1.weight{}", "linear_fc2.weight{}", "linear_fc1.bias{}")


@st.composite
def chunks(draw: st.DrawFn) -> tuple[ChunkNames, dict[str, str]]:
    """A chunk that a stage of any split could hold, and the global name of each of its local names."""
    layers: list[LayerNumber] = []
    experts: list[ExpertNumbers] = []
    names = {"embedding.word_embeddings.weight": "embedding.word_embeddings.weight"}
    for list_name in ("decoder.layers", "mtp.layers"):
        first, count = draw(st.integers(0, 120)), draw(st.integers(0, 3))
        for local in range(count):
            layers.append(LayerNumber(list_name, local, first + local))
            canonical = "" if list_name == "decoder.layers" else "transformer_layer."
            inside = draw(st.sampled_from([canonical, canonical.replace("transformer", "mtp_model")]))
            before, after = f"{list_name}.{local}.{inside}", f"{list_name}.{first + local}.{canonical}"
            names |= {before + tail: after + tail for tail in TAILS}
            number, first_expert = draw(st.integers(1, 3)), draw(st.integers(0, 20))
            experts.append(ExpertNumbers(f"{before}mlp.experts", first_expert, number))
            for e in range(number):
                for pattern in draw(st.sampled_from([SEQUENTIAL, GROUPED])):
                    tail = "mlp.experts." + pattern
                    names[before + tail.format(e)] = after + tail.format(first_expert + e)
    return ChunkNames(tuple(layers), tuple(experts)), names


@given(chunks())
def test_every_name_becomes_global(chunk: tuple[ChunkNames, dict[str, str]]) -> None:
    names, expected = chunk
    assert {local: names.to_global(local) for local in expected} == expected


EP1 = ChunkNames(
    (LayerNumber("decoder.layers", 0, 6),), (ExpertNumbers("decoder.layers.0.mlp.experts", first=4, count=2),)
)


@pytest.mark.parametrize(
    "name",
    ["decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"],
)
def test_a_local_number_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(KeyError):
        EP1.to_global(name)


def test_numbers_that_are_not_layers_or_experts_stay() -> None:
    for name in ("decoder.final_layernorm.weight", "vision.layers.0.weight", "decoder.layers.0"):
        assert EP1.to_global(name) == name
    shared = "decoder.layers.0.mlp.shared_experts.linear_fc1.weight"
    assert EP1.to_global(shared) == "decoder.layers.6.mlp.shared_experts.linear_fc1.weight"


def test_experts_are_the_routed_ones() -> None:
    assert is_expert("decoder.layers.0.mlp.experts.linear_fc1.weight0")
    assert is_expert("mtp.layers.0.transformer_layer.mlp.experts.local_experts.0.linear_fc1.weight")
    assert not is_expert("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")
    assert not is_expert("decoder.layers.0.mlp.router.expert_bias")


@given(st.permutations(range(0, 120, 7)))
def test_natural_order_counts(numbers: list[int]) -> None:
    ordered = sorted((f"decoder.layers.{n}.mlp.weight" for n in numbers), key=natural_order)
    assert ordered == [f"decoder.layers.{n}.mlp.weight" for n in sorted(numbers)]


@given(st.text("ab.019", max_size=8), st.text("ab.019", max_size=8))
def test_natural_order_puts_any_two_names_in_one_order(a: str, b: str) -> None:
    first, second = natural_order(a), natural_order(b)
    assert (first < second) + (second < first) + (first == second) == 1
    assert first != second or a == b or "0" in a + b, "only leading zeros are alike"


@pytest.mark.parametrize("start", ["", "a.", "layers.7.w", "1.x"])
@pytest.mark.parametrize("end", ["", ".w", "_b.8"])
def test_the_keys_of_many_names_are_those_of_each(start: str, end: str) -> None:
    numbers = [0, 7, 10, 12345]
    assert natural_orders(start, numbers, end) == [natural_order(f"{start}{number}{end}") for number in numbers]
