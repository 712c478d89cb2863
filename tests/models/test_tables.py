"""What the tables name is what there is: in transformers' files and, through parity.py, in megatron's models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from global_tensors import to_hf, to_mcore
from safetensors.torch import load_file
from tiny_models import NAMES, make_hf_folder, make_hf_model

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.models import (
    Architecture,
    HfModel,
    ModelFacts,
    Row,
    Table,
    known_architectures,
    model_from_config,
    read_config,
    reconcile,
    register_architecture,
    to_mcore_config,
)
from mcore_ckpt.models.architectures.common import ATTENTION, MODEL, NORMS, facts_of, sizes_of, uniform_layers
from mcore_ckpt.models.config_rules import DENSE
from mcore_ckpt.models.mapping import check_names, hf_tensors, hf_tensors_in
from mcore_ckpt.models.registry import _architectures
from mcore_ckpt.models.rope_rules import ROPE


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {name: make_hf_folder(root / name, name, dtype="bfloat16") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_exact_and_covers_every_element_once(folders: dict[str, Path], name: str) -> None:
    model, stored = model_from_config(read_config(folders[name])), load_file(folders[name] / "model.safetensors")
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(model)}
    assert shapes == {key: tuple(tensor.shape) for key, tensor in stored.items()}
    back = to_hf(model, to_mcore(model, stored))
    for key, tensor in stored.items():
        assert back[key].dtype == tensor.dtype or not tensor.any()
        assert torch.equal(back[key], tensor), key


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "qwen3_next"])
def test_experts_as_transformers_5_stacks_them_are_the_same(folders: dict[str, Path], name: str) -> None:
    model = model_from_config(read_config(folders[name]))
    stored = load_file(folders[name] / "model.safetensors")
    stacked = make_hf_model(name, dtype="bfloat16").state_dict()
    assert stacked.keys() != stored.keys()
    wanted, found = to_mcore(model, stored), to_mcore(model, stacked)
    assert wanted.keys() == found.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


def test_every_architecture_has_a_tiny_model_or_is_refused(folders: dict[str, Path]) -> None:
    tested = {read_config(folder)["model_type"] for folder in folders.values()}
    for model_type, architecture in known_architectures().items():
        if model_type not in {*tested, "kimi_k2"}:
            with pytest.raises(UnsupportedError, match=r"megatron-core 0\.16\.1's TransformerLayer has no norms"):
                architecture.read({"model_type": model_type})
    assert known_architectures()["kimi_k2"].table == known_architectures()["deepseek_v3"].table


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3-mtp", "gpt_oss"])
def test_a_missing_and_an_unknown_tensor_are_named(folders: dict[str, Path], name: str) -> None:
    model = model_from_config(read_config(folders[name]))
    names = [tensor.name for tensor in hf_tensors(model)]
    lost = "model.layers.1.self_attn.o_proj.weight"
    less = [each for each in names if each != lost]
    with pytest.raises(CheckpointMismatchError, match=f"here: .* lacks {lost}"):
        check_names(model, hf_tensors_in(model, less), less, "here")
    more = [*names, "model.layers.0.self_attn.rotary_emb.inv_freq", "model.odd.weight"]
    with pytest.raises(CheckpointMismatchError, match=r"unknown tensors: model\.odd\.weight$"):
        check_names(model, hf_tensors_in(model, more), more, "here")
    listed = model_from_config(model.config, ignored=(r"model\.odd\..*",))
    check_names(listed, hf_tensors_in(listed, more), more, "here")


def test_unknown_model_types_and_quantized_weights_are_refused(folders: dict[str, Path]) -> None:
    config = read_config(folders["gpt_oss"])
    with pytest.raises(UnsupportedError, match=r"quantization_config is 'mxfp4': .* dequantize them first"):
        model_from_config({**config, "quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(UnsupportedError, match="model_type 'bert' is not known: there are tables for deepseek_v3, "):
        model_from_config({**config, "model_type": "bert"})


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("qwen2", {"num_key_value_heads": 3}, "8 num_attention_heads cannot share 3 num_key_value_heads"),
        ("qwen2", {"num_key_value_heads": "four"}, "num_key_value_heads is 'four'"),
        ("qwen2", {"head_dim": 0}, "head_dim is 0"),
        ("qwen2", {"architectures": "Qwen2ForCausalLM"}, "architectures is 'Qwen2ForCausalLM', not a list"),
        ("qwen2", {"architectures": [1]}, "architectures is"),
        ("qwen3_moe", {"decoder_sparse_step": "two"}, "cannot be that of a qwen3_moe"),
        ("qwen3_moe", {"mlp_only_layers": 5}, "cannot be that of a qwen3_moe"),
        ("deepseek_v3", {"first_k_dense_replace": "one"}, "cannot be that of a deepseek_v3"),
        ("qwen2", {"rope_parameters": "yarn"}, "rope_parameters .* is 'yarn'"),
        (
            "qwen2",
            {"layer_types": 3, "use_sliding_window": True, "sliding_window": 8},
            r"cannot be .* \(rule SlidingWindow\)",
        ),
    ],
)
def test_fields_that_hold_something_else_are_refused(
    folders: dict[str, Path], name: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"config.json: .*{words}"):
        to_mcore_config(model_from_config({**read_config(folders[name]), **fields}))


# --- What is settled from config and data


def shapes_of(model: HfModel) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in hf_tensors(model)}


def mcore_shapes(model: HfModel) -> dict[str, tuple[int, ...]]:
    return {slab.mcore: slab.region.global_shape for tensor in hf_tensors(model) for slab in tensor.slabs if slab.mcore}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_folder_says_of_itself_is_settled_as_it_says(folders: dict[str, Path], name: str) -> None:
    model = model_from_config(read_config(folders[name]))
    for tensors in (shapes_of(model), mcore_shapes(model)):
        settled = reconcile(model, tensors)
        assert (settled.is_tied, settled.is_value) == (name.endswith("-tied"), name.endswith("-value"))
        assert settled.known == model.known


def test_multi_token_prediction_that_is_not_there_is_left_out(folders: dict[str, Path]) -> None:
    model = model_from_config({**read_config(folders["deepseek_v3"]), "num_nextn_predict_layers": 1})
    without = reconcile(model, {name: s for name, s in shapes_of(model).items() if "layers.4." not in name})
    assert without.mtp_layers == ()
    assert to_mcore_config(without).transformer["mtp_num_layers"] is None
    assert to_mcore_config(model).transformer["mtp_num_layers"] == 1


@pytest.mark.parametrize("shapes", [shapes_of, mcore_shapes])
def test_contradictions_are_errors(folders: dict[str, Path], shapes: Any) -> None:
    plain, tied, value = (
        model_from_config(read_config(folders[name])) for name in ("llama", "llama-tied", "llama-value")
    )
    refused: list[tuple[HfModel, Mapping[str, tuple[int, ...]], dict[str, bool], str]] = [
        (plain, shapes(tied), {}, "tie_word_embeddings is False, but the tensors have no head"),
        (tied, shapes(plain), {}, "tie_word_embeddings is True, but the tensors have a head"),
        (tied, shapes(tied), {"tie_word_embedding": False}, "tie_word_embedding is False"),
        (plain, shapes(plain), {"tie_word_embedding": True}, "tie_word_embedding is True"),
        (plain, shapes(value), {}, "architectures is .*LlamaForCausalLM.*pass is_value_model=True"),
        (value, shapes(plain), {}, "architectures is .*LlamaForTokenClassification"),
        (plain, shapes(plain), {"is_value_model": True}, "is_value_model is True, but"),
        (value, shapes(value), {"is_value_model": False}, "is_value_model is False, but"),
    ]
    for model, tensors, words, message in refused:
        with pytest.raises(CheckpointMismatchError, match=message):
            reconcile(model, tensors, **words)
    # The user's word and the data outweigh the language model's config that is kept beside a critic.
    settled = reconcile(plain, shapes(value), is_value_model=True)
    assert settled.is_value
    assert "score.bias" in shapes_of(settled)


def test_a_copy_of_the_embedding_can_be_listed(folders: dict[str, Path]) -> None:
    plain = model_from_config(read_config(folders["llama"]))
    tied = model_from_config(read_config(folders["llama-tied"]), ignored=(r"lm_head\.weight",))
    assert reconcile(tied, shapes_of(plain)).is_tied


# --- An architecture of one's own


def test_an_architecture_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    known_architectures()
    monkeypatch.setattr("mcore_ckpt.models.registry._architectures", dict(_architectures))
    mlp = (
        Row("mlp.linear_fc1.weight", {"ff.w1.weight": "ffn hidden", "ff.w3.weight": "ffn hidden"}),
        Row("mlp.linear_fc2.weight", {"ff.w2.weight": "hidden ffn"}),
    )
    register_architecture(
        Architecture(
            "my_model",
            ("MyModelForCausalLM",),
            Table(MODEL, (*NORMS, *ATTENTION, *mlp)),
            lambda config: ModelFacts(sizes_of(config), frozenset(facts_of(config)), uniform_layers(config)),
            (*DENSE, ROPE),
        )
    )
    config = {
        "model_type": "my_model",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 5,
        "intermediate_size": 6,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16,
    }
    model = model_from_config(config)
    tensors = {tensor.name: torch.randn(tensor.shape) for tensor in hf_tensors(model)}
    assert "model.layers.0.ff.w3.weight" in tensors
    there = to_mcore(model, tensors)
    fused = torch.cat([tensors["model.layers.0.ff.w1.weight"], tensors["model.layers.0.ff.w3.weight"]])
    assert torch.equal(there["decoder.layers.0.mlp.linear_fc1.weight"], fused)
    back = to_hf(model, there)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert to_mcore_config(model).transformer["num_query_groups"] == 2
