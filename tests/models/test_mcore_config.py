"""`config.json` and megatron's arguments: the same said both ways, in fields of transformers 4 and 5; refusals."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.models import check_model, model_from_config, to_hf_config, to_mcore_config
from mcore_ckpt.models.config_fields import MTP_FIELDS
from mcore_ckpt.models.mcore_config import config_of_weights
from tests.support.tiny_models import NAMES, flat, make_config


def as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that 4.57 writes where 5 writes others."""
    if "text_config" in config:
        dtype = {"torch_dtype": config["dtype"]} if config.get("dtype") else {}
        whole = {name: value for name, value in config.items() if name != "dtype"}
        return {**whole, **dtype, "text_config": as_transformers_4(config["text_config"])}
    old = dict(config)
    if rope := old.pop("rope_parameters", None):
        old["rope_theta"] = rope["rope_theta"]
        if "partial_rotary_factor" in rope:
            old["partial_rotary_factor"] = rope["partial_rotary_factor"]
        kept = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
        old["rope_scaling"] = None if rope["rope_type"] == "default" and "mrope_section" not in rope else kept
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
    if name.startswith("nemotron_h"):
        assert known.gpt["position_embedding_type"] == "none"
    else:
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
    assert {key: flat(back)[key] for key in flat(base)} == flat(base)
    # What the other version of transformers reads has come to it.
    assert model_from_config(back).known == model.known
    for version in (as_transformers_4, as_transformers_5):
        assert to_mcore_config(model_from_config(version(back))) == known


def as_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    if "text_config" in config:
        dtype = {"dtype": config.get("dtype") or config["torch_dtype"]}
        whole = {name: value for name, value in config.items() if name != "torch_dtype"}
        return {**whole, **dtype, "text_config": as_transformers_5({**config["text_config"], **dtype})}
    new = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new.pop("partial_rotary_factor", None)
    return {**new, "dtype": config.get("dtype") or config["torch_dtype"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_can_be_made_without_a_source(name: str) -> None:
    model = model_from_config(make_config(name))
    known = to_mcore_config(model)
    # Of a tower, megatron's arguments say nothing.
    tower = {key: value for key, value in model.config.items() if key == "vision_config"}
    fresh = to_hf_config(model.architecture, known.transformer_config(), known.gpt, tower, is_value=model.is_value)
    assert to_mcore_config(model_from_config(fresh)) == known
    assert model_from_config(fresh).known == model.known


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize("live", [1.0, None])
def test_a_factor_of_one_changes_nothing_in_either_form(name: str, live: float | None) -> None:
    base = make_config(name, routed_scaling_factor=1.0)
    model = model_from_config(base)
    known = to_mcore_config(model)
    assert known.transformer["moe_router_topk_scaling_factor"] is None
    changed = {**known.transformer, "moe_router_topk_scaling_factor": live}
    assert to_hf_config(model.architecture, changed, known.gpt, base)["routed_scaling_factor"] == 1.0


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
        ("qwen2", {"add_qkv_bias": False}, "add_qkv_bias is False, but a config.json of qwen2 cannot express"),
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
    with pytest.raises(UnsupportedError, match=r"no class \.\.\.ForTokenClassification for glm4_moe"):
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


def test_groups_of_experts_by_softmax() -> None:
    assert transformer_of("deepseek_v2")["moe_router_num_groups"] == 4
    assert transformer_of("deepseek_v2")["moe_router_group_topk"] == 2
    assert transformer_of("deepseek_v2", topk_method="greedy")["moe_router_num_groups"] is None
    assert transformer_of("deepseek_v2", topk_group=4)["moe_router_num_groups"] is None
    lite = transformer_of("deepseek_v2-lite")
    assert (lite["moe_router_score_function"], lite["moe_router_pre_softmax"]) == ("softmax", True)
    assert (lite["q_lora_rank"], lite["moe_router_enable_expert_bias"]) == (None, False)


def test_rotated_parts_of_heads() -> None:
    # As MiniMax-M2 is published.
    published = {**make_config("minimax_m2"), "rope_theta": 5000000, "attn_type_list": [1] * 4, "num_mtp_modules": 3}
    del published["rope_parameters"]
    model = model_from_config(published)
    known = to_mcore_config(model)
    assert (known.gpt["rotary_percent"], known.gpt["rotary_base"]) == (0.5, 5000000)
    back = to_hf_config(model.architecture, known.transformer, {**known.gpt, "rotary_percent": 0.25}, published)
    assert (back["rotary_dim"], back["rope_parameters"]["partial_rotary_factor"]) == (4, 0.25)
    # As early files of Qwen3.5 have it, or none at all.
    qwen = {name: value for name, value in make_config("qwen3_5_text").items() if name != "rope_parameters"}
    assert to_mcore_config(model_from_config({**qwen, "rope_theta": 1e7})).gpt["rotary_percent"] == 0.25
    del published["rotary_dim"]
    assert to_mcore_config(model_from_config(published)).gpt["rotary_percent"] == 1.0


def test_what_positions_in_images_need_is_kept() -> None:
    base = make_config("qwen3_5_text")
    model = model_from_config(base)
    known = to_mcore_config(model)
    back = to_hf_config(model.architecture, known.transformer, {**known.gpt, "rotary_base": 7000}, base)
    assert back["rope_parameters"] == {**base["rope_parameters"], "rope_theta": 7000}


@pytest.mark.parametrize("name", ["deepseek_v3-mtp", "qwen3_5_text-mtp"])
def test_multi_token_prediction_that_is_not_written_is_not_announced(name: str) -> None:
    model = model_from_config(make_config(name))
    (field,) = (field for field in MTP_FIELDS if model.config.get(field))
    assert config_of_weights(model, torch.bfloat16, has_mtp=True)[field] == 1
    assert config_of_weights(model, torch.bfloat16, has_mtp=False)[field] == 0


def test_layers_of_a_hybrid_model() -> None:
    gpt = gpt_of("nemotron_h")
    assert gpt["hybrid_layer_pattern"] == "M*E-"
    assert gpt_of("nemotron_h-mtp")["hybrid_layer_pattern"] == "M*E-/*E"
    # As published, for code of their own and for older versions of transformers.
    published = {"layers_block_type": None, "hybrid_override_pattern": "M*E-"}
    assert gpt_of("nemotron_h", **published) == gpt
    assert gpt_of("nemotron_h", layers_block_type=["mamba", "attention", "moe", "mlp"]) == gpt
    dense = transformer_of("nemotron_h", layers_block_type=["mamba", "mlp"])
    assert (dense["num_layers"], dense["num_moe_experts"], "moe_ffn_hidden_size" in dense) == (2, None, False)


def test_which_layers_have_an_indexer() -> None:
    def schedule(**fields: Any) -> tuple[int, int]:
        values = transformer_of("glm_moe_dsa", **fields)
        return values["dsa_indexer_topk_freq"], values["dsa_indexer_skip_topk_offset"]

    assert schedule() == (1, 0)
    assert schedule(indexer_types=["full", "shared", "shared", "full"]) == (3, 1)
    assert schedule(indexer_types=None, index_topk_pattern="FFSF") == (2, 2)
    assert schedule(indexer_types=None, index_topk_freq=4, index_skip_topk_offset=3) == (4, 3)
    model = model_from_config(make_config("glm_moe_dsa-shared"))
    assert ["indexer" in kind for kind in model.layers] == [True, True, False, True]


def test_an_older_megatron_is_refused_by_name() -> None:
    model = model_from_config(make_config("deepseek_v32"))
    values = to_mcore_config(model)
    with pytest.raises(UnsupportedError, match=r"this version of megatron-core has no dsa_new, .* install"):
        replace(values, transformer={**values.transformer, "dsa_new": 1}).transformer_config()
    older = live("deepseek_v32")
    older.config = SimpleNamespace(
        **{name: value for name, value in vars(older.config).items() if name != "dsa_indexer_rope_interleaved"}
    )
    with pytest.raises(UnsupportedError, match="has no dsa_indexer_rope_interleaved"):
        check_model(older, model)


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


def test_kinds_of_more_layers_than_there_are() -> None:
    """Models that were made smaller may still have them."""
    kinds = ["sliding_attention", "full_attention"] * 3
    config = model_from_config({**make_config("gpt_oss"), "layer_types": kinds})
    assert to_mcore_config(config).transformer["window_attn_skip_freq"] == [1, 0, 1, 0]


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
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias is True"),
    ("seed_oss", {"mlp_bias": True}, "mlp_bias is True"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is False"),
    ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
    ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2, but only 1 can be converted"),
    (
        "qwen3_5_text",
        {"mtp_num_hidden_layers": 1, "layer_types": ["full_attention"] * 3 + ["linear_attention"]},
        "mtp_num_hidden_layers is 1, and the last layer has linear attention",
    ),
    ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
    ("qwen3_5_text-mtp", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
    ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
    ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("qwen3_5_moe_text", {"num_experts_per_tok": 1}, "add up to 1 with num_experts_per_tok 1"),
    ("minimax_m2", {"num_experts_per_tok": 1}, "add up to 1 with num_experts_per_tok 1"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, r"attn_type_list is \[1, 0, 1, 1\]: .* lightning attention"),
    ("minimax_m2", {"rotary_dim": 4}, "rotary_dim is 4, but partial_rotary_factor says that 8 elements"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is False"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm is False"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64"),
    ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
    ("minimax_m2", {"sliding_window": 8}, "sliding_window is 8"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    # As DeepSeek-V2 is published.
    (
        "deepseek_v2",
        {"n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3},
        "num_experts_per_tok 6 and topk_group 3, .* ranks groups by their 2 best experts",
    ),
    *(
        (name, {"text_config": {**make_config(name)["text_config"], "attention_bias": True}}, "attention_bias is True")
        for name in ("qwen3_vl", "qwen3_vl_moe")
    ),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ("llama", {"dtype": "int8"}, "dtype is 'int8'"),
    (
        "nemotron_h",
        {"layers_block_type": ["mlp", "conv"]},
        r"layers_block_type \(.*\) has unknown kinds of layers: conv$",
    ),
    ("nemotron_h", {"layers_block_type": None}, r"layers_block_type \(or hybrid_override_pattern\) is missing"),
    ("nemotron_h", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
    ("nemotron_h", {"use_bias": True}, "use_bias is True"),
    ("nemotron_h", {"conv_kernel": 3}, "conv_kernel is 3"),
    ("nemotron_h", {"sliding_window": 8}, "sliding_window is 8"),
    ("nemotron_h", {"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0.0, 1.0\]"),
    ("nemotron_h", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is missing, but the indexer"),
    ("deepseek_v32", {"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types is"),
    ("deepseek_v32", {"layer_types": 5}, "layer_types is 5"),
    ("deepseek_v32", {"layer_types": {"a": 1}}, "layer_types is {'a': 1}"),
    ("deepseek_v32", {"layer_types": ["full_attention"] * 4}, "layer_types is .*'full_attention'"),
    ("deepseek_v32", {"index_n_heads": None}, "index_n_heads is None"),
    ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types is .*'shared'"),
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
    factor = arguments.pop("seq_len_interpolation_factor", None)
    arguments["rotary_pos_emb"] = SimpleNamespace(seq_len_interpolation_factor=factor)
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
        ("qwen3", {"kv_channels": 8}, {}, "kv_channels is 8"),
        ("qwen3_moe", {"num_moe_experts": 8}, {}, "num_moe_experts is 8"),
        ("mixtral", {"moe_router_pre_softmax": True}, {}, "moe_router_pre_softmax is True"),
        ("qwen2", {}, {"rotary_base": 10000}, "rotary_base is 10000"),
        ("llama-3", {}, {"rope_scaling": False}, "rope_scaling is False"),
        ("qwen2", {}, {"share_embeddings_and_output_weights": True}, "share_embeddings_and_output_weights is True"),
        ("deepseek_v3-yarn", {"rotary_scaling_factor": 80}, {}, "rotary_scaling_factor is 80"),
        ("qwen2-linear", {}, {"seq_len_interpolation_factor": 2.0}, "seq_len_interpolation_factor is 2.0"),
        ("nemotron_h", {}, {"hybrid_layer_pattern": "M*|-E"}, r"hybrid_layer_pattern is 'M\*-E', but"),
        ("glm_moe_dsa", {"dsa_indexer_rope_interleaved": False}, {}, "dsa_indexer_rope_interleaved is False"),
    ],
)
def test_a_model_that_differs_is_refused(name: str, changes: dict[str, Any], gpt: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=message):
        check_model(live(name, gpt, **changes), model_from_config(make_config(name)))


def test_a_longer_context_may_change_the_rotary_base() -> None:
    known = model_from_config(make_config("qwen2"))
    [changed] = check_model(live("qwen2", {"rotary_base": 10000}), known, strict=False)
    assert (changed.name, changed.saved, changed.live) == ("rotary_base", 5000.0, 10000)
    with pytest.raises(CheckpointMismatchError, match="num_query_groups"):
        check_model(live("qwen2", {"rotary_base": 10000}, num_query_groups=2), known, strict=False)


@pytest.mark.parametrize(
    ("name", "gpt", "changes"),
    [("qwen2", {"position_embedding_type": "yarn"}, {}), ("deepseek_v3", {}, {"rope_type": "yarn"})],
)
def test_a_longer_context_may_rotate_by_yarn(name: str, gpt: dict[str, Any], changes: dict[str, Any]) -> None:
    known = model_from_config(make_config(name))
    assert all(each.may_change for each in check_model(live(name, gpt, **changes), known, strict=False))
    with pytest.raises(CheckpointMismatchError, match=next(iter({**gpt, **changes}))):
        check_model(live(name, gpt, **changes), known)


def test_the_windows_of_a_hybrid_model_are_those_of_its_attention() -> None:
    model = model_from_config(make_config("gpt_oss"))
    hybrid = live("gpt_oss", num_layers=8, window_attn_skip_freq=[1, 0, 0, 0, 1, 0, 0, 0])
    hybrid.hybrid_layer_pattern = "*E*|E*E*E/*E"
    check_model(hybrid, model)
    for wrong in ([1, 0, 1, 0], [1, 1, 0, 0, 0, 0, 0, 0], None):
        hybrid.config.window_attn_skip_freq = wrong
        with pytest.raises(CheckpointMismatchError, match="window_attn_skip_freq is"):
            check_model(hybrid, model)


def test_the_pattern_of_a_live_model_may_end_stages_and_leave_out_multi_token_prediction() -> None:
    model = model_from_config(make_config("nemotron_h-mtp"))
    check_model(live("nemotron_h-mtp", {"hybrid_layer_pattern": "M*|E-/*E"}), model)
    check_model(live("nemotron_h-mtp", {"hybrid_layer_pattern": "M*E-"}, mtp_num_layers=None), model)


def test_a_norm_without_an_epsilon_of_its_own_has_that_of_all() -> None:
    model = model_from_config(make_config("deepseek_v32"))
    check_model(live("deepseek_v32", dsa_indexer_k_norm_epsilon=None, dsa_indexer_rotate_activation=True), model)
    with pytest.raises(CheckpointMismatchError, match="dsa_indexer_k_norm_epsilon is 1e-05"):
        check_model(live("deepseek_v32", dsa_indexer_k_norm_epsilon=1e-5), model)


def test_multi_token_prediction_may_be_left_out() -> None:
    check_model(live("deepseek_v3-mtp", mtp_num_layers=None), model_from_config(make_config("deepseek_v3-mtp")))


@pytest.mark.parametrize("word", ["indexed_attention", "deepseek_sparse_attention"])
def test_either_word_for_attention_with_an_indexer(word: str) -> None:
    """transformers 5.17 writes the second one. A folder keeps the word that it has."""
    config = make_config("deepseek_v32")
    config["layer_types"] = [word] * config["num_hidden_layers"]
    model = model_from_config(config)
    known = to_mcore_config(model)
    assert known == to_mcore_config(model_from_config(make_config("deepseek_v32")))
    back = to_hf_config(model.architecture, known.transformer_config(), known.gpt, model.config)
    assert back["layer_types"] == config["layer_types"]
