"""What the tables name is what there is: in transformers' files and, through parity.py, in megatron's models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader, read_contents, spelled_by_table
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
from mcore_ckpt.models.config_fields import Same
from mcore_ckpt.models.config_rules import DENSE
from mcore_ckpt.models.mapping import check_names, hf_tensors, hf_tensors_in
from mcore_ckpt.models.reconcile import with_mtp_of
from mcore_ckpt.models.registry import _architectures
from mcore_ckpt.models.rope_rules import ROPE
from tests.support.global_tensors import to_hf, to_mcore
from tests.support.tiny_models import EXPERTS, NAMES, make_config, make_hf_folder, make_hf_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {name: make_hf_folder(root / name, name, dtype="bfloat16") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_exact_and_covers_every_element_once(folders: dict[str, Path], name: str) -> None:
    stored = load_file(folders[name] / "model.safetensors")
    model = with_mtp_of(model_from_config(read_config(folders[name])), stored)
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(model)}
    assert shapes == {key: tuple(tensor.shape) for key, tensor in stored.items()}
    back = to_hf(model, to_mcore(model, stored))
    for key, tensor in stored.items():
        assert back[key].dtype == tensor.dtype or not tensor.any()
        assert torch.equal(back[key], tensor), key


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "qwen3_next"),
        *("qwen3_5_moe_text", "minimax_m2", "glm_moe_dsa-shared"),
    ],
)
def test_experts_as_transformers_5_stacks_them_are_the_same(folders: dict[str, Path], name: str) -> None:
    model = model_from_config(read_config(folders[name]))
    stored = load_file(folders[name] / "model.safetensors")
    stacked = make_hf_model(name, dtype="bfloat16").state_dict()
    assert stacked.keys() != stored.keys()
    wanted, found = to_mcore(model, stored), to_mcore(model, stacked)
    assert wanted.keys() == found.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


def test_experts_of_multi_token_prediction_can_be_stacked_too(folders: dict[str, Path]) -> None:
    """As in Qwen3.6, whose config is that of Qwen3.5."""
    folder = folders["qwen3_5_moe_text-mtp"]
    model, stored = model_from_config(read_config(folder)), load_file(folder / "model.safetensors")
    mtp = "mtp.layers.0.mlp.experts."
    stacked = {key: tensor for key, tensor in stored.items() if not key.startswith(mtp)}
    gate, up, down = (
        torch.stack([stored[f"{mtp}{expert}.{kind}_proj.weight"] for expert in range(EXPERTS)])
        for kind in ("gate", "up", "down")
    )
    stacked |= {f"{mtp}gate_up_proj": torch.cat([gate, up], dim=1), f"{mtp}down_proj": down}
    wanted, found = to_mcore(model, stored), to_mcore(model, stacked)
    assert wanted.keys() == found.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_language_model_taken_out_of_a_larger_one_has_its_names(name: str, tmp_path: Path) -> None:
    """transformers saves it under the names that it has in the vision-language model, with its own config."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text = make_config(f"{name}_text", tie_word_embeddings=True)
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
    config = AutoConfig.for_model(name, text_config=text, vision_config=vision, tie_word_embeddings=True)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "whole")
    taken = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    taken.save_pretrained(tmp_path / "taken")
    assert read_config(tmp_path / "taken")["model_type"] == f"{name}_text"
    stored = load_file(tmp_path / "taken" / "model.safetensors")
    assert all(key.startswith("model.language_model.") for key in stored)
    reader = HuggingFaceReader(read_contents(tmp_path / "taken"))
    # Under the names that they have in memory the tensors are the same, stacked experts included.
    inside = {key: tensor for key, tensor in taken.state_dict().items() if key != "lm_head.weight"}
    wanted = to_mcore(reader.model, inside)
    found = to_mcore(reader.model, spelled_by_table(reader.contents.config, stored))
    assert wanted.keys() == found.keys() == set(reader.names)
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


NO_MODULES = r"(its TransformerLayer has no|its GPTModel has no|its experimental_attention_variant can only)"


def test_every_architecture_has_a_tiny_model_or_is_refused(folders: dict[str, Path]) -> None:
    tested = {read_config(folder)["model_type"] for folder in folders.values()}
    for model_type, architecture in known_architectures().items():
        if model_type not in {*tested, "kimi_k2"}:
            with pytest.raises(UnsupportedError, match=rf"{model_type} cannot be converted .* 0\.19\.2.*{NO_MODULES}"):
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
    with pytest.raises(UnsupportedError, match=r"quantization_config is 'awq', but .* dequantize the model first"):
        model_from_config({**config, "quantization_config": {"quant_method": "awq"}})
    assert model_from_config({**config, "quantization_config": {"quant_method": "mxfp4"}}).config == config
    with pytest.raises(UnsupportedError, match="model_type 'bert' is not known: there are tables for deepseek_v2, "):
        model_from_config({**config, "model_type": "bert"})


def test_the_head_and_the_field_that_ties_it_can_have_other_names(folders: dict[str, Path]) -> None:
    known, config = known_architectures()["llama"], read_config(folders["llama-tied"])
    rows = [replace(row, hf={name.replace("lm_head", "top"): words for name, words in row.hf.items()}) for row in MODEL]
    rules = [
        replace(rule, hf="tied_top") if isinstance(rule, Same) and "share_embeddings" in rule.mcore else rule
        for rule in known.rules
    ]
    own = replace(known, table=replace(known.table, model=tuple(rows)), rules=tuple(rules))
    assert (own.table.hf_head, own.tied_field) == ("top.weight", "tied_top")
    model = replace(model_from_config(config), architecture=own)
    shapes = shapes_of(model)
    assert "top.weight" not in shapes
    assert reconcile(replace(model, config={**config, "tied_top": True}), shapes).is_tied
    with pytest.raises(CheckpointMismatchError, match=r"tied_top.*top\.weight"):
        reconcile(replace(model, config={**config, "tied_top": False}), shapes)


# --- A model that is not known


def closest(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]] | None) -> str:
    with pytest.raises(UnsupportedError, match=r"model_type 'new' is not known.*CONTRIBUTING") as error:
        model_from_config({**config, "model_type": "new"}, tensors=shapes)
    return str(error.value).partition("; closest")[2].partition(": write a table")[0]


@pytest.mark.parametrize("name", [name for name in NAMES if name.partition("-")[0] == name])
def test_a_known_model_under_a_new_name_is_closest_to_itself(folders: dict[str, Path], name: str) -> None:
    model = model_from_config(read_config(folders[name]))
    found = closest(read_config(folders[name]), shapes_of(model))
    number = len(hf_tensors(model))
    # They have the same tensors, and other fields.
    same = {"mistral": "llama", "seed_oss": "qwen2", "glm_moe_dsa": "deepseek_v32"}.get(name, name)
    assert found == f": {same}, which places {number} of {number} tensors"


def test_the_tensors_without_a_place_are_named(folders: dict[str, Path]) -> None:
    config = read_config(folders["qwen3_moe"])
    shapes = dict(shapes_of(model_from_config(config)))
    for layer in range(4):
        shapes[f"model.layers.{layer}.self_attn.sinks"] = (8,)
        shapes[f"model.layers.{layer}.mlp.gate.weight"] = (4, 65)
        del shapes[f"model.layers.{layer}.self_attn.q_norm.weight"]
    assert closest(config, shapes) == (
        f": qwen3_moe, which places {len(shapes) - 8} of {len(shapes)} tensors; it has no place for "
        "model.layers.*.mlp.gate.weight of shape [4, 65] (the table has [4, 64]), model.layers.*.self_attn.sinks; "
        "the model lacks model.layers.*.self_attn.q_norm.weight"
    )


def test_without_tensors_the_fields_of_the_config_decide(folders: dict[str, Path]) -> None:
    for name in ("nemotron_h", "gpt_oss", "qwen3_next"):
        assert closest(read_config(folders[name]), None).startswith(f" by its fields: {name}, which reads ")
    less = {key: value for key, value in read_config(folders["nemotron_h"]).items() if key != "ssm_state_size"}
    assert closest(less, None).endswith("; it also needs ssm_state_size, but the config lacks this")
    # Of names that no table knows, the fields decide, too.
    config = read_config(folders["gpt_oss"])
    with pytest.raises(
        UnsupportedError, match=r"no known table has a place for any of the model's tensors, closest by .*: gpt_oss, "
    ):
        model_from_config({**config, "model_type": "new"}, tensors={"blocks.0.wq.weight": (64, 64)})


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("qwen2", {"num_key_value_heads": 3}, "8 num_attention_heads cannot share 3 num_key_value_heads"),
        ("qwen2", {"num_key_value_heads": "four"}, "num_key_value_heads is 'four'"),
        ("qwen2", {"head_dim": 0}, "head_dim is 0"),
        ("qwen2", {"architectures": "Qwen2ForCausalLM"}, "architectures is 'Qwen2ForCausalLM', but must be a list"),
        ("qwen2", {"architectures": [1]}, "architectures is"),
        ("qwen3_moe", {"decoder_sparse_step": "two"}, "does not describe a qwen3_moe"),
        ("qwen3_moe", {"mlp_only_layers": 5}, "does not describe a qwen3_moe"),
        ("deepseek_v3", {"first_k_dense_replace": "one"}, "does not describe a deepseek_v3"),
        ("qwen2", {"rope_parameters": "yarn"}, "rope_parameters .* is 'yarn'"),
        (
            "qwen2",
            {"layer_types": 3, "use_sliding_window": True, "sliding_window": 8},
            r"does not describe .* \(rule SlidingWindow\)",
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
        (plain, shapes(tied), {}, "tie_word_embeddings is False, but the tensors have no separate head"),
        (tied, shapes(plain), {}, "tie_word_embeddings is True, but the tensors have a head"),
        (tied, shapes(tied), {"tie_word_embedding": False}, "tie_word_embedding is False"),
        (plain, shapes(plain), {"tie_word_embedding": True}, "tie_word_embedding is True"),
        (plain, shapes(value), {}, "architectures is .*LlamaForCausalLM.*mcore-ckpt merge .or test. --is-value-model"),
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
