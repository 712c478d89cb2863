"""Names of adapters, as HuggingFace's PEFT and as Megatron-Bridge gives them."""

import pytest

from mcore_ckpt.sharding.adapter_names import adapters_among, peft_matrix, without_peft
from mcore_ckpt.sharding.cuts import axes_of

LAYER = "decoder.layers.3.self_attention.linear_proj"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (f"{LAYER}.base_layer.weight", f"{LAYER}.weight"),
        (f"{LAYER}.base_layer._extra_state", f"{LAYER}._extra_state"),
        (f"{LAYER}.lora_A.default.weight", f"{LAYER}.adapter.linear_in.weight"),
        (f"{LAYER}.lora_B.my_own.weight", f"{LAYER}.adapter.linear_out.weight"),
        (f"{LAYER}.lora_B.default._extra_state", f"{LAYER}.adapter.linear_out._extra_state"),
        (f"{LAYER}.weight", f"{LAYER}.weight"),
        (f"{LAYER}.adapter.linear_in.weight", f"{LAYER}.adapter.linear_in.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_pefts_names_become_bridges(name: str, wanted: str) -> None:
    assert without_peft(name) == wanted == without_peft(wanted)


def test_the_two_matrices_make_an_adapter() -> None:
    pair = [f"{LAYER}.lora_{matrix}.default.weight" for matrix in "AB"]
    assert list(adapters_among(map(without_peft, pair))) == [(LAYER, "")]
    found = [peft_matrix(name) for name in pair]
    assert [(matrix.is_a, matrix.weight) for matrix in found if matrix] == [
        (is_a, f"{LAYER}.base_layer.weight") for is_a in (True, False)
    ]
    assert peft_matrix(f"{LAYER}.lora_A.default._extra_state") is peft_matrix(f"{LAYER}.weight") is None


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.experts.linear_fc1.lora_A.default.weight3",
        f"{LAYER}.lora_B.default.bias",
        f"{LAYER}.lora_magnitude_vector.default.weight",
        "output_layer.modules_to_save.default.weight",
        "output_layer.original_module.weight",
        "embedding.word_embeddings.lora_embedding_A.default",
    ],
)
def test_what_has_no_counterpart_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="only the matrices A and B of a layer's LoRA can be saved"):
        without_peft(name)


def test_either_program_may_cut_a_matrix() -> None:
    """Bridge cuts both matrices of an adapter; PEFT keeps whole the one that does not touch what the layer cuts."""
    assert axes_of(f"{LAYER}.adapter.linear_in.weight") == (1,)
    assert axes_of(f"{LAYER}.adapter.linear_out.weight") == (0, None)
    column = LAYER.replace("linear_proj", "linear_qkv")
    assert axes_of(f"{column}.adapter.linear_in.weight") == (0, None)
    assert axes_of(f"{column}.adapter.linear_out.weight") == (0,)
