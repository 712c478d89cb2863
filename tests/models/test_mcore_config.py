"""`config.json` and megatron's arguments: the same said both ways, in fields of transformers 4 and 5; refusals."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import NAMES, make_config

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.models import check_model, model_from_config, to_hf_config, to_mcore_config


def as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that 4.57 writes where 5 writes others."""
    old = dict(config)
    rope = old.pop("rope_parameters")
    old["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    kept = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    old["rope_scaling"] = None if rope["rope_type"] == "default" else kept
    if config["model_type"].startswith("qwen") and "num_local_experts" in old:
        old["num_experts"] = old.pop("num_local_experts")
    old["torch_dtype"] = old.pop("dtype", None) or old.get("torch_dtype", "float32")
    if config["model_type"] in ("qwen2", "qwen3") and not old["use_sliding_window"]:
        old.pop("layer_types", None)
    return old


def gpt_of(name: str, **overrides: Any) -> dict[str, Any]:
    return to_mcore_config(model_from_config({**make_config(name), **overrides})).gpt


def transformer_of(name: str, **overrides: Any) -> dict[str, Any]:
    return to_mcore_config(model_from_config({**make_config(name), **overrides})).transformer


@pytest.mark.parametrize("name", NAMES)
def test_both_versions_of_transformers_say_the_same(name: str) -> None:
    config = {**make_config(name), "dtype": "bfloat16"}
    known = to_mcore_config(model_from_config(config))
    assert to_mcore_config(model_from_config(as_transformers_4(config))) == known
    assert (known.transformer["params_dtype"], known.transformer["bf16"]) == (torch.bfloat16, True)
    assert known.gpt["vocab_size"] == 131
    of_theta = known.transformer if known.transformer.get("multi_latent_attention") else known.gpt
    assert of_theta["rotary_base"] == (500000.0 if name == "llama-3" else 5000.0)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_megatron(name: str) -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    known = to_mcore_config(model_from_config(make_config(name)))
    assert known.transformer.keys() <= {field.name for field in fields(MLATransformerConfig)}
    built = known.transformer_config(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    for key, value in known.transformer.items():
        assert getattr(built, key) == value, key


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_back_it_is_the_config_it_came_from(name: str, old: bool) -> None:
    config = {**make_config(name), "dtype": "bfloat16", "house_mark": [1]}
    base = as_transformers_4(config) if old else config
    model = model_from_config(base)
    known = to_mcore_config(model)
    back = to_hf_config(model.architecture, known.transformer_config(), known.gpt, base)
    assert {key: back[key] for key in base} == base
    # What the other version of transformers reads has come to it.
    assert model_from_config(back).known == model.known
    for version in (as_transformers_4, as_transformers_5):
        assert to_mcore_config(model_from_config(version(back))) == known


def as_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    new = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new.pop("partial_rotary_factor", None)
    return {**new, "dtype": config.get("dtype") or config["torch_dtype"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_can_be_made_without_a_source(name: str) -> None:
    model = model_from_config(make_config(name))
    known = to_mcore_config(model)
    fresh = to_hf_config(model.architecture, known.transformer_config(), known.gpt, {}, is_value=model.is_value)
    assert to_mcore_config(model_from_config(fresh)) == known
    assert model_from_config(fresh).known == model.known


def test_what_training_changed_is_patched_and_nothing_else() -> None:
    base = make_config("qwen3_moe", head_dim=16)
    model = model_from_config(base)
    known = to_mcore_config(model)
    changed = {
        **known.transformer,
        "num_layers": 2,
        "moe_layer_freq": [0, 1],
        "moe_router_topk": 3,
        "moe_router_pre_softmax": True,
        "hidden_dropout": 0.1,
        "params_dtype": torch.bfloat16,
    }
    back = to_hf_config(model.architecture, changed, {**known.gpt, "rotary_base": 7000, "vocab_size": 140}, base)
    wanted = {
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7000},
        "rope_theta": 7000,
        "vocab_size": 140,
        "dtype": "bfloat16",
    }
    spelled = {"rope_scaling": None, "num_experts": 4}
    assert {key: back[key] for key in back if key not in base or back[key] != base[key]} == {**wanted, **spelled}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"add_qkv_bias": True}, None),
        ("qwen2", {"add_qkv_bias": False}, "add_qkv_bias is False, which a config.json of qwen2 cannot express"),
        ("qwen3", {"qk_layernorm": False}, "qk_layernorm is False"),
        ("mixtral", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax is True"),
        ("deepseek_v3", {"moe_layer_freq": [1, 0, 1, 1]}, r"moe_layer_freq is \[1, 0, 1, 1\]"),
        ("deepseek_v3", {"moe_shared_expert_intermediate_size": 41}, "moe_shared_expert_intermediate_size is 41"),
        ("qwen2", {"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ("qwen2", {"is_hybrid_model": True, "num_layers": 8}, "is_hybrid_model is True"),
    ],
)
def test_what_the_architecture_cannot_say_is_refused(name: str, changes: dict[str, Any], message: str | None) -> None:
    model = model_from_config(make_config(name))
    known = to_mcore_config(model)
    transformer = {**known.transformer, **changes}
    if message is None:
        # Llama's rules do not speak of it; its table has no bias, so the mapping refuses the tensor by name.
        to_hf_config(model.architecture, transformer, known.gpt, model.config)
        return
    with pytest.raises(UnsupportedError, match=message):
        to_hf_config(model.architecture, transformer, known.gpt, model.config)


def test_the_class_follows_the_head() -> None:
    base = make_config("llama")
    model = model_from_config(base)
    known = to_mcore_config(model)
    critic = to_hf_config(model.architecture, known.transformer, known.gpt, base, is_value=True)
    assert critic["architectures"] == ["LlamaForTokenClassification"]
    assert len(critic["id2label"]) == 1
    assert model_from_config(critic).is_value
    assert (
        to_hf_config(model.architecture, known.transformer, known.gpt, base)["architectures"] == base["architectures"]
    )
    glm = model_from_config(make_config("glm4_moe"))
    known = to_mcore_config(glm)
    with pytest.raises(UnsupportedError, match=r"glm4_moe has no class \.\.\.ForTokenClassification"):
        to_hf_config(glm.architecture, known.transformer, known.gpt, glm.config, is_value=True)


# --- Traps


def test_softmax_over_all_or_over_the_chosen() -> None:
    assert transformer_of("mixtral")["moe_router_pre_softmax"] is False
    assert transformer_of("qwen3_moe", norm_topk_prob=True)["moe_router_pre_softmax"] is False
    assert transformer_of("qwen2_moe", norm_topk_prob=False)["moe_router_pre_softmax"] is True
    assert transformer_of("qwen2_moe")["moe_shared_expert_gate"] is True


def test_which_layers_are_sparse() -> None:
    assert transformer_of("qwen3_moe")["moe_layer_freq"] == 1
    assert transformer_of("qwen3_moe", decoder_sparse_step=2)["moe_layer_freq"] == [0, 1, 0, 1]
    assert transformer_of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3])["moe_layer_freq"] == [0, 1, 0, 0]
    assert transformer_of("deepseek_v3", first_k_dense_replace=2)["moe_layer_freq"] == [0, 0, 1, 1]


def test_groups_of_experts() -> None:
    assert transformer_of("deepseek_v3")["moe_router_num_groups"] == 2
    assert transformer_of("deepseek_v3")["moe_router_group_topk"] == 1
    assert transformer_of("deepseek_v3", n_group=1)["moe_router_num_groups"] is None
    assert transformer_of("deepseek_v3", topk_group=2)["moe_router_num_groups"] is None
    assert transformer_of("deepseek_v3")["mtp_num_layers"] is None
    assert transformer_of("deepseek_v3")["rotary_scaling_factor"] == 1.0


def test_windows() -> None:
    assert transformer_of("mistral-window")["window_size"] == (7, 0)
    assert transformer_of("mistral-window")["window_attn_skip_freq"] is None
    assert transformer_of("qwen2-window")["window_attn_skip_freq"] == [0, 0, 1, 1]
    # Qwen's configs name a window that is switched off.
    old = as_transformers_4(make_config("qwen2"))
    assert to_mcore_config(model_from_config({**old, "sliding_window": 4096})).transformer["window_size"] is None
    del old["use_sliding_window"]
    assert to_mcore_config(model_from_config({**old, "sliding_window": 4096})).transformer["window_size"] is None
    assert transformer_of("gpt_oss")["window_attn_skip_freq"] == [1, 0, 1, 0]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias is True"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("deepseek_v3", {"num_experts_per_tok": 3}, "num_experts_per_tok 3 with topk_group 1"),
    ("qwen3_moe", {"num_experts_per_tok": 1}, "norm_topk_prob is true with num_experts_per_tok 1"),
    ("qwen3_moe", {"num_experts": 8}, r"num_local_experts and num_experts differ: \[4, 8\]"),
    ("qwen2_moe", {"use_sliding_window": True, "layer_types": None, "sliding_window": 8}, "use_sliding_window is true"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor of llama3 .* is None"),
    ("deepseek_v3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3'"),
    ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}}, "attention_factor"),
    ("qwen2", {"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters differ"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias is False"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ("llama", {"dtype": "int8"}, "dtype is 'int8'"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_megatron_cannot_do_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        to_mcore_config(model_from_config({**make_config(name), **changes}))


@pytest.mark.parametrize("field", ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_other_frequencies_of_llama_3_are_refused(field: str) -> None:
    config = make_config("llama-3")
    assert to_mcore_config(model_from_config(config)).gpt["rope_scaling"] is True
    rope = {**config["rope_parameters"], field: 2.0}
    with pytest.raises(UnsupportedError, match=f"{field} of llama3 rotary embeddings is 2.0: megatron-core"):
        to_mcore_config(model_from_config({**config, "rope_parameters": rope}))


# --- A live model


def live(name: str, gpt: dict[str, Any] | None = None, **changes: Any) -> Any:
    """What `check_model` looks at of a GPTModel."""
    known = to_mcore_config(model_from_config(make_config(name)))
    arguments = {**known.gpt, **(gpt or {})}
    arguments["rotary_scaling"] = arguments.pop("rope_scaling", None)
    return SimpleNamespace(config=known.transformer_config(**changes), **arguments)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_agrees_passes(name: str) -> None:
    model = model_from_config(make_config(name))
    check_model(
        live(name, tensor_model_parallel_size=2, expert_tensor_parallel_size=1, hidden_dropout=0.1, bf16=True), model
    )


@pytest.mark.parametrize(
    ("name", "changes", "gpt", "message"),
    [
        (
            "qwen2",
            {"num_query_groups": 2},
            {},
            "num_query_groups is 2, but config.json of this qwen2 of 4 layers requires 4",
        ),
        ("qwen2", {"num_layers": 3}, {}, "num_layers is 3"),
        ("qwen3", {"kv_channels": 8}, {}, "kv_channels is 8"),
        ("qwen3_moe", {"num_moe_experts": 8}, {}, "num_moe_experts is 8"),
        ("mixtral", {"moe_router_pre_softmax": True}, {}, "moe_router_pre_softmax is True"),
        ("qwen2", {}, {"rotary_base": 10000}, "rotary_base is 10000"),
        ("llama-3", {}, {"rope_scaling": False}, "rope_scaling is False"),
        ("qwen2", {}, {"share_embeddings_and_output_weights": True}, "share_embeddings_and_output_weights is True"),
        ("deepseek_v3", {"rotary_scaling_factor": 40}, {}, "rotary_scaling_factor is 40"),
    ],
)
def test_a_model_that_differs_is_refused(name: str, changes: dict[str, Any], gpt: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=message):
        check_model(live(name, gpt, **changes), model_from_config(make_config(name)))


def test_the_windows_of_a_hybrid_model_are_those_of_its_attention() -> None:
    model = model_from_config(make_config("gpt_oss"))
    hybrid = live("gpt_oss", num_layers=8, window_attn_skip_freq=[1, 0, 0, 0, 1, 0, 0, 0])
    hybrid.hybrid_layer_pattern = "*E*|E*E*E/*E"
    check_model(hybrid, model)
    for wrong in ([1, 0, 1, 0], [1, 1, 0, 0, 0, 0, 0, 0], None):
        hybrid.config.window_attn_skip_freq = wrong
        with pytest.raises(CheckpointMismatchError, match="window_attn_skip_freq is"):
            check_model(hybrid, model)


def test_multi_token_prediction_may_be_left_out() -> None:
    check_model(live("deepseek_v3-mtp", mtp_num_layers=None), model_from_config(make_config("deepseek_v3-mtp")))
