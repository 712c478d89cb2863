"""Tests the names of one tensor under megatron's layer specs and versions."""

import pytest

from mcore_ckpt.sharding.synonyms import canonical, found_as, synonyms

LAYER = "decoder.layers.3."
MTP = "mtp.layers.0.transformer_layer."
# Pairs of the name under the local spec and the name under the transformer-engine spec.
PAIRS = [
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("input_layernorm.bias", "self_attention.linear_qkv.layer_norm_bias"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("pre_mlp_layernorm.bias", "mlp.linear_fc1.layer_norm_bias"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("self_attention.kv_layernorm.bias", "self_attention.linear_kv_up_proj.layer_norm_bias"),
    ("input_layernorm.weight", "self_attention.in_proj.layer_norm_weight"),
    ("input_layernorm.weight", "self_attention.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.layer_norm_weight"),
    ("mlp.experts.local_experts.17.linear_fc1.weight", "mlp.experts.linear_fc1.weight17"),
    ("mlp.experts.local_experts.0.linear_fc2.bias", "mlp.experts.linear_fc2.bias0"),
]


@pytest.mark.parametrize("layer", [LAYER, MTP, "encoder.layers.11."])
@pytest.mark.parametrize(("local", "engine"), PAIRS)
def test_both_directions(layer: str, local: str, engine: str) -> None:
    assert found_as(layer + local, {layer + engine}) == layer + engine
    assert found_as(layer + engine, {layer + local}) == layer + local


@pytest.mark.parametrize("name", sorted({LAYER + name for pair in PAIRS for name in pair}))
def test_a_synonyms_synonym_is_the_name_which_comes_first(name: str) -> None:
    first, *others = synonyms(name)
    assert first == name
    assert others
    assert len(set(others)) == len(others)
    for other in others:
        assert name in list(synonyms(other))[1:]


@pytest.mark.parametrize(
    "name",
    [
        # These names are equal under both specs.
        "embedding.word_embeddings.weight",
        LAYER + "self_attention.k_layernorm.weight",
        LAYER + "self_attention.linear_qkv.weight",
        LAYER + "self_attention.linear_qkv.bias",
        LAYER + "mlp.linear_fc1.weight",
        LAYER + "mlp.router.weight",
        LAYER + "mlp.shared_experts.linear_fc1.weight",
        LAYER + "mlp.shared_experts.linear_fc2.bias",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.final_layernorm.weight",
        # These tensors are opaque, or are not one tensor per expert.
        LAYER + "mlp.linear_fc1._extra_state",
        LAYER + "mlp.experts.linear_fc1._extra_state",
        LAYER + "mlp.experts.weight1",
        # These tensors belong to no layer.
        "input_layernorm.weight",
    ],
)
def test_other_names_have_none(name: str) -> None:
    assert list(synonyms(name)) == [name]


def test_a_tensor_that_is_there_under_its_own_name_is_taken() -> None:
    """Only MLA fuses q_layernorm with a projection. Other models have a q_layernorm, too, and keep its name."""
    plain = LAYER + "self_attention.q_layernorm.weight"
    assert found_as(plain, {plain, LAYER + "self_attention.linear_q_up_proj.layer_norm_weight"}) == plain
    without_mla = {LAYER + "self_attention.linear_qkv.weight", LAYER + "self_attention.linear_qkv.layer_norm_weight"}
    assert found_as(plain, without_mla) is None
    assert found_as(LAYER + "pre_mlp_layernorm.weight", {"decoder.layers.30.mlp.linear_fc1.layer_norm_weight"}) is None


@pytest.mark.parametrize(
    ("newer", "name"),
    [
        ("mtp.layers.1.mtp_model_layer.mlp.linear_fc1.weight", "mtp.layers.1.transformer_layer.mlp.linear_fc1.weight"),
        ("mtp.layers.0.mtp_model_layer.mlp._extra_state", "mtp.layers.0.transformer_layer.mlp._extra_state"),
        (LAYER + "mixer.conv1d_weight", LAYER + "mixer.conv1d.weight"),
        (LAYER + "mixer.conv1d_bias", LAYER + "mixer.conv1d.bias"),
        (
            "mtp.layers.0.mtp_model_layer.layers.1.mixer.conv1d_bias",
            "mtp.layers.0.mtp_model_layer.layers.1.mixer.conv1d.bias",
        ),
    ],
)
def test_a_checkpoint_has_the_name_that_no_version_changes(newer: str, name: str) -> None:
    assert canonical(newer) == canonical(name) == name


@pytest.mark.parametrize(
    "name",
    [
        # A HybridModel has a stack of layers here.
        "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.weight",
        "mtp.layers.0.mtp_model_layer.final_norm.weight",
        "decoder.layers.0.self_attention.conv1d.weight",
        "vision.conv1d_weight",
        "decoder.final_norm.weight",
    ],
)
def test_other_names_are_canonical(name: str) -> None:
    assert canonical(name) == name


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_the_last_norm_has_another_name_in_other_models(kind: str) -> None:
    gpt, hybrid = f"decoder.final_layernorm.{kind}", f"decoder.final_norm.{kind}"
    assert found_as(gpt, {hybrid}) == hybrid
    assert found_as(hybrid, {gpt}) == gpt
    assert found_as("mtp.layers.0." + gpt.removeprefix("decoder."), {"mtp.layers.0.final_norm.weight"}) is None


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("language_model." + LAYER + "mlp.linear_fc2.weight", LAYER + "mlp.linear_fc2.weight"),
        ("language_model." + LAYER + "input_layernorm.weight", LAYER + "self_attention.linear_qkv.layer_norm_weight"),
        ("language_model.decoder.final_layernorm.weight", "decoder.final_norm.weight"),
        ("language_model.decoder.final_layernorm.weight", "language_model.decoder.final_norm.weight"),
        ("language_model.embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("visual.blocks.3.norm1.weight", "vision_model.blocks.3.norm1.weight"),
        ("visual.merger.linear_fc1.bias", "vision_model.merger.linear_fc1.bias"),
        (
            "vision_model." + LAYER + "input_layernorm.bias",
            "vision_model." + LAYER + "self_attention.linear_qkv.layer_norm_bias",
        ),
    ],
)
def test_a_tensor_is_found_under_the_prefix_of_another_program(name: str, other: str) -> None:
    assert found_as(name, {other}) == other
    assert found_as(other, {name}) == name
    assert found_as(name, {name, other}) == name


@pytest.mark.parametrize(
    ("name", "other"),
    [
        # A tower's layers are not the decoder's.
        ("vision_model." + LAYER + "mlp.linear_fc2.weight", LAYER + "mlp.linear_fc2.weight"),
        (
            "vision_model." + LAYER + "mlp.linear_fc2.weight",
            "language_model." + LAYER + "mlp.linear_fc2.weight",
        ),
        ("vision_model." + LAYER + "mlp.linear_fc2.weight", "visual." + LAYER + "mlp.linear_fc2.weight"),
        ("vision_model.decoder.final_layernorm.weight", "vision_model.decoder.final_norm.weight"),
        ("encoder.layers.0.mlp.weight", "language_model.encoder.layers.0.mlp.weight"),
    ],
)
def test_another_tensor_is_not_found(name: str, other: str) -> None:
    assert found_as(name, {other}) is None
    assert found_as(other, {name}) is None
